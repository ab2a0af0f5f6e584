"""The trainings of a run on one process and on two: wall seconds, CPU seconds and their ratios.

python benchmarks/trainings.py [pacs] [office-home] [demo] [--rounds 200]
FedOT on embeddings it makes, of PACS's sizes (4 folds, 200 rounds), of Office-Home's (50 rounds),
and both experiments of the demo, whose embeddings are taken from the cache or made before. Each
case runs in a process of its own, twice in turn. Wall seconds are of an idle machine only.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from federation import PACS, made
from figures import say

import fedvlm
from fedvlm.runner.experiments import runs
from fedvlm.runner.named import find
from fedvlm.runner.run import together
from fedvlm.runner.settings import build, read_toml

HOME = {"art": 2427, "clipart": 4365, "product": 4439, "real_world": 4357}
CASES = {"pacs": (PACS, 7, 200), "office-home": (HOME, 65, 50), "demo": None}


def fedot(case: str, workers: int, rounds: int, folder: Path) -> tuple[float, float]:
    sizes, classes, usual = CASES[case] or (PACS, 7, 200)
    rows = made(sizes, classes)
    method = {"name": "fedot", "rounds": rounds or usual}
    begin = clock()
    fedvlm.run(method, embedded=rows, out=folder / "run", workers=workers)
    return since(begin)


def demo(workers: int, folder: Path) -> tuple[float, float]:
    asked = []
    for name in ("demo", "demo-shift"):
        each = [build({**one, "workers": workers}) for one in runs(read_toml(find(name)))]
        asked.append([(one, folder / name / f"{i}") for i, one in enumerate(each)])
    fedvlm.run("zero-shot", out=folder / "embedded")
    begin = clock()
    for experiment in asked:
        for done in together(experiment):
            if isinstance(done, Exception):
                raise done
    return since(begin)


def clock() -> tuple[float, float]:
    return perf_counter(), sum(os.times()[:4])  # of processes that have ended too


def since(begin: tuple[float, float]) -> tuple[float, float]:
    wall, spent = (now - then for now, then in zip(clock(), begin, strict=True))
    return wall, spent


def measured(case: str, workers: int, rounds: int) -> tuple[float, float]:
    """In a process of its own."""
    command = [sys.executable, str(Path(__file__)), case, "--workers", str(workers)]
    said = subprocess.run([*command, "--rounds", str(rounds)], check=True, capture_output=True)
    wall, spent = map(float, said.stdout.split()[-2:])
    return wall, spent


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    ask.add_argument("--rounds", type=int, default=0, help="other than the usual ones")
    ask.add_argument("--workers", type=int, default=0, help="only with so many processes")
    given = ask.parse_args()
    if given.workers:
        with tempfile.TemporaryDirectory() as folder:
            place, (case,) = Path(folder), given.cases
            if case == "demo":
                print(*demo(given.workers, place))
            else:
                print(*fedot(case, given.workers, given.rounds, place))
        return
    for case in given.cases:
        each = {workers: measured(case, workers, given.rounds) for workers in (1, 2)}
        (wall, spent), (walls, spents) = each[1], each[2]
        say(
            f"{case}: one process {wall:.1f} s ({spent:.1f} s of CPU), two {walls:.1f} s "
            f"({spents:.1f} s of CPU); wall {wall / walls:.2f} times shorter, CPU "
            f"{spents / spent:.2f} times",
            case,
            **{"one process s": wall, "two s": walls, "CPU s": spent, "CPU of two": spents},
        )


if __name__ == "__main__":
    main()
