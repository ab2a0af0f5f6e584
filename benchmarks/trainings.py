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
from figures import report

import fedvlm
from fedvlm.runner.experiment_files import find_experiment, read_toml
from fedvlm.runner.experiments import experiment_runs
from fedvlm.runner.run import execute_all
from fedvlm.runner.settings import build

HOME = {"art": 2427, "clipart": 4365, "product": 4439, "real_world": 4357}
CASES = {"pacs": (PACS, 7, 200), "office-home": (HOME, 65, 50), "demo": None}


def fedot(case: str, workers: int, rounds: int, folder: Path) -> tuple[float, float]:
    sizes, classes, usual = CASES[case] or (PACS, 7, 200)
    rows = made(sizes, classes)
    method = {"name": "fedot", "rounds": rounds or usual}
    start_time = clock()
    fedvlm.run(method, embedded=rows, out=folder / "run", workers=workers)
    return since(start_time)


def demo(workers: int, folder: Path) -> tuple[float, float]:
    jobs = []
    for name in ("demo", "demo-shift"):
        all_settings = [
            build({**run_settings, "workers": workers})
            for run_settings in experiment_runs(read_toml(find_experiment(name)))
        ]
        jobs.append([(run_settings, folder / name / f"{i}") for i, run_settings in enumerate(all_settings)])
    fedvlm.run("zero-shot", out=folder / "embedded")
    start_time = clock()
    for experiment in jobs:
        for done in execute_all(experiment):
            if isinstance(done, Exception):
                raise done
    return since(start_time)


def clock() -> tuple[float, float]:
    return perf_counter(), sum(os.times()[:4])  # of processes that have ended too


def since(start_time: tuple[float, float]) -> tuple[float, float]:
    wall, spent = (now - then for now, then in zip(clock(), start_time, strict=True))
    return wall, spent


def measured(case: str, workers: int, rounds: int) -> tuple[float, float]:
    """In a process of its own."""
    command = [sys.executable, str(Path(__file__)), case, "--workers", str(workers)]
    output = subprocess.run([*command, "--rounds", str(rounds)], check=True, capture_output=True)
    wall, spent = map(float, output.stdout.split()[-2:])
    return wall, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=0, help="other than the usual ones")
    parser.add_argument("--workers", type=int, default=0, help="only with so many processes")
    args = parser.parse_args()
    if args.workers:
        with tempfile.TemporaryDirectory() as folder:
            place, (case,) = Path(folder), args.cases
            if case == "demo":
                print(*demo(args.workers, place))
            else:
                print(*fedot(case, args.workers, args.rounds, place))
        return
    for case in args.cases:
        results = {workers: measured(case, workers, args.rounds) for workers in (1, 2)}
        (wall, spent), (walls, spents) = results[1], results[2]
        report(
            f"{case}: one process {wall:.1f} s ({spent:.1f} s of CPU), two {walls:.1f} s "
            f"({spents:.1f} s of CPU); wall {wall / walls:.2f} times shorter, CPU "
            f"{spents / spent:.2f} times",
            case,
            **{"one process s": wall, "two s": walls, "CPU s": spent, "CPU of two": spents},
        )


if __name__ == "__main__":
    main()
