"""Memory and CPU time of a round as clients grow from 1,000 to 100,000, of which 1 % take part.

python benchmarks/scale.py [--rounds 4] [--plot docs/pictures/scale.svg]
FedOT in 16 blocks: every client has a map of its own, 64 kB on disk. 20 rows a client, ten classes,
512 numbers a row, in one file that is memory-mapped. Each size in a process of its own, so that its
peak is its own. One core, CPU time; a checkpoint after every round is part of it.
"""

import argparse
import json
import mmap
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from figures import say

from fedvlm.core import Frozen, make
from fedvlm.engines.batched import Batched
from fedvlm.engines.client import Answers, Done, Part, Task, World
from fedvlm.engines.loop import start, train
from fedvlm.engines.state import Plan, State, pack
from fedvlm.storage.sealed import write_tensors
from fedvlm.storage.shelf import Shelf

SIZES, SHARE = (1_000, 3_000, 10_000, 30_000, 100_000), 0.01
ROWS, TESTED, CLASSES, DIM = 16, 4, 10, 512
EACH, FEW = ROWS + TESTED, 16


class Members(Mapping[str, Part]):
    """Clients by number: who has which rows follows from it, and takes no memory."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __getitem__(self, id: str) -> Part:
        rows = np.arange(int(id) * EACH, (int(id) + 1) * EACH)
        return Part(rows[:ROWS], rows[:0], rows[ROWS:])

    def __iter__(self) -> Iterator[str]:
        return (f"{i:06}" for i in range(self.count))

    def __len__(self) -> int:
        return self.count


class Forgetting(Batched):
    """Lets go of mapped rows after every few clients: the kernel maps far more than is read."""

    rows: mmap.mmap

    def round(self, number: int, tasks: Sequence[Task]) -> Answers:
        done: dict[str, Done] = {}
        for first in range(0, len(tasks), FEW):
            done |= super().round(number, tasks[first : first + FEW]).done
            self.rows.madvise(mmap.MADV_DONTNEED)
        return Answers(done)


def write_rows(path: Path, clients: int) -> None:
    """Rows around class centres, in half precision, a thousand clients at a time."""
    draw = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize
    centres = unit(torch.randn(CLASSES, DIM, generator=draw), dim=1)
    with path.open("wb") as file:
        for first in range(0, clients * EACH, 1000 * EACH):
            labels = torch.arange(first, min(first + 1000 * EACH, clients * EACH)) % CLASSES
            noise = 0.08 * torch.randn(len(labels), DIM, generator=draw)
            file.write(unit(centres[labels] + noise, dim=1).half().numpy().tobytes())


def measure(clients: int, rounds: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    with (folder / "rows").open("rb") as file:
        rows = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=3)
    x = torch.frombuffer(rows, dtype=torch.float16).reshape(-1, DIM)
    y = torch.arange(len(x)) % CLASSES
    text = torch.nn.functional.normalize(x[:CLASSES].float(), dim=1)
    frozen = Frozen(tuple(f"class {i}" for i in range(CLASSES)), DIM, 100.0, text, 0)
    method = make("fedot", blocks=16, rounds=rounds + 1, batch=8)
    world = World(method, frozen, 0, x=x, y=y, members=Members(clients))
    plan = Plan(tuple(world.members), (), fraction=SHARE)
    state, fresh = start(world)
    state = replace(state, local=Shelf(folder / "local", plan.train, fresh))
    ends: list[float] = []

    def on_round(state: State, line: dict[str, Any]) -> None:
        write_tensors(folder / "checkpoint", *pack(state))
        ends.append(process_time())

    engine = Forgetting(world, 1)
    engine.rows = rows
    train(world, engine, plan, state, fresh, on_round)
    return {
        "clients": clients,
        "participants": max(1, round(SHARE * clients)),
        "seconds": (ends[-1] - ends[0]) / rounds,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "on_disk": (folder / "rows").stat().st_size / 1e6,
    }


def draw(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "scale", "font.size": 9, "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.8), layout="constrained")
    clients = [one["clients"] for one in found]
    left.plot(clients, [one["peak"] for one in found], "o-", color="#0b6e99")
    left.set(xscale="log", xlabel="clients", ylabel="peak memory (MB)")
    each = [1000 * one["seconds"] / one["participants"] for one in found]
    right.plot(clients, each, "o-", color="#b5541c")
    right.set(xscale="log", xlabel="clients", ylabel="CPU ms per participant")
    for axis in (left, right):
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rounds", type=int, default=4)
    ask.add_argument("--plot", type=Path)
    ask.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = ask.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.one[0]), args.rounds, Path(args.one[1]))))
        return
    found = []
    for clients in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            write_rows(Path(folder) / "rows", clients)
            command = [sys.executable, __file__, "--rounds", str(args.rounds)]
            command += ["--one", str(clients), folder]
            one = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        found.append(one)
        each = 1000 * one["seconds"] / one["participants"]
        say(
            f"{clients:,} clients, {one['participants']:,} a round: {1000 * one['seconds']:.0f} ms "
            f"a round ({each:.2f} ms each), at most {one['peak']:.0f} MB, rows of "
            f"{one['on_disk']:.0f} MB on disk",
            f"{clients:,} clients, 1 % of them a round",
            **{"ms a participant": each, "peak MB": one["peak"], "rows MB": one["on_disk"]},
        )
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
