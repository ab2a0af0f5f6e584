"""Embeddings as an API's user keeps them: a line per image, in .csv or .parquet."""

import json

import numpy as np
import pytest

from fedvlm.encoders.store import open_store
from fedvlm.errors import DataError

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
NAMES = ["no tumour", "méningiome", "no tumour", "glioma", "glioma", "méningiome"]
SITES = ["north", "north", "north", "south", "south", "south"]


def write_csv(path, head, lines, between=","):
    text = [between.join(map(str, line)) for line in (head, *lines)]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def numbered(path, between=",", x=X, names=NAMES):
    lines = [(i, *row, name, site) for i, (row, name, site) in enumerate(zip(x, names, SITES, strict=True))]
    return write_csv(path, ["id", "e0", "e1", "e2", "e3", "Label", "client"], lines, between)


def listed(path):
    cells = [f'"{json.dumps(row.tolist())}"' for row in X]
    return write_csv(path, ["embedding", "label", "client"], zip(cells, NAMES, SITES, strict=True))


def parquet(path):
    import pyarrow as arrow
    from pyarrow.parquet import write_table

    columns = {"id": list(range(6)), "embedding": X.tolist(), "label": NAMES, "client": SITES}
    write_table(arrow.table(columns), path)
    return path


@pytest.fixture
def plain(tmp_path):
    np.savez(tmp_path / "plain.npz", x=X, y=np.array(NAMES), clients=np.array(SITES))
    return open_store(tmp_path / "plain.npz")


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (numbered, "rows.csv"),
        (lambda path: numbered(path, ";"), "excel.csv"),
        (lambda path: numbered(path, "\t"), "tabs.csv"),
        (listed, "lists.csv"),
        (parquet, "rows.parquet"),
    ],
)
def test_every_form_of_a_table_holds_the_rows_of_the_arrays(plain, tmp_path, write, name):
    table = open_store(write(tmp_path / name))
    assert table.classes == plain.classes == ("glioma", "méningiome", "no tumour")
    assert np.array_equal(table.x, plain.x)
    assert table.labels.tolist() == plain.labels.tolist()
    assert table.clients.tolist() == SITES


@pytest.mark.parametrize("keys", [("embeddings", "label", "client"), ("features", "y", "clients")])
def test_arrays_may_be_called_as_a_tables_columns(plain, tmp_path, keys):
    values = (X, np.array(NAMES), np.array(SITES))
    np.savez(tmp_path / "a.npz", **dict(zip(keys, values, strict=True)))
    table = open_store(tmp_path / "a.npz")
    assert np.array_equal(table.x, plain.x) and table.clients.tolist() == SITES


def test_a_table_says_which_rows_are_of_one_patient_and_not_who(tmp_path):
    head, patients = ["e0", "e1", "label", "group"], ["Ann", "Ann", "Bob", "", "Cy", "Cy"]
    lines = [(*row[:2], name, patient) for row, name, patient in zip(X, NAMES, patients, strict=True)]
    table = open_store(write_csv(tmp_path / "rows.csv", head, lines))
    assert table.groups.tolist() == ["0", "0", "1", "", "2", "2"]


def test_a_blank_behind_a_name_makes_no_other_class(tmp_path):
    names = [name + " " * (i % 2) for i, name in enumerate(NAMES)]
    np.savez(tmp_path / "a.npz", x=X, y=np.array(names))
    assert open_store(tmp_path / "a.npz").classes == ("glioma", "méningiome", "no tumour")


def hole(row, column, value):
    x = X.astype(object)
    x[row, column] = value
    return x


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"x": hole(3, 1, "")}, "row 3 of x holds NaN"),
        ({"x": hole(3, 1, "nan")}, "row 3 of x holds NaN"),
        ({"x": hole(2, 0, "n/a")}, "row 2 has an embedding that is not numeric .*'n/a'"),
        ({"names": [*NAMES[:4], "", "glioma"]}, "row 4 has no label"),
    ],
)
def test_a_cell_that_does_not_fit_is_named_by_its_row(tmp_path, table, message):
    with pytest.raises(DataError, match=message):
        open_store(numbered(tmp_path / "rows.csv", **table))


@pytest.mark.parametrize(
    ("head", "lines", "message"),
    [
        (["id", "label"], [(0, "a")], "no embedding among its columns id, label"),
        (["e0", "e2", "label"], [(1, 2, "a")], "number columns without a gap"),
        (["e0", "e1", "label"], [(1, 2)], "row 1 has 2 cells and the header 3"),
        (["e0", "e1", "label"], [], "embeddings are in no row"),
        (["embedding", "label"], [('"[1, 2]"', "a"), ('"[1]"', "a")], r"\(1,\), \(2,\)"),
    ],
)
def test_a_table_without_an_embedding_says_what_it_takes(tmp_path, head, lines, message):
    with pytest.raises(DataError, match=message):
        open_store(write_csv(tmp_path / "rows.csv", head, lines))


def test_objects_in_arrays_are_told_how_to_be_saved(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=np.array(NAMES, dtype=object))
    with pytest.raises(DataError, match=r"y.astype\(str\)"):
        open_store(tmp_path / "a.npz")
