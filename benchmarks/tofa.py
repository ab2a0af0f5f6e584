"""Wall and processor time, memory and bytes of TOFA's whole adaptation, on embeddings it makes."""

import argparse
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).parent))
from federation import Memory, made
from figures import say

from fedvlm import tensors
from fedvlm.core import make
from fedvlm.data.federation import Member
from fedvlm.engines.client import World
from fedvlm.engines.loop import finish, open_engine, start, train
from fedvlm.engines.state import Plan
from fedvlm.runner.prepare import frozen_of
from fedvlm.storage.shelf import Shelf

CLASSES, ROWS, TESTED = 100, 160, 40
STREAMED = 1000  # clients above which local tensors are on disk, and uploads summed as they come


def world_of(clients: int, texts: int) -> World:
    rows = made({f"{i:04}": ROWS + TESTED for i in range(clients)}, CLASSES)
    ready = frozen_of(rows, 0)
    if texts:
        noise = torch.randn(CLASSES, texts, ready.dim, generator=torch.Generator().manual_seed(1))
        near = torch.nn.functional.normalize(ready.text[:, None] + 0.05 * noise, dim=-1)
        ready = ready.__class__(**{**vars(ready), "descriptions": near})
    index = torch.arange(len(rows.labels)).numpy().reshape(clients, -1)
    members = {
        f"{i:04}": Member(f"{i:04}", "", one[:ROWS], one[:0], one[ROWS:])
        for i, one in enumerate(index)
    }
    method = make("tofa", smallest=1)
    y = torch.from_numpy(rows.labels)
    return World(method, ready, 0, x=rows.x, y=y, members=members)


def spent() -> float:
    """Processor seconds of this process and of its workers that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def measure(clients: int, texts: int, workers: int) -> None:
    """From the clients' rows to every client's own classifier, measured on its test rows."""
    world = world_of(clients, texts)
    plan = Plan(tuple(world.members), ())
    sizes: list[int] = []
    with TemporaryDirectory() as place, Memory() as memory:
        folder = Path(place)
        begin, processor = perf_counter(), spent()
        engine = open_engine("batched", world, workers, 1)
        state, fresh = start(world)
        if clients > STREAMED:
            state = replace(state, local=Shelf(folder / "local", plan.train, fresh))
        on_round = lambda state, line: sizes.append(line["clients"]["0000"]["bytes_up"])  # noqa: E731
        state = train(world, engine, plan, state, fresh, on_round)
        outcome = finish(world, engine, plan, state, fresh)
        engine.close()
        seconds, processor = perf_counter() - begin, spent() - processor
    hits = sum(one["test_hits"] for one in outcome.scores.values()) / (clients * TESTED)
    say(
        f"{clients} clients of {ROWS} rows, {CLASSES} classes, d = 512, {texts} descriptions, "
        f"{workers} workers: {seconds:.1f} s, {processor:.1f} s of processor time "
        f"({1000 * processor / clients:.0f} ms a client), {memory.peak:.2f} GB, "
        f"{sizes[0]:,} bytes up, {tensors.count_bytes(state.shared):,} down, "
        f"{100 * hits:.1f} % right",
        f"{clients} clients of {ROWS} rows, {CLASSES} classes, {texts} descriptions",
        **{"s": seconds, "processor s": processor, "GB": memory.peak, "bytes up": sizes[0]},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="?", type=int)
    parser.add_argument("--texts", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if given.clients is None:  # each case in a process of its own, so that its peak is its own
        for clients, texts in ((100, 0), (100, 50), (1000, 50)):
            command = [sys.executable, str(Path(__file__)), f"{clients}", "--texts", f"{texts}"]
            subprocess.run([*command, "--workers", f"{given.workers}"], check=True)
    else:
        measure(given.clients, given.texts, given.workers)
