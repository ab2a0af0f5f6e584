"""Records are whole or absent, and damage is noticed."""

import errno
import json
import os
import random
from pathlib import Path

import pytest
import torch

from fedvlm import record
from fedvlm.engines.state import State, pack_state, unpack_state
from fedvlm.errors import DataError, SettingsError
from fedvlm.record import Record
from fedvlm.storage.files import read_json, read_tensors, write_file, write_json, write_tensors

TENSORS = {"head": torch.arange(12.0).reshape(3, 4), "count": torch.tensor(3)}


def test_tensors_and_what_is_said_about_them_come_back(tmp_path):
    write_tensors(tmp_path / "t", TENSORS, {"round": 7})
    back, about = read_tensors(tmp_path / "t")
    assert about == {"round": 7}
    assert all(torch.equal(back[key], TENSORS[key]) for key in TENSORS)


def test_every_flipped_byte_is_refused(tmp_path):
    path = tmp_path / "t"
    write_tensors(path, TENSORS, {"round": 7})
    content = path.read_bytes()
    picker = random.Random(0)
    for _ in range(200):
        place = picker.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << picker.randrange(8)]) + content[place + 1 :])
        try:
            back, about = read_tensors(path)
        except DataError:
            continue
        # A flip in the header's padding or spelling may leave the same content.
        assert about == {"round": 7}
        assert all(torch.equal(back[key], TENSORS[key]) for key in TENSORS)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "t"
    write_tensors(path, TENSORS, {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="not a complete safetensors file"):
        read_tensors(path)


def test_a_full_disk_leaves_the_old_file_and_nothing_half_written(tmp_path, monkeypatch):
    path = tmp_path / "t"
    write_file(path, b"old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="the disk is full at .* resume"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["t"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write .*; choose another place"):
        write_file(tmp_path / "file" / "below", b"x")


def test_a_state_comes_back_whatever_the_clients_are_called(tmp_path):
    local = {"a/b": TENSORS, "é ü": {"head": torch.ones(2), "count": torch.tensor(1)}, "": TENSORS}
    best = {"a/b": {"head": torch.zeros(1)}}
    for state in (
        State(3, TENSORS, local, 0.5, 2, {"head": torch.ones(1)}, best),
        State(0, {}, {}),
        State(1, {}, {"x": {}}, 0.1, 1, {}, {"x": {}}),
    ):
        write_tensors(tmp_path / "s", *pack_state(state))
        back = unpack_state(*read_tensors(tmp_path / "s"))
        assert (back.round, back.best, back.best_round) == (
            state.round,
            state.best,
            state.best_round,
        )
        assert (back.best_shared is None) == (state.best_shared is None)
        assert back.local.keys() == state.local.keys()
        for id, tensors in state.local.items():
            assert tensors.keys() == back.local[id].keys()
            assert all(torch.equal(tensors[key], back.local[id][key]) for key in tensors)


def test_a_torn_line_is_left_out_and_lines_past_the_checkpoint_are_forgotten(tmp_path):
    notes = Record(tmp_path)
    for training, number in (("a", 0), ("b", 0), ("b", 1), ("b", 2)):
        notes.add_line({"training": training, "round": number})
    with open(notes.lines_path, "ab") as file:
        file.write(b'{"training": "b", "rou')
    assert len(notes.lines()) == 4
    notes.drop_lines_after("b", 1)
    assert [(line["training"], line["round"]) for line in notes.lines()] == [("a", 0), ("b", 0)]
    first = json.loads(notes.lines_path.read_text().splitlines()[0])
    assert first.keys() == {"training", "round", "checksum"}


def test_two_processes_do_not_work_in_one_directory(tmp_path):
    with (
        Record(tmp_path).lock(),
        pytest.raises(DataError, match="another process is working in"),
        Record(tmp_path).lock(),
    ):
        pass


def test_a_damaged_manifest_is_named(tmp_path):
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest.json is damaged .* run again"):
        read_json(tmp_path / "manifest.json")


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    (tmp_path / ".notes.txt").write_text("")
    with (
        pytest.raises(SettingsError, match="is not a run directory: it holds thesis.tex"),
        Record(tmp_path).lock(),
    ):
        pass
    assert sorted(os.listdir(tmp_path)) == [".notes.txt", "thesis.tex"]


def test_a_refused_run_leaves_no_directory(tmp_path):
    with pytest.raises(ValueError, match="refused"), Record(tmp_path / "run").lock():
        raise ValueError("refused")
    assert os.listdir(tmp_path) == []


def test_who_comes_at_the_same_moment_does_not_take_the_directory_away(tmp_path, monkeypatch):
    with Record(tmp_path / "run").lock():
        with monkeypatch.context() as patch:
            patch.setattr(Path, "exists", lambda path: False)  # as it was when both looked
            with (
                pytest.raises(DataError, match="another process is working in"),
                Record(tmp_path / "run").lock(),
            ):
                pass
        assert (tmp_path / "run" / ".lock").exists()


@pytest.mark.parametrize("number", [0, 1, None])
def test_a_record_of_another_format_is_refused_with_both_numbers(tmp_path, number):
    about = {"identity": {}, "encoder": "e", "rows": "r", "versions": {"fedvlm": "9.9"}}
    run = record.Record(tmp_path)
    run.start(about)
    assert run.manifest["format"] == record.RECORD_FORMAT
    stored = {key: value for key, value in run.manifest.items() if key != "format"}
    write_json(tmp_path / "manifest.json", stored if number is None else {**stored, "format": number})
    shown_number = "none" if number is None else number
    message = rf"format {shown_number}, and this fedvlm reads format {record.RECORD_FORMAT}; .*9\.9.*run again"
    for read in (lambda: record.Record(tmp_path).manifest, lambda: run.start(about)):
        with pytest.raises(DataError, match=message):
            read()
