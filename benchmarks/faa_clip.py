"""What FAA-CLIP costs: a step beside its bare matrix products, clients side by side, a whole run.

Run with `python benchmarks/faa_clip.py`; `--run` also trains a federation of Office-Home's sizes.
Both sides of the ratio run in turns in one process on one thread, so that noise hits both; figures
are medians. A step's products are those of the mask (two layers, 2B rows) and of the judge (two
layers, 2B rows), forth and back, and of B features with B texts. Clients side by side are beside
the same ones after each other, by our gradients and by autograd with the same fused Adam.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter, process_time

import torch
from federation import Memory, made
from figures import report

import fedvlm
from fedvlm import parts, tensors
from fedvlm.core import Client, Frozen, make

DIM, BATCH, CLASSES, STEPS = 512, 32, 65, 40
OFFICE_HOME = {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357}


def world() -> tuple[Frozen, Client]:
    """One client with one epoch of full minibatches, and a reference set of its size."""
    draw = torch.Generator().manual_seed(0)
    rows = STEPS * BATCH

    def unit(count: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(count, DIM, generator=draw), dim=1)

    order, reference_order = (torch.randperm(rows, generator=draw).reshape(STEPS, BATCH) for _ in range(2))
    y = torch.randint(CLASSES, (rows,), generator=draw)
    texts, noise = torch.zeros(CLASSES, 0, DIM), torch.zeros(STEPS, 0)
    client = Client(unit(rows), y, order, unit(8), y[:8], unit(rows), reference_order, texts, noise)
    return Frozen(tuple(map(str, range(CLASSES))), DIM, 100.0, unit(CLASSES)), client


def products() -> Callable[[], None]:
    """The matrix products of one step, and nothing else."""
    x, gradient = torch.randn(2 * BATCH, DIM), torch.randn(2 * BATCH, DIM)
    layers = [torch.randn(DIM, DIM) for _ in range(4)]
    text = torch.randn(BATCH, DIM)

    def run() -> None:
        for number, layer in enumerate(layers):
            torch.mm(x, layer.mT)
            torch.mm(gradient.mT, x)
            if number:  # the first layer's input is frozen
                torch.mm(gradient, layer)
        logits = torch.mm(x[:BATCH], text.mT)
        torch.mm(logits, text)

    return run


def step(repeats: int = 9) -> None:
    method = make("faa-clip")
    frozen, client_data = world()
    shared, local = method.init(frozen)
    sent, stacked_local = ({key: value[None] for key, value in part.items()} for part in (shared, local))
    stacked_client = Client(*(value[None] for value in vars(client_data).values()))
    bare = products()
    floor, stacked_times, plain = [], [], []
    for turn in range(repeats):
        start_time = process_time()
        for _ in range(STEPS):
            bare()
        floor.append(process_time() - start_time)
        start_time = process_time()
        fast = method.update_many(frozen, sent, stacked_local, stacked_client)
        stacked_times.append(process_time() - start_time)
        if turn < 3:
            start_time = process_time()
            slow = parts.adam(method, frozen, shared, local, client_data)
            plain.append(process_time() - start_time)
    gap = tensors.max_relative_difference(tensors.select(fast[0], 0), slow[0])
    floor_ms, took, usual = (1e3 * median(times) / STEPS for times in (floor, stacked_times, plain))
    report(
        f"FAA-CLIP, d={DIM}, B={BATCH}: products {floor_ms:.2f} ms, a step {took:.2f} ms, ratio "
        f"{took / floor_ms:.2f} (plain autograd {usual:.2f} ms; what is uploaded differs by "
        f"{gap:.0e})",
        f"a step, d = {DIM}, B = {BATCH}",
        **{"products ms": floor_ms, "ours ms": took, "ours: products": took / floor_ms},
        **{"plain ms": usual, "plain: ours": usual / took, "differ by": gap},
    )


def make_clients(dim: int, count: int, steps: int = 8) -> tuple[Frozen, Client]:
    """Clients side by side, each with full minibatches; one reference set for all."""
    draw = torch.Generator().manual_seed(0)
    rows = steps * BATCH

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, dim, generator=draw), dim=-1)

    order = torch.randperm(rows, generator=draw).reshape(1, steps, BATCH).expand(count, -1, -1)
    y = torch.randint(CLASSES, (count, rows), generator=draw)
    texts, noise = torch.zeros(count, CLASSES, 0, dim), torch.zeros(count, steps, 0)
    held, reference = unit(count, 8), unit(rows).expand(count, -1, -1)
    clients = Client(unit(count, rows), y, order, held, y[:, :8], reference, order, texts, noise)
    return Frozen(tuple(map(str, range(CLASSES))), dim, 100.0, unit(CLASSES)), clients


def stacked(dim: int, count: int, repeats: int = 5) -> None:
    """A round of clients side by side, one by one, and one by one through autograd."""
    method = make("faa-clip")
    frozen, clients = make_clients(dim, count)
    shared, local = method.init(frozen)
    sent = {key: value.expand(count, *value.shape) for key, value in shared.items()}
    stacked_local = {key: value.expand(count, *value.shape) for key, value in local.items()}
    slices = [slice(i, i + 1) for i in range(count)]

    def one_by_one(update: Callable[..., object]) -> None:
        for some in slices:
            client_data = Client(*(value[some] for value in vars(clients).values()))
            update(frozen, *({k: v[some] for k, v in part.items()} for part in (sent, stacked_local)), client_data)

    runs: dict[str, Callable[[], object]] = {
        "together": lambda: method.update_many(frozen, sent, stacked_local, clients),
        "one by one": lambda: one_by_one(method.update_many),
        "autograd": lambda: one_by_one(partial(parts.fused_adam, method)),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start_time = process_time()
            run()
            times[name].append(process_time() - start_time)
    cost = {name: median(some) for name, some in times.items()}
    ratios = {name: cost[name] / cost["together"] for name in ("one by one", "autograd")}
    text = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    report(
        f"FAA-CLIP, d={dim}, {count} clients: a round together {1e3 * cost['together']:.0f} ms; beside it {text}",
        f"a round of {count} clients together, d = {dim}",
        **{f"{name}: together": ratio for name, ratio in ratios.items()},
    )


def run_training(rounds: int) -> None:
    rows = made(OFFICE_HOME, classes=CLASSES)
    with tempfile.TemporaryDirectory() as folder, Memory() as memory:
        start_time, before = perf_counter(), os.times()
        fedvlm.run(
            {"name": "faa-clip", "rounds": rounds},
            embedded=rows,
            out=folder,
            protocol="source-target",
            target="Real World",
        )
        seconds, after = perf_counter() - start_time, os.times()
    work = sum(after[:4]) - sum(before[:4])  # of this process and its workers
    report(
        f"Office-Home-sized ({len(rows.labels):,} rows), FAA-CLIP, one unseen domain, "
        f"{rounds} rounds: {seconds:.0f} s ({work:.0f} s of processor time), {memory.peak:.2f} GB",
        f"a run of Office-Home's sizes, {rounds} rounds",
        **{"s": seconds, "processor s": work, "GB": memory.peak},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    step()
    for dim, count in ((512, 3), (512, 8), (512, 32), (64, 3), (64, 8), (64, 32)):
        stacked(dim, count)
    if args.run:
        run_training(args.rounds)
