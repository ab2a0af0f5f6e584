"""Local tensors on disk: they come back bit by bit, and a kill leaves what was marked."""

import pytest
import torch

from fedvlm.errors import DataError
from fedvlm.storage.large_tensors import ClientStateStore, SavedClientStates

LIKE = {"skew": torch.zeros(2, 3), "age": torch.zeros((), dtype=torch.long)}
IDS = [f"client-{i}" for i in range(5)]


def state(number):
    return {"skew": torch.full((2, 3), float(number)), "age": torch.tensor(number)}


def same(stored, number):
    return all(torch.equal(stored[key], value) for key, value in state(number).items())


def test_what_is_put_comes_back_and_what_is_not_there_is_missing(tmp_path):
    store = ClientStateStore(tmp_path / "local", IDS, LIKE)
    store.put({"client-3": state(3), "client-0": state(7)})
    assert same(store["client-3"], 3) and same(store["client-0"], 7)
    assert sorted(store) == ["client-0", "client-3"] and len(store) == 2
    assert store.get("client-1") is None and store.get("stranger") is None
    stored = store["client-3"]
    stored["skew"] += 1  # the caller's own
    assert same(store["client-3"], 3)
    store.close()
    assert not (tmp_path / "local").exists()


def test_what_was_marked_stays_however_often_it_is_written_later(tmp_path):
    store = ClientStateStore(tmp_path / "local", IDS, LIKE)
    store.put({id: state(1) for id in IDS[:3]})
    marked = store.commit()
    for number in (2, 3, 4):
        store.put({"client-0": state(number), "client-4": state(number)})
    assert same(store["client-0"], 4)
    again = ClientStateStore(tmp_path / "local", IDS, LIKE)
    again.restore(marked)
    assert sorted(again) == IDS[:3]
    assert all(same(again[id], 1) for id in IDS[:3])


def test_tensors_of_other_shapes_are_refused_and_a_flipped_bit_is_seen(tmp_path):
    store = ClientStateStore(tmp_path / "local", IDS, LIKE)
    with pytest.raises(DataError, match="client-1"):
        store.put({"client-1": {**state(1), "skew": torch.zeros(3, 2)}})
    store.put({"client-0": state(1)})
    with (tmp_path / "local").open("r+b") as file:
        file.seek(5)
        file.write(b"\x01")
    with pytest.raises(DataError, match="client-0"):
        store["client-0"]


def test_what_is_saved_is_read_client_by_client_and_others_have_what_all_began_with(tmp_path):
    store = ClientStateStore(tmp_path / "local", [*IDS, "another"], LIKE)
    store.put({"client-3": state(3), "client-0": state(7), "another": state(9)})
    store.commit()
    store.put({"client-0": state(8)})
    order = IDS[::-1]
    places = store.save(tmp_path / "saved", order)
    saved = SavedClientStates(tmp_path / "saved", order, state(1), places)
    assert list(saved) == order and len(saved) == 5
    assert same(saved["client-0"], 8) and same(saved["client-3"], 3) and same(saved["client-1"], 1)
    saved["client-1"]["skew"] += 1  # the caller's own
    assert same(saved["client-1"], 1)
    body = bytearray((tmp_path / "saved").read_bytes())
    assert len(body) == 2 * store.size
    body[4] ^= 1
    (tmp_path / "saved").write_bytes(body)
    with pytest.raises(DataError, match="client-3"):
        saved["client-3"]
    (tmp_path / "saved").unlink()
    with pytest.raises(DataError, match="run again"):
        saved["client-0"]
