"""A crowd by the product's own path: rows in files, local tensors on disk, few numbers of each."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedvlm
from fedvlm.engines import client, loop
from fedvlm.engines import state as states
from fedvlm.storage import large_tensors
from fedvlm.tensors import max_relative_difference

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
    monkeypatch.setattr(large_tensors, "MAX_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(large_tensors, "CHUNK_BYTES", 1 << 10)
    for workers in (1, 2):
        run_settings = {**settings, "workers": workers}
        run = fedvlm.run(METHOD, out=tmp_path / f"{workers}", **run_settings)
        assert files(run.folder) == files(memory.folder)


def test_a_crowd_has_its_accuracy_and_its_tensors_and_no_curves(settings, tmp_path, monkeypatch):
    in_memory = fedvlm.run(METHOD, out=tmp_path / "few", **settings)
    monkeypatch.setattr(client, "MANY_CLIENTS", 5)
    monkeypatch.setattr(states, "MAX_LOCAL_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(loop, "CLIENTS_PER_PART", 7)
    on_disk = fedvlm.run(METHOD, out=tmp_path / "crowd", **settings)
    assert on_disk.tables == in_memory.tables
    scores = on_disk.trainings()["all"]["scores"]
    assert set(scores["0"]) == {"loss", "validation_rows", "validation_hits"} | {
        "test_rows",
        "test_hits",
    }
    scores_in_memory = in_memory.trainings()["all"]["scores"]
    for id, entry in scores.items():
        assert entry["loss"] == pytest.approx(scores_in_memory[id]["loss"], rel=1e-5)
    (shared, local), (same, held) = (entry.outcome("all") for entry in (on_disk, in_memory))
    assert max_relative_difference(shared, same) == 0 and list(local) == list(held)
    assert all(max_relative_difference(local[id], held[id]) == 0 for id in held)


def test_uploads_summed_as_they_come_say_how_far_clients_agree(settings, tmp_path, monkeypatch):
    in_memory = fedvlm.run(METHOD, out=tmp_path / "whole", **settings)
    monkeypatch.setattr(loop, "LARGE_ROUND_BYTES", 0)
    monkeypatch.setattr(loop, "CLIENTS_PER_PART", 6)
    parts = fedvlm.run(METHOD, out=tmp_path / "parts", **settings)
    for entry, chunked_line in zip(in_memory.lines(), parts.lines(), strict=True):
        assert chunked_line["cosine"] == pytest.approx(entry["cosine"], abs=1e-6)
        assert chunked_line["loss"] == pytest.approx(entry["loss"], rel=1e-5)
        assert list(chunked_line["clients"]) == list(entry["clients"])
    (shared, local), (same, held) = (entry.outcome("all") for entry in (parts, in_memory))
    assert max_relative_difference(shared, same) < 1e-5
    assert all(max_relative_difference(local[id], held[id]) < 1e-4 for id in held)
