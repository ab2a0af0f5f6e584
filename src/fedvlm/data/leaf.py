"""FEMNIST as LEAF writes it: JSON of writers, each with images as lists of grey values."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedvlm.data.sources import Pixels
from fedvlm.data.table import Dataset, split_column, string_column
from fedvlm.errors import DataError

CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
IMAGE_SIDE = 28


def is_leaf(folder: Path) -> bool:
    """Whether a folder holds LEAF's files; any other .json says nothing about its images."""
    for file in (*folder.glob("*.json"), *folder.glob("train/*.json")):
        if not file.is_file():  # a FIFO would wait for ever
            continue
        with file.open("rb") as stream:
            start = stream.read(4096)
        if b'"users"' in start or b'"user_data"' in start:
            return True
    return False


def read_leaf(path: str | Path) -> Dataset:
    """A folder of LEAF's FEMNIST; writers are clients, train/ and test/ folders are splits.

    Characters nobody wrote are no classes, so that a sample of digits has ten.
    """
    root = Path(path)
    split = (root / "train").is_dir() and (root / "test").is_dir()
    folders = {name: root / name for name in ("train", "test")} if split else {"": root}
    pixels, labels, writers, names, splits = [], [], [], [], []
    for part, folder in folders.items():
        for file in sorted(json_file for json_file in folder.glob("*.json") if json_file.is_file()):
            for writer, (x, y) in sorted(_writers(file).items()):
                pixels.append(x)
                labels += y
                writers += [writer] * len(y)
                names += [f"{file.relative_to(root)}:{writer}[{row}]" for row in range(len(y))]
                splits += [part] * len(y)
    if not labels:
        raise DataError(
            f"{root} has no LEAF data; name the folder with its .json files, or the one with train/ and test/"
        )
    source = Pixels(np.concatenate(pixels), names)
    present, ids = np.unique(np.array(labels, dtype=np.int64), return_inverse=True)
    return Dataset(  # not through `tabulate`: A and a are two classes here, by their numbers
        name=root.name,
        classes=tuple(CLASSES[label] for label in present),
        source=source,
        labels=ids.astype(np.int64),
        domains=string_column(None, len(labels)),
        clients=string_column(writers, len(labels)),
        splits=split_column(root.name, source, splits, len(labels)),
        templates=("a picture of the character: {}",),
    )


def _writers(file: Path) -> dict[str, tuple[NDArray[np.uint8], list[int]]]:
    """Images (rows, 28, 28) and labels of each writer of one file."""
    writers = {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))["user_data"]
        for writer, rows in data.items():
            x = np.asarray(rows["x"], dtype=np.float64).reshape(-1, IMAGE_SIDE, IMAGE_SIDE)
            y = [int(label) for label in rows["y"]]
            if len(x) != len(y) or not np.isfinite(x).all() or x.min() < 0 or x.max() > 1:
                raise ValueError(f"writer {writer}: {len(x)} images, {len(y)} labels")
            if y and not 0 <= min(y) <= max(y) < len(CLASSES):
                raise ValueError(f"writer {writer}: labels {min(y)} to {max(y)}")
            writers[str(writer)] = np.rint(x * 255).astype(np.uint8), y
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(
            f"{file} is not LEAF's FEMNIST ({type(error).__name__}: {error}); each writer has x, "
            f"lists of {IMAGE_SIDE * IMAGE_SIDE} values from 0 to 1, and y, labels from 0 to {len(CLASSES) - 1}"
        ) from error
    return writers
