"""Wall time and peak memory of a federation of PACS's sizes, on embeddings it makes; clients.py has many clients."""

import argparse
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from time import perf_counter

import numpy as np
import torch
from figures import report

import fedvlm
from fedvlm.data.table import EmbeddedTable

PACS = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}


def made(sizes: dict[str, int], classes: int, dim: int = 512) -> EmbeddedTable:
    """Rows around class centres, every client with a shift of its own."""
    draw = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize
    rows = sum(sizes.values())
    text = unit(torch.randn(classes, dim, generator=draw), dim=1)
    labels = torch.randint(classes, (rows,), generator=draw)
    ids = np.repeat(list(sizes), list(sizes.values()))
    x = torch.empty(rows, dim)
    first = 0
    for size in sizes.values():  # client by client, so that the peak is the run's, not this one's
        part = slice(first, first + size)
        shift = 0.02 * torch.randn(dim, generator=draw)
        noise = 0.08 * torch.randn(size, dim, generator=draw)
        x[part] = unit(text[labels[part]] + shift + noise, dim=1)
        first += size
    return EmbeddedTable(
        name="made",
        classes=tuple(f"class {i}" for i in range(classes)),
        x=x,
        labels=labels.numpy(),
        domains=ids,
        clients=ids,
        splits=np.full(rows, ""),
        content=[f"{i:x}" for i in range(rows)],
        scale=100.0,
        text=text,
        patches=None,
        encoder="made",
        fingerprint="made",
    )


def pacs(rounds: int) -> None:
    """Leave-one-domain-out with FedOT on a federation of PACS's sizes."""
    rows = made(PACS, classes=7)
    with tempfile.TemporaryDirectory() as folder, Memory() as memory:
        start_time = perf_counter()
        fedvlm.run({"name": "fedot", "rounds": rounds}, embedded=rows, out=folder)
        seconds = perf_counter() - start_time
    report(
        f"PACS-sized, FedOT, 4 folds, {rounds} rounds: {seconds:.0f} s, {memory.peak:.2f} GB",
        f"PACS-sized, FedOT, 4 folds, {rounds} rounds",
        **{"s": seconds, "GB": memory.peak},
    )


class Memory:
    """Peak memory of this process and its workers: pages they share are counted once."""

    def __enter__(self) -> "Memory":
        self.peak, self.over = 0.0, Event()
        self.thread = Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.over.wait(0.2):
            family = [str(os.getpid())]
            with suppress(OSError):
                family += Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            total = 0
            for process in family:
                with suppress(OSError):
                    total += int(Path(f"/proc/{process}/smaps_rollup").read_text().split("Pss:")[1].split()[0])
            self.peak = max(self.peak, total / 1e6)

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    pacs(parser.parse_args().rounds)
