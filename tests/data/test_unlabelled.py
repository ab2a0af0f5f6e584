"""Samples without a label: how data name them, whose they are, and what keeps them out."""

import numpy as np
import pytest
from PIL import Image

from fedvlm.data import open_dataset
from fedvlm.data.arrays import from_arrays
from fedvlm.data.clients import Clients
from fedvlm.data.partition import SampleList, make_partition
from fedvlm.data.table import UNLABELLED
from fedvlm.encoders.store import open_store, save_store
from fedvlm.errors import DataError


def plant(root, names):
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)


def test_a_folder_called_unlabelled_beside_the_classes_has_images_without_a_label(tmp_path):
    plant(tmp_path, ["a/cat/1.png", "a/dog/2.png", "a/unlabelled/3.png", "b/cat/4.png", "b/dog/5.png"])
    data = open_dataset(str(tmp_path))
    assert data.classes == ("cat", "dog")
    assert data.labels.tolist() == [0, 1, UNLABELLED, 0, 1]
    assert data.domains.tolist() == ["a", "a", "a", "b", "b"]


def test_an_empty_label_of_a_manifest_is_no_class(tmp_path):
    plant(tmp_path, ["1.png", "2.png", "3.png"])
    (tmp_path / "rows.csv").write_text("path,label\n1.png,cat\n2.png,\n3.png,dog\n")
    data = open_dataset(f"manifest:{tmp_path / 'rows.csv'}")
    assert data.classes == ("cat", "dog") and data.labels.tolist() == [0, UNLABELLED, 1]


@pytest.mark.parametrize("name", ["unlabelled", "Unlabelled"])
def test_a_class_of_that_name_is_refused_with_the_remedy(tmp_path, name):
    plant(tmp_path, ["1.png", "2.png"])
    (tmp_path / "rows.csv").write_text(f"path,label\n1.png,cat\n2.png,{name}\n")
    with pytest.raises(DataError, match=f"'{name}' cannot be a class.*rename the class"):
        open_dataset(f"manifest:{tmp_path / 'rows.csv'}")


def test_data_without_any_label_are_refused(tmp_path):
    plant(tmp_path, ["unlabelled/1.png", "unlabelled/2.png"])
    with pytest.raises(DataError, match="no image has a label"):
        open_dataset(str(tmp_path))


def test_a_store_keeps_samples_without_a_label(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=x, y=np.array(["cat", "", "dog", ""]))
    table = open_store(tmp_path / "rows.npz")
    assert table.classes == ("cat", "dog") and table.labels.tolist() == [0, UNLABELLED, 1, UNLABELLED]
    again = open_store(save_store(tmp_path / "again", table))
    assert again.labels.tolist() == table.labels.tolist()
    assert open_store(tmp_path / "rows.npz", ["dog", "cat"]).labels.tolist() == [1, UNLABELLED, 0, UNLABELLED]


def test_a_third_array_of_a_client_has_no_labels():
    draw = np.random.default_rng(0)
    table = from_arrays(
        {"a": (draw.normal(size=(3, 4)), [0, 1, 0], draw.normal(size=(2, 4))), "b": (draw.normal(size=(2, 4)), [1, 0])}
    )
    assert table.labels.tolist() == [0, 1, 0, 1, 0, UNLABELLED, UNLABELLED]
    assert table.clients.tolist() == ["a", "a", "a", "b", "b", "a", "a"]


def listed(labels, owners, content=None, groups=None, splits=None):
    n_samples = len(labels)
    return SampleList(
        ("cat", "dog"),
        np.array(labels),
        np.array(owners),
        np.array(owners),
        np.array([""] * n_samples if splits is None else splits),
        content or [f"{number:064x}" for number in range(n_samples)],
        groups,
    )


LABELS = [0, 1] * 20
OWNERS = ["a", "a", "b", "b"] * 10


@pytest.mark.parametrize("partition", ["own", "domain"])
def test_a_client_gets_the_samples_that_the_data_give_it(partition):
    table = listed([*LABELS, *[UNLABELLED] * 5], [*OWNERS, "a", "b", "b", "a", "b"])
    clients = make_partition(table, Clients(partition=partition), 0).clients
    assert {id: client.unlabelled.tolist() for id, client in clients.items()} == {"a": [40, 43], "b": [41, 42, 44]}


def test_samples_without_a_label_change_no_split_of_the_others():
    clients = Clients(partition="own")
    plain = make_partition(listed(LABELS, OWNERS), clients, 0)
    more = make_partition(listed([*LABELS, UNLABELLED], [*OWNERS, "a"]), clients, 0)
    for id, client in plain.clients.items():
        for split in ("train", "validation", "test"):
            assert getattr(client, split).tolist() == getattr(more.clients[id], split).tolist()


def test_where_nobody_owns_them_they_are_divided_evenly():
    table = listed([*LABELS, *[UNLABELLED] * 8], [*OWNERS, *"abababab"])
    clients = make_partition(table, Clients(partition="iid", count=4), 0).clients
    parts = [client.unlabelled.tolist() for client in clients.values()]
    assert sorted(row for part in parts for row in part) == list(range(40, 48))
    assert [len(part) for part in parts] == [2, 2, 2, 2]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_an_image_or_a_group_that_is_held_out_is_dropped(split):
    table = listed(LABELS, OWNERS)
    held_out = int(getattr(make_partition(table, Clients(partition="own"), 0).clients["b"], split)[0])
    content = [*table.content, table.content[held_out], f"{77:064x}"]
    twins = listed([*LABELS, UNLABELLED, UNLABELLED], [*OWNERS, "a", "a"], content)
    partition = make_partition(twins, Clients(partition="own"), 0)
    assert partition.clients["a"].unlabelled.tolist() == [41] and partition.dropped == 1
    groups = np.array([f"patient {number}" for number in range(40)])
    grouped = listed(LABELS, OWNERS, groups=groups)
    held_out = int(getattr(make_partition(grouped, Clients(partition="own"), 0).clients["a"], split)[0])
    same = listed(
        [*LABELS, UNLABELLED, UNLABELLED], [*OWNERS, "a", "a"], groups=np.array([*groups, groups[held_out], ""])
    )
    assert make_partition(same, Clients(partition="own"), 0).clients["a"].unlabelled.tolist() == [41]


def test_samples_that_the_data_mark_for_testing_are_not_learnt_from():
    splits = ["train", "train", "test", "validation"] * 10
    owners = [*"aabb"] * 10
    table = listed([*LABELS, UNLABELLED, UNLABELLED], [*owners, "a", "a"], splits=[*splits, "test", "train"])
    table = listed(table.labels, ["a"] * 42, splits=table.splits)
    assert make_partition(table, Clients(partition="own"), 0).clients["a"].unlabelled.tolist() == [41]
