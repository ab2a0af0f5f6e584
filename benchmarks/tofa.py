"""Wall and processor time, memory and bytes of TOFA's whole adaptation, on embeddings it makes.

Rows are in a file that is mapped into memory, as the product has those of its cache and stores;
local tensors are on disk where the product puts them there. Each case is a process of its own.
"""

import argparse
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from federation import Memory
from figures import report

from fedvlm import tensors
from fedvlm.core import Frozen, make
from fedvlm.data.partition import ClientSplit
from fedvlm.engines.client import World
from fedvlm.engines.loop import finish_training, initial_state, open_engine, run_rounds
from fedvlm.engines.state import Plan, stores_on_disk
from fedvlm.storage.large_tensors import ClientStateStore

CLASSES, DIM, ROWS, TESTED = 100, 512, 160, 40
CASES = ((100, 0), (100, 50), (1000, 50), (10_000, 50))  # clients and descriptions of a class


def world_of(clients: int, texts: int, folder: Path) -> World:
    """Rows around class centres, every client with a shift of its own."""
    draw, noise_draw = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    unit = torch.nn.functional.normalize
    text = unit(torch.randn(CLASSES, DIM, generator=draw), dim=1)
    rows_per_client = ROWS + TESTED
    y = torch.randint(CLASSES, (clients * rows_per_client,), generator=draw)
    with (folder / "rows").open("wb") as file:
        for client_labels in y.split(rows_per_client):
            shift = 0.02 * torch.randn(DIM, generator=draw)
            noise = 0.08 * torch.randn(rows_per_client, DIM, generator=draw)
            file.write(unit(text[client_labels] + shift + noise, dim=1).numpy().data)
    x = torch.from_numpy(np.memmap(folder / "rows", np.float32, "c", shape=(len(y), DIM)))
    noise = 0.05 * torch.randn(CLASSES, texts, DIM, generator=noise_draw)
    descriptions = unit(text[:, None] + noise, dim=-1) if texts else None
    names = tuple(f"class {i}" for i in range(CLASSES))
    frozen = Frozen(names, DIM, 100.0, text, descriptions=descriptions)
    members = {
        f"{i:05}": ClientSplit(f"{i:05}", "", client_rows[:ROWS], client_rows[:0], client_rows[ROWS:])
        for i, client_rows in enumerate(np.arange(len(y)).reshape(clients, rows_per_client))
    }
    return World(make("tofa", min_class_samples=1), frozen, 0, x=x, y=y, members=members)


def spent() -> float:
    """Processor seconds of this process and of its workers that have ended."""
    usages = (resource.getrusage(process) for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(clients: int, texts: int, workers: int) -> None:
    """From the clients' rows to every client's own classifier, measured on its test rows."""
    sizes: list[int] = []
    with TemporaryDirectory() as place, Memory() as memory:
        folder = Path(place)
        world = world_of(clients, texts, folder)
        plan = Plan(tuple(world.members), ())
        start_time, processor = perf_counter(), spent()
        engine = open_engine("batched", world, workers, 1)
        state, initial_local = initial_state(world)
        if stores_on_disk(plan, initial_local):
            state = replace(state, local=ClientStateStore(folder / "local", plan.train, initial_local))
        on_round = lambda state, line: sizes.append(line["clients"]["00000"]["bytes_up"])  # noqa: E731
        state = run_rounds(world, engine, plan, state, initial_local, on_round)
        outcome = finish_training(world, engine, plan, state, initial_local)
        engine.close()
        seconds, processor = perf_counter() - start_time, spent() - processor
    accuracy = sum(scores["test_hits"] for scores in outcome.scores.values()) / (clients * TESTED)
    report(
        f"{clients} clients of {ROWS} rows, {CLASSES} classes, d = 512, {texts} descriptions, "
        f"{workers} workers: {seconds:.1f} s, {processor:.1f} s of processor time "
        f"({1000 * processor / clients:.0f} ms a client), {memory.peak:.2f} GB, "
        f"{sizes[0]:,} bytes up, {tensors.count_bytes(state.shared):,} down, "
        f"{100 * accuracy:.1f} % right",
        f"{clients} clients of {ROWS} rows, {CLASSES} classes, {texts} descriptions",
        **{"s": seconds, "processor s": processor, "GB": memory.peak, "bytes up": sizes[0]},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="?", type=int)
    parser.add_argument("--texts", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if args.clients is None:  # each case in a process of its own, so that its peak is its own
        for clients, texts in CASES:
            command = [sys.executable, str(Path(__file__)), f"{clients}", "--texts", f"{texts}"]
            subprocess.run([*command, "--workers", f"{args.workers}"], check=True)
    else:
        measure(args.clients, args.texts, args.workers)
