"""Manifests, CoOp, LEAF, the datasets library and names, and what may be wrong with each."""

import json
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from fedvlm.data import open_dataset
from fedvlm.data.clients import Clients
from fedvlm.data.partition import list_samples, make_partition
from fedvlm.data.table import match_classes
from fedvlm.deploy.site.training import _map_labels as own_labels
from fedvlm.errors import DataError, FedVLMError, SettingsError
from tests.helpers.trees import grid, image, make_zip, plant

PATHS = grid(["art", "photo"], ["cat", "dog"])


# Manifests


def write_csv(root: Path, lines: list[str]) -> str:
    plant(root, ["a/1.png", "a/2.png", "b/3.png"])
    (root / "rows.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    return f"manifest:{root / 'rows.csv'}"


def test_a_manifest_gives_every_column(tmp_path):
    header = "path,label,client,domain,split,remark"
    lines = [header, "a/1.png,dog,ann,photo,train,x", '"a/2.png","cat",ann,photo,val,', ""]
    data = open_dataset(write_csv(tmp_path, [*lines, "b/3.png,dog,bob,art,test,"]))
    assert data.classes == ("cat", "dog")
    assert data.labels.tolist() == [1, 0, 1]
    assert data.clients.tolist() == ["ann", "ann", "bob"]
    assert data.domains.tolist() == ["photo", "photo", "art"]
    assert data.splits.tolist() == ["train", "validation", "test"]
    assert data.source.read(2) == image("b/3.png")


def test_a_parquet_manifest_equals_the_csv(tmp_path):
    name = write_csv(tmp_path, ["path,label,client", "a/1.png,0,7", "a/2.png,1,8"])
    table = {"path": ["a/1.png", "a/2.png"], "label": [0, 1], "client": [7, 8]}
    parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    text, binary = open_dataset(name), open_dataset(str(tmp_path / "rows.parquet"))
    assert text.classes == binary.classes == ("0", "1")
    assert text.clients.tolist() == binary.clients.tolist() == ["7", "8"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["path,class", "a/1.png,dog"], "has no column 'label'; it has path, class"),
        (["label", "dog"], "has no column 'path'"),
        (["path,label", "../a/1.png,dog"], r"row 1 names '\.\./a/1.png', which is not below"),
        (["path,label", "/a/1.png,dog"], "row 1 names '/a/1.png', which is not below"),
        (["path,label", "a/1.png,dog", "a/9.png,cat"], "row 2 names 'a/9.png', which is not there"),
        (["path,label", "a/1.png,"], "no image has a label, as a/1.png"),
        (["path,label", "a/1.png"], "row 1 has 1 cells and the header 2"),
        (["path,label,split", "a/1.png,dog,dev"], "a/1.png has the split 'dev'"),
        (["path,label", "a/1.png,Dog", "a/2.png,dog"], "differ only in case"),
        (["path,label"], "has no images"),
        ([], "is empty"),
    ],
)
def test_manifests_that_are_wrong_say_where(tmp_path, lines, message):
    name = write_csv(tmp_path / "data", lines) if lines else f"manifest:{tmp_path / 'rows.csv'}"
    if not lines:
        (tmp_path / "rows.csv").write_text("")
    with pytest.raises(DataError, match=message):
        open_dataset(name)


def test_a_manifest_does_not_follow_links_out_of_its_folder(tmp_path):
    plant(tmp_path, ["secret.png"])
    name = write_csv(tmp_path / "data", ["path,label", "a/out.png,dog"])
    (tmp_path / "data/a/out.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(DataError, match=r"'a/out\.png', which is not below"):
        open_dataset(name)


# CoOp and LEAF


def write_coop(root: Path, **parts: list[list[object]]) -> str:
    plant(root / "images", ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/2.jpg"])
    (root / "split_zhou_Pets.json").write_text(json.dumps(parts))
    return f"coop:{root / 'split_zhou_Pets.json'}"


def test_a_split_of_coop_gives_labels_classes_and_splits(tmp_path):
    name = write_coop(
        tmp_path,
        train=[["dog/1.jpg", 0, "dog"], ["cat/1.jpg", 1, "cat"]],
        val=[["cat/2.jpg", 1, "cat"]],
        test=[["dog/2.jpg", 0, "dog"]],
    )
    data = open_dataset(name)
    assert data.name == "Pets"
    assert data.classes == ("dog", "cat")
    assert data.labels.tolist() == [0, 1, 1, 0]
    assert data.splits.tolist() == ["train", "train", "validation", "test"]
    assert data.source.read(0) == image("dog/1.jpg")
    assert open_dataset(name, images=tmp_path / "images").source.read(3) == image("dog/2.jpg")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["dog/1.jpg", 0, "dog"], ["cat/1.jpg", 0, "cat"]], "label 0 is 'dog' and, at cat/1.jpg"),
        ([["dog/1.jpg", 0, "dog"], ["cat/1.jpg", 2, "cat"]], "not 0, 1, 2"),
        ([["dog/1.jpg", 0, "dog"], ["../../x.jpg", 0, "dog"]], "which is not below"),
        ([["bird/1.jpg", 0, "bird"]], "name the folder of the images as images"),
        ([["dog/1.jpg", 0]], "is not a split file of CoOp"),
        ([], "lists no images"),
    ],
)
def test_splits_of_coop_that_are_wrong_are_refused(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        open_dataset(write_coop(tmp_path, train=rows))


def write_leaf(folder: Path, writers: dict[str, list[int]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        writer: {"x": [[label / 61] * 783 + [1.0] for label in labels], "y": labels}
        for writer, labels in writers.items()
    }
    users = list(writers)
    counts = [len(labels) for labels in writers.values()]
    body = {"users": users, "num_samples": counts, "user_data": data}
    (folder / "all_data_0.json").write_text(json.dumps(body))
    return folder


def test_writers_of_leaf_are_clients_and_their_pixels_images(tmp_path):
    data = open_dataset(f"leaf:{write_leaf(tmp_path, {'f2': [36, 0], 'f1': [10]})}")
    assert data.clients.tolist() == ["f1", "f2", "f2"]
    assert [data.classes[label] for label in data.labels] == ["A", "a", "0"]
    with Image.open(BytesIO(data.source.read(1))) as image:
        image.load()
        assert (image.mode, image.size) == ("L", (28, 28))
        pixels = np.asarray(image)
    assert pixels[0, 0] == round(255 * 36 / 61)
    assert pixels[27, 27] == 255


def test_train_and_test_of_leaf_are_splits(tmp_path):
    write_leaf(tmp_path / "train", {"f1": [0, 1]})
    write_leaf(tmp_path / "test", {"f1": [1]})
    assert open_dataset(str(tmp_path)).splits.tolist() == ["train", "train", "test"]


def test_json_that_is_not_leaf_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no LEAF data"):
        open_dataset(f"leaf:{tmp_path}")
    with pytest.raises(DataError, match="labels from 0 to 61"):
        open_dataset(f"leaf:{write_leaf(tmp_path, {'f1': [62]})}")
    (tmp_path / "all_data_0.json").write_text('{"user_data": {"f": {"x": [[0.5]], "y": [1]}}}')
    with pytest.raises(DataError, match="is not LEAF's FEMNIST"):
        open_dataset(str(tmp_path))


# The datasets library


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    datasets.disable_progress_bars()
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "label": datasets.ClassLabel(names=["zebra", "ant"]),
            "domain": datasets.Value("string"),
            "writer_id": datasets.Value("int64"),
        }
    )

    def part(rows: int) -> object:
        columns = {
            "img": [{"bytes": image(rows, row), "path": None} for row in range(rows)],
            "label": [row % 2 for row in range(rows)],
            "domain": ["art"] * rows,
            "writer_id": list(range(rows)),
        }
        return datasets.Dataset.from_dict(columns, features=features)

    root = tmp_path_factory.mktemp("hub")
    datasets.DatasetDict({"train": part(4), "test": part(2)}).save_to_disk(root / "both")
    part(4).save_to_disk(root / "one")
    return root


def test_a_saved_data_set_keeps_bytes_names_and_splits(saved):
    data = open_dataset(str(saved / "both"))
    assert data.classes == ("zebra", "ant")
    assert data.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.splits.tolist() == ["train"] * 4 + ["test"] * 2
    assert data.clients.tolist() == ["0", "1", "2", "3", "0", "1"]
    assert set(data.domains.tolist()) == {"art"}
    assert data.source.read(5) == image(2, 1)


def test_a_single_split_is_no_split(saved):
    assert set(open_dataset(f"hub:{saved / 'one'}").splits.tolist()) == {""}


def test_columns_that_are_not_there_are_refused(saved):
    with pytest.raises(DataError, match="no column 'site' for the client; its columns are img"):
        open_dataset(str(saved / "one"), client="site")
    with pytest.raises(DataError, match="not images"):
        open_dataset(str(saved / "one"), image="domain")
    with pytest.raises(DataError, match="was not written by save_to_disk"):
        open_dataset(f"hub:{saved}")


def test_without_the_hub_the_way_around_is_said(monkeypatch):
    def offline(path: str) -> None:
        raise ConnectionError(f"Couldn't reach {path} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"some/set cannot be loaded .*save_to_disk.*hub:DIR"):
        open_dataset("hub:some/set")


# Names


def test_unknown_names_are_refused_with_the_nearest(tmp_path):
    with pytest.raises(SettingsError, match="and no data set is called 'pasc'; did you mean 'pacs'"):
        open_dataset("pasc")
    with pytest.raises(
        SettingsError, match="there is no file or folder 'nowhere', and no data set is called 'nowhere'"
    ):
        open_dataset("nowhere")
    with pytest.raises(DataError, match=r"there is no .*nowhere/at\.all"):
        open_dataset("nowhere/at.all")
    with pytest.raises(SettingsError, match="no option of folder data is called 'layuot'; did you"):
        open_dataset(str(plant(tmp_path, PATHS)), layuot="class")
    (tmp_path / "data.xyz").write_text("")
    with pytest.raises(DataError, match="the kind of .* is unknown"):
        open_dataset(str(tmp_path / "data.xyz"))


@pytest.mark.parametrize("kind", ["folder", "manifest", "coop", "leaf"])
def test_what_is_not_there_is_said_for_every_kind(tmp_path, kind):
    with pytest.raises(FedVLMError, match="nowhere"):
        open_dataset(f"{kind}:{tmp_path / 'nowhere'}")


def test_a_folder_is_divided_the_same_from_wherever_it_is_read(tmp_path):
    paths = grid(["art", "photo"], ["cat", "dog"], rows=10)
    folder = list_samples(open_dataset(str(plant(tmp_path / "tree", paths))))
    archive = list_samples(open_dataset(str(make_zip(tmp_path / "tree.zip", list(reversed(paths))))))
    counts: list[int] = []
    list_samples(open_dataset(str(tmp_path / "tree")), lambda done, total: counts.append(done))
    assert counts == list(range(1, 41))
    from_folder, from_archive = make_partition(folder, Clients(), 3), make_partition(archive, Clients(), 3)
    for key, member in from_folder.clients.items():
        assert [folder.content[row] for row in member.test] == [
            archive.content[row] for row in from_archive.clients[key].test
        ]


def test_a_stray_json_beside_the_pictures_does_not_make_a_folder_leaf(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / label / "a.png")
    (tmp_path / "notes.json").write_text('{"made": "by hand"}')
    assert open_dataset(str(tmp_path)).classes == ("cat", "dog")


def test_classes_that_differ_in_case_alone_are_two_and_others_are_found_in_any_case():
    assert match_classes(["a", "B"], ["A", "a", "b"]) == [1, 2]
    assert match_classes(["alarm_clock", "c"], ["Alarm_Clock"]) == [0, -1]


def test_a_site_labels_characters_that_differ_in_case_alone_as_the_experiment_counts_them(tmp_path):
    writer = {"x": [[0.5] * 784] * 3, "y": [10, 36, 10]}  # A, a and A once more
    (tmp_path / "all_data.json").write_text(json.dumps({"user_data": {"f1": writer}}))
    data = open_dataset(f"leaf:{tmp_path}")
    assert data.classes == ("A", "a")
    assert own_labels(data, ["a", "A"], "site")["labels"].tolist() == [1, 0, 1]
