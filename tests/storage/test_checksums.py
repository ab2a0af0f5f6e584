"""Every byte of what a run writes as JSON shows damage."""

import json
import math
from hashlib import sha256

import pytest

from fedvlm.errors import DataError
from fedvlm.record import Record
from fedvlm.storage.files import check_index, read_json, write_index, write_json

VALUE = {"a": [1, 2.5, float("inf")], "name": "é", "of": {"3": None}}


def flips(data):
    """The data with one bit changed, for every bit."""
    for place in range(len(data)):
        for bit in range(8):
            yield data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def test_any_flipped_bit_or_missing_end_of_a_json_file_is_refused(tmp_path):
    path = tmp_path / "manifest.json"
    write_json(path, VALUE)
    assert read_json(path) == VALUE
    content = path.read_bytes()
    for bad in (*flips(content), *(content[:end] for end in range(len(content)))):
        path.write_bytes(bad)
        with pytest.raises(DataError, match="is damaged"):
            read_json(path)


def test_json_has_a_line_for_each_client_and_reads_as_it_was(tmp_path):
    value = {"loss": 0.5, "bins": [1, 2, {"deep": None}], "é": {}}
    value = {"name": "a", "scores": {str(i): value for i in range(3)}, "none": {}, "l": [[1], value]}
    path = tmp_path / "a.json"
    write_json(path, value)
    assert read_json(path) == value and list(read_json(path)) == list(value)
    assert '  "1": {"loss": 0.5, "bins": [1, 2, {"deep": null}], "é": {}},' in (path.read_text().splitlines())
    write_json(path, {3: {4: math.inf}})
    assert read_json(path) == {"3": {"4": math.inf}}


def test_a_file_that_was_indented_all_through_is_read(tmp_path):
    value = {"scores": {"a": {"loss": 0.5, "bins": [1, 2]}}}
    body = json.dumps(value, indent=1)
    seal = sha256(body.encode()).hexdigest()
    path = tmp_path / "a.json"
    path.write_text(body[:-2] + f',\n "checksum": "{seal}"\n}}\n')
    assert read_json(path) == value


def test_json_of_earlier_versions_is_read(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(VALUE, indent=1))
    assert read_json(tmp_path / "result.json") == VALUE


def test_any_flipped_bit_of_a_line_is_refused_by_its_number(tmp_path):
    notes = Record(tmp_path)
    for number in range(2):
        notes.add_line({"training": "a", "round": number, "clients": {}})
    assert [line["round"] for line in notes.lines()] == [0, 1]
    first, second, _ = notes.lines_path.read_bytes().split(b"\n")
    for bad in flips(second):
        notes.lines_path.write_bytes(first + b"\n" + bad + b"\n")
        with pytest.raises(DataError, match="line 2 of .* is damaged"):
            notes.lines()


def test_line_after_a_torn_one_is_whole(tmp_path):
    notes = Record(tmp_path)
    notes.add_line({"training": "a", "round": 0})
    (tmp_path / "manifest.json").write_text("{}")
    with open(notes.lines_path, "ab") as file:
        file.write(b'{"training": "a", "rou')
    with notes.lock():
        notes.add_line({"training": "a", "round": 1})
    assert [line["round"] for line in notes.lines()] == [0, 1]


def test_index_names_what_changed_and_what_is_gone(tmp_path):
    for name in ("a", "b", "trainings/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_index(tmp_path)
    assert check_index(tmp_path) == {}
    (tmp_path / "later.html").write_text("a page")
    (tmp_path / "b").unlink()
    (tmp_path / "trainings/c").write_text("d")
    assert check_index(tmp_path) == {"b": "is missing", "trainings/c": "is not what was written"}
