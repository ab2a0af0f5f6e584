"""Local tensors on disk: they come back bit by bit, and a kill leaves what was marked."""

import pytest
import torch

from fedvlm.errors import DataError
from fedvlm.storage.shelf import Saved, Shelf

LIKE = {"skew": torch.zeros(2, 3), "age": torch.zeros((), dtype=torch.long)}
IDS = [f"client-{i}" for i in range(5)]


def one(number):
    return {"skew": torch.full((2, 3), float(number)), "age": torch.tensor(number)}


def same(found, number):
    return all(torch.equal(found[key], value) for key, value in one(number).items())


def test_what_is_put_comes_back_and_what_is_not_there_is_missing(tmp_path):
    shelf = Shelf(tmp_path / "local", IDS, LIKE)
    shelf.put({"client-3": one(3), "client-0": one(7)})
    assert same(shelf["client-3"], 3) and same(shelf["client-0"], 7)
    assert sorted(shelf) == ["client-0", "client-3"] and len(shelf) == 2
    assert shelf.get("client-1") is None and shelf.get("stranger") is None
    found = shelf["client-3"]
    found["skew"] += 1  # the caller's own
    assert same(shelf["client-3"], 3)
    shelf.close()
    assert not (tmp_path / "local").exists()


def test_what_was_marked_stays_however_often_it_is_written_later(tmp_path):
    shelf = Shelf(tmp_path / "local", IDS, LIKE)
    shelf.put({id: one(1) for id in IDS[:3]})
    marked = shelf.mark()
    for number in (2, 3, 4):
        shelf.put({"client-0": one(number), "client-4": one(number)})
    assert same(shelf["client-0"], 4)
    again = Shelf(tmp_path / "local", IDS, LIKE)
    again.back_to(marked)
    assert sorted(again) == IDS[:3]
    assert all(same(again[id], 1) for id in IDS[:3])


def test_tensors_of_other_shapes_are_refused_and_a_flipped_bit_is_seen(tmp_path):
    shelf = Shelf(tmp_path / "local", IDS, LIKE)
    with pytest.raises(DataError, match="client-1"):
        shelf.put({"client-1": {**one(1), "skew": torch.zeros(3, 2)}})
    shelf.put({"client-0": one(1)})
    with (tmp_path / "local").open("r+b") as file:
        file.seek(5)
        file.write(b"\x01")
    with pytest.raises(DataError, match="client-0"):
        shelf["client-0"]


def test_what_is_saved_is_read_client_by_client_and_others_have_what_all_began_with(tmp_path):
    shelf = Shelf(tmp_path / "local", [*IDS, "another"], LIKE)
    shelf.put({"client-3": one(3), "client-0": one(7), "another": one(9)})
    shelf.mark()
    shelf.put({"client-0": one(8)})
    order = IDS[::-1]
    places = shelf.save(tmp_path / "saved", order)
    saved = Saved(tmp_path / "saved", order, one(1), places)
    assert list(saved) == order and len(saved) == 5
    assert same(saved["client-0"], 8) and same(saved["client-3"], 3) and same(saved["client-1"], 1)
    saved["client-1"]["skew"] += 1  # the caller's own
    assert same(saved["client-1"], 1)
    body = bytearray((tmp_path / "saved").read_bytes())
    assert len(body) == 2 * shelf.size
    body[4] ^= 1
    (tmp_path / "saved").write_bytes(body)
    with pytest.raises(DataError, match="client-3"):
        saved["client-3"]
    (tmp_path / "saved").unlink()
    with pytest.raises(DataError, match="run again"):
        saved["client-0"]
