"""Every data set of the catalogue, opened from a small tree that is laid out as it is."""

import json
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from fedvlm.data import open_dataset
from fedvlm.data.catalogue import PHOTO, PICTURE, Entry, add, catalogue
from fedvlm.errors import DataError, SettingsError
from tests.helpers.trees import image, plant

ENTRIES = {name: entry for name, entry in catalogue().items() if name != "demo"}
WORDS = {"*": "images", "split": "Training"}
ROOT = Path(__file__).parents[2]


def folder_of(entry: Entry, classes: tuple[str, ...]) -> list[str]:
    """An image of each class in each domain, as the entry's layout says."""
    words = entry.layout.split("|")[0].split("/")
    paths = []
    for domain in entry.domains or ("somewhere",):
        for name in classes:
            names = {**WORDS, "domain": domain, "class": name}
            paths.append("/".join(names[word] for word in words) + "/1.png")
    return sorted(set(paths))


def build(root: Path, entry: Entry, classes: tuple[str, ...]) -> Path:
    """A small copy of a data set: LEAF, a split file of CoOp, or folders."""
    if entry.layout == "leaf":
        root.mkdir(parents=True, exist_ok=True)
        labels = [*map(int, classes), 40]  # and a letter, which the digits leave out
        writer = {"x": [[0.5] * 784 for _ in labels], "y": labels}
        (root / "all_data.json").write_text(json.dumps({"user_data": {"f1": writer}}))
        return root
    if entry.split_file:
        paths = [f"{name}/1.jpg" for name in classes]
        plant(root / "images", paths)
        rows = [[path, label, classes[label]] for label, path in enumerate(paths)]
        (root / entry.split_file).write_text(json.dumps({"train": rows, "val": [], "test": []}))
        return root
    return plant(root, folder_of(entry, classes))


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_opens_with_its_classes_in_order(name, tmp_path):
    entry = ENTRIES[name]
    data = open_dataset(name, root=build(tmp_path, entry, entry.classes), check=False)
    assert data.name == name
    assert data.classes == tuple(class_name.replace("_", " ") for class_name in entry.classes)
    assert len(data.source) == len(data.labels) == len(data.clients)
    assert sorted(set(data.labels.tolist())) == list(range(len(entry.classes)))
    assert set(entry.domains or data.domains.tolist()) == set(data.domains.tolist())
    assert data.templates == entry.templates
    assert data.source.read(len(data.labels) - 1).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.total])
def test_too_few_pictures_are_counted_and_the_source_is_said(name, tmp_path):
    entry = ENTRIES[name]
    root = build(tmp_path, entry, entry.classes)
    with pytest.raises(DataError, match=f"of {entry.total:,} in all") as caught:
        open_dataset(name, root=root)
    assert entry.home in str(caught.value)
    assert "check = false" in str(caught.value)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_missing_class_is_named(name, tmp_path):
    entry = ENTRIES[name]
    root = build(tmp_path, entry, entry.classes[:-1])
    lost = re.escape(entry.classes[-1])
    with pytest.raises(DataError, match=f"it lacks {lost}|class {lost!r}"):
        open_dataset(name, root=root, check=False)


def test_every_entry_says_where_to_get_it_and_what_papers_do_with_it():
    for name, entry in ENTRIES.items():
        assert name == entry.name
        assert entry.home
        assert entry.protocol
        assert entry.classes
        assert len(set(entry.classes)) == len(entry.classes)
        assert all(template.count("{}") == 1 for template in entry.templates)
        with pytest.raises(DataError, match=f"{name} is not shipped: get it from"):
            open_dataset(name)


def test_templates_are_word_for_word_those_of_the_papers():
    for name in ("pacs", "office-home", "vlcs"):
        assert catalogue()[name].templates == ("a picture of a {}",)
    assert open_dataset("demo").templates == ("a picture of a {}",)


@pytest.mark.parametrize(
    ("name", "classes", "rows"),
    [
        ("pacs", 7, 9991),
        ("office-home", 65, 15588),
        ("vlcs", 5, 10729),
        ("office-31", 31, 4110),
        ("modern-office-31", 31, 7210),
        ("office-caltech-10", 10, 2533),
        ("domainnet", 345, 586575),
        ("cifar100", 100, 60000),
        ("food101", 101, 101000),
        ("dtd", 47, 5640),
        ("caltech101", 100, 8242),
        ("flowers102", 102, 8189),
        ("oxford-pets", 37, 7349),
        ("brain-tumour", 4, 3264),
        ("hyper-kvasir", 23, 10662),
    ],
)
def test_well_known_sizes_are_right(name, classes, rows):
    assert (len(ENTRIES[name].classes), ENTRIES[name].total) == (classes, rows)


def test_spellings_of_domains_and_classes_do_not_matter(tmp_path):
    entry = ENTRIES["office-home"]
    respelled = [class_name.lower().replace("_", " ") for class_name in entry.classes]
    paths = [f"{d}/{c}/1.png" for d in ("Art", "clipart", "Product", "RealWorld") for c in respelled]
    data = open_dataset("office-home", root=plant(tmp_path, paths), check=False)
    assert data.classes[0] == "Alarm Clock"
    assert sorted(set(data.domains.tolist())) == sorted(entry.domains)


def test_caltech_leaves_two_classes_out_and_renames_four(tmp_path):
    entry = ENTRIES["caltech101"]
    former = {new: old for old, new in entry.aliases.items()}
    folders = [former.get(class_name, class_name) for class_name in entry.classes]
    paths = [f"{class_name}/1.png" for class_name in (*folders, "BACKGROUND_Google", "Faces_easy")]
    data = open_dataset("caltech101", root=plant(tmp_path, paths), check=False)
    assert data.classes[:3] == ("face", "leopard", "motorbike")
    assert len(data.labels) == 100
    assert data.source.name(int(data.labels.tolist().index(0))) == "Faces/1.png"


def test_ten_classes_of_domainnet_are_taken_out_of_all(tmp_path):
    entry = ENTRIES["domainnet-10"]
    root = build(tmp_path, entry, (*entry.classes, "aircraft_carrier", "zigzag"))
    data = open_dataset("domainnet-10", root=root)
    assert len(data.labels) == 60
    assert data.source.name(0) == "clipart/bird/1.png"


def test_office_31_opens_with_and_without_the_folder_images(tmp_path):
    entry = ENTRIES["office-31"]
    plain = [f"{d}/{c}/1.png" for d in entry.domains for c in entry.classes]
    data = open_dataset("office-31", root=plant(tmp_path, plain), check=False)
    assert set(data.domains.tolist()) == set(entry.domains)


def test_strange_classes_and_domains_are_named(tmp_path):
    entry = ENTRIES["pacs"]
    root = build(tmp_path / "a", entry, (*entry.classes, "unicorn"))
    with pytest.raises(DataError, match="it also has unicorn"):
        open_dataset("pacs", root=root)
    paths = [path.replace("photo", "video") for path in folder_of(entry, entry.classes)]
    with pytest.raises(DataError, match=r"domains of .* are art_painting, cartoon, sketch, video"):
        open_dataset("pacs", root=plant(tmp_path / "b", paths))
    with pytest.raises(DataError, match="nowhere is not there, so pacs cannot be opened"):
        open_dataset("pacs", root=tmp_path / "nowhere")


def test_a_saved_copy_of_the_hub_is_read_by_the_entrys_columns(tmp_path):
    names = ["cra" if class_name == "crab" else class_name for class_name in ENTRIES["cifar100"].classes]
    features = {
        "img": datasets.Image(),
        "fine_label": datasets.ClassLabel(names=names),
        "coarse_label": datasets.ClassLabel(names=["all"]),
    }
    columns = {
        "img": [{"bytes": image(row), "path": None} for row in range(100)],
        "fine_label": list(range(100)),
        "coarse_label": [0] * 100,
    }
    part = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    part.save_to_disk(tmp_path / "cifar100")
    data = open_dataset("cifar100", root=tmp_path / "cifar100", check=False)
    assert data.classes[26] == "crab"
    assert data.labels.tolist() == list(range(100))


def test_digits_are_taken_out_of_the_hubs_62_characters(tmp_path):
    names = list("0123456789ABCabc")
    features = {
        "image": datasets.Image(),
        "writer_id": datasets.Value("string"),
        "character": datasets.ClassLabel(names=names),
    }
    columns = {
        "image": [{"bytes": image(row), "path": None} for row in range(16)],
        "writer_id": [f"f{row % 3}" for row in range(16)],
        "character": list(range(16)),
    }
    part = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    part.save_to_disk(tmp_path / "femnist")
    data = open_dataset("femnist", root=tmp_path / "femnist")
    assert data.classes == tuple("0123456789")
    assert data.clients.tolist() == [f"f{row % 3}" for row in range(10)]
    assert data.source.read(9) == image(9)
    assert open_dataset(f"hub:{tmp_path / 'femnist'}", label="character").classes == tuple(names)


def test_a_name_is_given_once():
    with pytest.raises(SettingsError, match="the name 'pacs' is taken"):
        add(Entry("pacs", "somewhere else"))
    assert add(ENTRIES["pacs"]) is ENTRIES["pacs"]


def test_the_example_of_a_new_data_set_runs():
    example = ROOT / "examples" / "new_dataset.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) < 60
    ran = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "slides: 60 images of healthy tissue, tumour" in ran.stdout
    assert "west: 12 rows to train, 4 to test" in ran.stdout


def test_sentences_around_a_class_are_those_of_the_papers_and_of_the_demo_model() -> None:
    assert PICTURE == ("a picture of a {}",)  # FedCLIP's, and of the demo's captions
    assert PHOTO == ("a photo of a {}.",)  # CoOp's
    assert open_dataset("demo").templates == PICTURE


def test_groups_stay_with_their_rows_where_classes_are_left_out(tmp_path):
    """A manifest may name lesions, and a data set of the catalogue be a part of its classes."""
    names = [*(class_name for class_name in ENTRIES["domainnet-10"].classes), "xylophone"]
    domains = ENTRIES["domainnet-10"].domains
    paths = [f"{name}-{domain}.png" for name in reversed(names) for domain in domains]
    plant(tmp_path, paths)
    lines = [f"{path},{path.rpartition('-')[0]},{path[:-4].rpartition('-')[2]},{path}" for path in paths]
    (tmp_path / "rows.csv").write_text("\n".join(["path,label,domain,group", *lines]) + "\n")
    data = open_dataset("domainnet-10", root=tmp_path / "rows.csv")
    assert len(data.labels) == len(paths) - len(domains)
    image_names = [data.source.name(row) for row in range(len(data.source))]
    assert data.groups.tolist() == [str(paths.index(name)) for name in image_names]
