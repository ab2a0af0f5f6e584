"""What every peer's script shares: the federation's rows, and the cost of its rounds.

Imports nothing but numpy and psutil, which every peer's environment has.
"""

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np
import psutil


@dataclass(frozen=True)
class Rows:
    x: np.ndarray  # (clients, rows, d), times the scale of the logits
    y: np.ndarray  # (clients, rows)
    order: np.ndarray  # (rounds, clients, rows): minibatches one after the other
    start: np.ndarray  # (classes, d), the first head
    batch: int
    rate: float

    def of(self, client: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's rows in the order of this round."""
        order = self.order[number, client]
        return self.x[client][order], self.y[client][order]


FOLDER = Path(os.environ["FEDVLM_PEER"])  # not an argument: Flower's actors have none


@cache  # one of Flower's actors asks for every client
def rows() -> Rows:
    inputs = json.loads((FOLDER / "given.json").read_text())
    names = ("x", "y", "order", "start")
    return Rows(*(np.load(FOLDER / f"{name}.npy", mmap_mode="r") for name in names), **inputs)


class Clock:
    """Wall and processor time at the end of every round, of this process and those it started."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.processor: list[float] = []

    def tick(self) -> None:
        self.wall.append(perf_counter())
        me = psutil.Process()
        spent = 0.0
        for process in [me, *me.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            spent += times.user + times.system
        self.processor.append(spent)

    def close(self, head: np.ndarray, versions: dict[str, str]) -> None:
        """Writes what was found; the first round, which compiles and starts, is left out."""
        np.save(FOLDER / "head.npy", head)
        measurement = {
            "wall": np.diff(self.wall).tolist(),
            "processor": np.diff(self.processor).tolist(),
            "versions": versions,
        }
        (FOLDER / "found.json").write_text(json.dumps(measurement))
