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
from figures import say

import fedvlm
from fedvlm import parts, tensors
from fedvlm.core import Client, Frozen, make
from fedvlm.parts import fused

DIM, BATCH, CLASSES, STEPS = 512, 32, 65, 40
OFFICE_HOME = {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357}


def world() -> tuple[Frozen, Client]:
    """One client with one epoch of full minibatches, and a reference set of its size."""
    draw = torch.Generator().manual_seed(0)
    rows = STEPS * BATCH

    def unit(count: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(count, DIM, generator=draw), dim=1)

    order, other = (torch.randperm(rows, generator=draw).reshape(STEPS, BATCH) for _ in range(2))
    y = torch.randint(CLASSES, (rows,), generator=draw)
    texts, noise = torch.zeros(CLASSES, 0, DIM), torch.zeros(STEPS, 0)
    client = Client(unit(rows), y, order, unit(8), y[:8], unit(rows), other, texts, noise)
    return Frozen(tuple(map(str, range(CLASSES))), DIM, 100.0, unit(CLASSES)), client


def products() -> Callable[[], None]:
    """The matrix products of one step, and nothing else."""
    x, slope = torch.randn(2 * BATCH, DIM), torch.randn(2 * BATCH, DIM)
    layers = [torch.randn(DIM, DIM) for _ in range(4)]
    text = torch.randn(BATCH, DIM)

    def run() -> None:
        for number, layer in enumerate(layers):
            torch.mm(x, layer.mT)
            torch.mm(slope.mT, x)
            if number:  # the first layer's input is frozen
                torch.mm(slope, layer)
        logits = torch.mm(x[:BATCH], text.mT)
        torch.mm(logits, text)

    return run


def step(repeats: int = 9) -> None:
    method = make("faa-clip")
    frozen, one = world()
    shared, local = method.init(frozen)
    sent, own = ({key: value[None] for key, value in part.items()} for part in (shared, local))
    many = Client(*(value[None] for value in vars(one).values()))
    bare = products()
    floor, ours, plain = [], [], []
    for turn in range(repeats):
        begin = process_time()
        for _ in range(STEPS):
            bare()
        floor.append(process_time() - begin)
        begin = process_time()
        fast = method.update_many(frozen, sent, own, many)
        ours.append(process_time() - begin)
        if turn < 3:
            begin = process_time()
            slow = parts.adam(method, frozen, shared, local, one)
            plain.append(process_time() - begin)
    gap = tensors.difference(tensors.select(fast[0], 0), slow[0])
    least, took, usual = (1e3 * median(times) / STEPS for times in (floor, ours, plain))
    say(
        f"FAA-CLIP, d={DIM}, B={BATCH}: products {least:.2f} ms, a step {took:.2f} ms, ratio "
        f"{took / least:.2f} (plain autograd {usual:.2f} ms; what is uploaded differs by "
        f"{gap:.0e})",
        f"a step, d = {DIM}, B = {BATCH}",
        **{"products ms": least, "ours ms": took, "ours: products": took / least},
        **{"plain ms": usual, "plain: ours": usual / took, "differ by": gap},
    )


def crowd(dim: int, count: int, steps: int = 8) -> tuple[Frozen, Client]:
    """Clients side by side, each with full minibatches; one reference set for all."""
    draw = torch.Generator().manual_seed(0)
    rows = steps * BATCH

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, dim, generator=draw), dim=-1)

    order = torch.randperm(rows, generator=draw).reshape(1, steps, BATCH).expand(count, -1, -1)
    y = torch.randint(CLASSES, (count, rows), generator=draw)
    texts, noise = torch.zeros(count, CLASSES, 0, dim), torch.zeros(count, steps, 0)
    held, others = unit(count, 8), unit(rows).expand(count, -1, -1)
    many = Client(unit(count, rows), y, order, held, y[:, :8], others, order, texts, noise)
    return Frozen(tuple(map(str, range(CLASSES))), dim, 100.0, unit(CLASSES)), many


def stacked(dim: int, count: int, repeats: int = 5) -> None:
    """A round of clients side by side, one by one, and one by one through autograd."""
    method = make("faa-clip")
    frozen, many = crowd(dim, count)
    shared, local = method.init(frozen)
    sent = {key: value.expand(count, *value.shape) for key, value in shared.items()}
    own = {key: value.expand(count, *value.shape) for key, value in local.items()}
    each = [slice(i, i + 1) for i in range(count)]

    def one_by_one(update: Callable[..., object]) -> None:
        for some in each:
            one = Client(*(value[some] for value in vars(many).values()))
            update(frozen, *({k: v[some] for k, v in part.items()} for part in (sent, own)), one)

    runs: dict[str, Callable[[], object]] = {
        "together": lambda: method.update_many(frozen, sent, own, many),
        "one by one": lambda: one_by_one(method.update_many),
        "autograd": lambda: one_by_one(partial(fused.adam, method)),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin = process_time()
            run()
            times[name].append(process_time() - begin)
    cost = {name: median(some) for name, some in times.items()}
    ratios = {name: cost[name] / cost["together"] for name in ("one by one", "autograd")}
    said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    say(
        f"FAA-CLIP, d={dim}, {count} clients: a round together {1e3 * cost['together']:.0f} ms; "
        f"beside it {said}",
        f"a round of {count} clients together, d = {dim}",
        **{f"{name}: together": ratio for name, ratio in ratios.items()},
    )


def whole(rounds: int) -> None:
    rows = made(OFFICE_HOME, classes=CLASSES)
    with tempfile.TemporaryDirectory() as folder, Memory() as memory:
        begin, before = perf_counter(), os.times()
        fedvlm.run(
            {"name": "faa-clip", "rounds": rounds},
            embedded=rows,
            out=folder,
            protocol="source-target",
            target="Real World",
        )
        seconds, after = perf_counter() - begin, os.times()
    work = sum(after[:4]) - sum(before[:4])  # of this process and its workers
    say(
        f"Office-Home-sized ({len(rows.labels):,} rows), FAA-CLIP, one unseen domain, "
        f"{rounds} rounds: {seconds:.0f} s ({work:.0f} s of processor time), {memory.peak:.2f} GB",
        f"a run of Office-Home's sizes, {rounds} rounds",
        **{"s": seconds, "processor s": work, "GB": memory.peak},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(1)
    step()
    for dim, count in ((512, 3), (512, 8), (512, 32), (64, 3), (64, 8), (64, 32)):
        stacked(dim, count)
    if given.run:
        whole(given.rounds)
