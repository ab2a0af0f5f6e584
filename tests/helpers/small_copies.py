"""Small copies of the papers' data sets, laid out on disk as the real ones are."""

import json
from pathlib import Path

import numpy as np

from fedvlm.data.catalogue import Entry, catalogue
from tests.helpers.trees import plant

SKIN = ("kaggle", "ham10000", "isic2019", "isic2019-test")
WRITERS = 80  # for 75 that train and 5 that nobody has seen
PARTS = {"train": 4, "val": 2, "test": 2}  # images of a class in a split file


def small_copy(root: Path, data: str, place: str) -> Path:
    """A copy of a data set of the catalogue at the place an experiment looks for it."""
    entry, folder = catalogue()[data], root / place
    if folder.exists():
        return folder
    if entry.split_file:
        return _coop(folder, entry)
    if data == "femnist":
        return _leaf(folder) if place.endswith("FEMNIST") else _writers(folder, entry)
    domains = tuple(entry.domains) or (SKIN if data == "skin-cancer" else ("all",))
    images_per_class = max(3, 160 // len(entry.classes) // len(domains))
    if entry.layout == "split/class":
        words = ("Training", "Testing") if data == "brain-tumour" else ("train", "test")
        sizes = {words[0]: max(5, 3 * images_per_class), words[1]: max(2, images_per_class)}
        kinds = [(part, name) for part in sizes for name in entry.classes]
        return plant(folder, [f"{p}/{name}/{n}.png" for p, name in kinds for n in range(sizes[p])])
    heads = [f"{domain}/" for domain in domains]
    if not entry.layout.startswith("domain"):
        heads = ["labelled/images/" if entry.layout.startswith("*") else ""]
    kinds = [(head, name) for head in heads for name in entry.classes]
    return plant(folder, [f"{head}{name}/{n}.png" for head, name in kinds for n in range(images_per_class)])


def _coop(folder: Path, entry: Entry) -> Path:
    lists: dict[str, list[list[object]]] = {part: [] for part in PARTS}
    paths = []
    for label, name in enumerate(entry.classes):
        numbers = iter(range(100))
        for part, count in PARTS.items():
            for _ in range(count):
                paths.append(f"{name}/{next(numbers)}.jpg")
                lists[part].append([paths[-1], label, name])
    plant(folder / "images", paths)
    (folder / entry.split_file).write_text(json.dumps(lists))
    return folder


def _writers(folder: Path, entry: Entry) -> Path:
    """Four writers with a folder per digit."""
    users = (f"user{n}" for n in (0, 25, 26, 33))
    return plant(folder, [f"{u}/{d}/{n}.png" for u in users for d in entry.classes for n in range(5)])


def _leaf(folder: Path) -> Path:
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    users = {
        f"f{number:04}": {
            "x": [np.round(draw.random(784), 2).tolist() for _ in range(10)],
            "y": list(range(10)),
        }
        for number in range(WRITERS)
    }
    text = json.dumps({"users": list(users), "user_data": users})
    (folder / "all_data.json").write_text(text)
    return folder


def small_store(root: Path, name: str) -> Path:
    """Embeddings in one file, with the arrays that the real one has."""
    path = root / name
    draw = np.random.default_rng(1)
    count = {"pacs": 7, "pets": 23, "calt": 100, "flow": 102}[name[:4]]
    middle = draw.normal(size=(count, 32))
    text = middle / np.linalg.norm(middle, axis=1, keepdims=True)

    def rows(y: np.ndarray) -> np.ndarray:
        return (middle[y] + 0.5 * draw.normal(size=(len(y), 32))).astype(np.float32)

    arrays: dict[str, np.ndarray] = {}
    if name.startswith("pacs"):
        entry = catalogue()["pacs"]
        places = [f"{d}/{c}/{n}.jpg" for d in entry.domains for c in entry.classes for n in range(12)]
        y = np.array([entry.classes.index(class_path.split("/")[1]) for class_path in places])
        named = [entry.classes.index(class_path) for class_path in entry.classes if class_path != "guitar"]
        arrays = {"features": rows(y), "paths": np.array(places), "text": text[named]}
        arrays["text_classes"] = np.array([entry.classes[n] for n in named])
    else:
        for part, per_class in (("train", 6), ("val", 4), ("test", 4)):
            arrays[f"{part}_y"] = np.repeat(np.arange(count), per_class)
            arrays[f"{part}_x"] = rows(arrays[f"{part}_y"])
        if not name.startswith("flow"):
            arrays["classes"] = np.array([f"kind {n}" for n in range(count)])
        if name.startswith("pets"):
            arrays["text"] = text
    np.savez(path, **arrays)
    return path
