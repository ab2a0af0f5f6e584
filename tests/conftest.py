"""What many tests stand on: a small federation in memory, and a cache of their own."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedvlm.core import METHODS
from fedvlm.data.table import EmbeddedTable

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test reads or fills the user's cache."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setitem(os.environ, "FEDVLM_CACHE", str(folder))


@pytest.fixture(autouse=True)
def own_methods():
    """A method that a test registers is gone after it; those of fedvlm stay, however late."""
    yield
    for name in [key for key, method_class in METHODS.items() if method_class.__module__.split(".")[0] != "fedvlm"]:
        del METHODS[name]


def make_rows(rows: int = 240, dim: int = 16, seed: int = 0) -> EmbeddedTable:
    """Four classes in three domains, each domain with a shift of its own."""
    draw = torch.Generator().manual_seed(seed)
    unit = torch.nn.functional.normalize
    text = unit(torch.randn(4, dim, generator=draw), dim=1)
    labels = torch.arange(rows) % 4
    domains = torch.arange(rows) // 4 % 3
    shift = 0.4 * torch.randn(3, dim, generator=draw)
    x = unit(text[labels] + shift[domains] + 0.3 * torch.randn(rows, dim, generator=draw), dim=1)
    empty = np.full(rows, "")
    return EmbeddedTable(
        name="toy",
        classes=("ant", "bee", "cat", "dog"),
        x=x,
        labels=labels.numpy(),
        domains=np.array(["art", "photo", "sketch"])[domains.numpy()],
        clients=empty,
        splits=empty,
        content=[f"{seed}-{i:04}" for i in range(rows)],
        scale=20.0,
        text=text,
        patches=None,
        encoder="toy@0",
        fingerprint=f"toy-{rows}-{dim}-{seed}",
    )


@pytest.fixture
def rows() -> EmbeddedTable:
    return make_rows()


@pytest.fixture(scope="session")
def rows_like() -> Callable[..., EmbeddedTable]:
    return make_rows


def run_files(folder: Path) -> tuple[list[dict], dict[str, bytes], dict]:
    """What a run says, without the times."""
    lines = [json.loads(text) for text in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"], line["checksum"]
    trainings = {path.name: path.read_bytes() for path in sorted((folder / "trainings").iterdir())}
    return lines, trainings, json.loads((folder / "result.json").read_text())


@pytest.fixture
def files() -> Callable[[Path], tuple]:
    return run_files
