"""Flipped bits and missing ends of all that a federation writes or sends are found."""

from contextlib import suppress
from random import Random

import numpy as np
import pytest

from fedvlm.deploy.site.ledger import Ledger
from fedvlm.engines.flower.messages import Message, from_bytes, seal, to_bytes, unseal
from fedvlm.report.page.render import write_page
from fedvlm.report.runs import read_page
from fedvlm.report.verify import verify_files
from fedvlm.storage.files import read_json, read_tensors

FLIPS, CUTS = 80, 20


def damaged(data, start=0, end=None):
    """The bytes between two places with a bit changed, or all of them cut short."""
    random, end = Random(0), len(data) if end is None else end
    for _ in range(FLIPS):
        place = random.randrange(start, end)
        yield data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]
    for _ in range(CUTS):
        yield data[: random.randrange(start, end)]


def unnoticed(path, read, *skipped_ranges):
    """How many damaged versions of a file are read, and as something else than was written."""
    intact = path.read_bytes()
    expected, passed = read(), 0
    for bad in damaged(intact, *skipped_ranges):
        path.write_bytes(bad)
        with suppress(Exception):
            passed += read() != expected
    path.write_bytes(intact)
    return passed


@pytest.fixture(scope="module")
def place(tmp_path_factory, rows_like, place_of):
    place = place_of(tmp_path_factory.mktemp("damage"), rows_like())
    place.result = place.run()
    return place


def test_every_file_of_a_deployed_record(place):
    folder = place.folder / "run"
    files = [file for file in folder.rglob("*") if file.is_file() and file.name[0] != "."]
    assert len(files) == 6
    for path in files:
        assert unnoticed(path, lambda: sound(folder, files)) == 0, path


def sound(folder, files):
    """What the files say, once `fedvlm verify` has nothing against them."""
    assert verify_files(str(folder))[1] == []
    return [path.read_bytes() for path in files]


def test_every_sealed_file_of_a_sites_kit(place):
    site = place.site("art")
    tensors, words = list(site.rglob("*.safetensors")), list((site / "state").rglob("*.json"))
    names = {file.name for file in (*tensors, *words)}
    assert names == {
        "classifier.safetensors",
        "local.safetensors",
        "reference.safetensors",
        "samples.safetensors",
        "training.json",
    }
    for path in tensors:
        assert unnoticed(path, lambda path=path: (read_tensors(path), path.read_bytes())[1]) == 0
    for path in words:
        assert unnoticed(path, lambda path=path: (read_json(path), path.read_bytes())[1]) == 0


def test_the_ledger_or_its_head_says_so(place):
    ledger = Ledger(place.site("art"))
    head = ledger.read().head

    def read():
        history = ledger.read()
        assert not history.broken and not history.torn and history.head == head
        return history.lines

    assert unnoticed(ledger.path, read) == 0


def test_the_runs_inside_a_report(place):
    path = write_page([place.result], place.folder / "page.html")
    data = path.read_bytes()
    start = data.index(b">", data.index(b'id="fedvlm"')) + 1
    inside = start, data.index(b"</script>", start)
    assert unnoticed(path, lambda: [entry.run for entry in read_page(path)], *inside) == 0


def test_a_message_is_refused_or_the_same():
    arrays = {"head": np.arange(64, dtype=np.float32).reshape(4, 16), "count": np.array([3])}
    message = seal(Message({"kind": "round", "round": 3, "scores": {"loss": 0.25}}, arrays))
    intact = to_bytes(message)
    for bad in damaged(intact):
        try:
            decoded = unseal(from_bytes(bad), "here")
        except Exception:
            continue
        assert decoded.header == message.header
        assert all(np.array_equal(decoded.arrays[key], arrays[key]) for key in arrays)
