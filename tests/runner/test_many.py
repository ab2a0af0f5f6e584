"""A crowd by the product's own path: rows in files, local tensors on disk, few numbers of each."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedvlm
from fedvlm.engines import client, loop
from fedvlm.engines import state as states
from fedvlm.storage import paged
from fedvlm.tensors import difference

METHOD = {"name": "fedot", "blocks": 4, "rounds": 3, "lr": 1e-3, "batch_size": 4}


@pytest.fixture
def settings(tmp_path):
    """40 clients of 7 to 12 rows, in a store of half-precision rows."""
    draw = torch.Generator().manual_seed(0)
    owners = np.repeat(np.arange(40), 7 + np.arange(40) % 6)
    x = torch.randn(len(owners), 16, generator=draw).half()
    y = torch.arange(len(owners)) % 3
    columns = {"x": x, "y": y, "clients": torch.from_numpy(owners), "text": torch.eye(3, 16)}
    save_file(columns, tmp_path / "rows.safetensors")
    return {
        "encoder": f"store:{tmp_path / 'rows.safetensors'}",
        "protocol": "own-test",
        "clients": {"partition": "own"},
        "fraction": 0.5,
        "workers": 1,
    }


def test_rows_in_files_give_the_bits_of_rows_in_memory(settings, files, tmp_path, monkeypatch):
    memory = fedvlm.run(METHOD, out=tmp_path / "memory", **settings)
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paged, "LARGE", 0)
    monkeypatch.setattr(paged, "STRETCH", 1 << 10)
    for workers in (1, 2):
        asked = {**settings, "workers": workers}
        found = fedvlm.run(METHOD, out=tmp_path / f"{workers}", **asked)
        assert files(found.folder) == files(memory.folder)


def test_a_crowd_has_its_accuracy_and_its_tensors_and_no_curves(settings, tmp_path, monkeypatch):
    few = fedvlm.run(METHOD, out=tmp_path / "few", **settings)
    monkeypatch.setattr(client, "CROWD", 5)
    monkeypatch.setattr(states, "SHELVED", 0)
    monkeypatch.setattr(loop, "PART", 7)
    crowd = fedvlm.run(METHOD, out=tmp_path / "crowd", **settings)
    assert crowd.tables == few.tables
    scores = crowd.trainings()["all"]["scores"]
    assert set(scores["0"]) == {"loss", "validation_rows", "validation_hits"} | {
        "test_rows",
        "test_hits",
    }
    known = few.trainings()["all"]["scores"]
    for id, one in scores.items():
        assert one["loss"] == pytest.approx(known[id]["loss"], rel=1e-5)
    (shared, local), (same, held) = (one.outcome("all") for one in (crowd, few))
    assert difference(shared, same) == 0 and list(local) == list(held)
    assert all(difference(local[id], held[id]) == 0 for id in held)


def test_uploads_summed_as_they_come_say_how_far_clients_agree(settings, tmp_path, monkeypatch):
    whole = fedvlm.run(METHOD, out=tmp_path / "whole", **settings)
    monkeypatch.setattr(loop, "BULK", 0)
    monkeypatch.setattr(loop, "PART", 6)
    parts = fedvlm.run(METHOD, out=tmp_path / "parts", **settings)
    for one, other in zip(whole.lines(), parts.lines(), strict=True):
        assert other["cosine"] == pytest.approx(one["cosine"], abs=1e-6)
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert list(other["clients"]) == list(one["clients"])
    (shared, local), (same, held) = (one.outcome("all") for one in (parts, whole))
    assert difference(shared, same) < 1e-5
    assert all(difference(local[id], held[id]) < 1e-4 for id in held)
