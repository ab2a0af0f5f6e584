"""What a step of FedOT costs beside plain autograd, and what `blocks = "auto"` costs beside r = 1.

Run with `python benchmarks/fedot.py`. Both sides run in turns in one process on one thread, so
that noise hits both; figures are medians.
"""

from collections.abc import Callable
from statistics import median
from time import process_time

import naive_fedot
import torch
from figures import report

from fedvlm import tensors
from fedvlm.core import Client, Frozen, make
from fedvlm.testing import make_test_client

DIM, BATCH = 512, 32


def world(classes: int, steps: int) -> tuple[Frozen, Client]:
    """One client, stacked, with one epoch of `steps` full minibatches."""
    generator = torch.Generator().manual_seed(0)
    rows = steps * BATCH

    def unit(count: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(count, DIM, generator=generator), dim=1)

    order = torch.randperm(rows, generator=generator).reshape(1, steps, BATCH)
    y = torch.randint(classes, (1, rows), generator=generator)
    held = rows // 3  # 60 : 20, as the paper splits
    client = make_test_client(unit(rows)[None], y, order, unit(held)[None], y[:, :held])
    return Frozen(tuple(map(str, range(classes))), DIM, 100.0, unit(classes)), client


def seconds(run: Callable[[], object]) -> float:
    start = process_time()
    run()
    return process_time() - start


def compare(classes: int, blocks: int, repeats: int, slow_steps: int, steps: int = 40) -> None:
    """Prints milliseconds per step of both and their ratio, for a map far from the identity."""
    frozen, clients = world(classes, steps)
    method = make("fedot", blocks=blocks)
    shared, local = method.init(frozen)
    sent = {key: value[None] for key, value in shared.items()}
    local = {"skew": 0.01 * torch.randn(1, *local["skew"].shape)}
    local["skew"] = local["skew"] - local["skew"].mT
    client_data = Client(*(value[0] for value in vars(clients).values()))
    short_client = make_test_client(
        client_data.x, client_data.y, client_data.order[:slow_steps], client_data.val_x, client_data.val_y
    )
    raws = list(local["skew"][0])
    optimizer = (method.lr, method.weight_decay, method.momentum)

    stacked_times, naive = [], []
    for _ in range(repeats):
        stacked_times.append(seconds(lambda: method.update_many(frozen, sent, local, clients)) / steps)
        naive.append(seconds(lambda: naive_fedot.update(sent["head"][0], raws, short_client, *optimizer)) / slow_steps)
    short = Client(*(value[None] for value in vars(short_client).values()))
    head, blocks_after = naive_fedot.update(sent["head"][0], raws, short_client, *optimizer)
    upload, new_local = method.update_many(frozen, sent, local, short)
    gap = tensors.max_relative_difference(
        {"head": upload["head"][0], "skew": new_local["skew"][0]},
        {"head": head, "skew": torch.stack(blocks_after)},
    )
    fast, slow = median(stacked_times) * 1e3, median(naive) * 1e3
    report(
        f"K={classes:<3} r={blocks:<4} naive {slow:7.2f} ms  ours {fast:6.3f} ms  "
        f"ratio {slow / fast:5.1f}  (results differ by {gap:.0e}; "
        f"a client's round of {steps} steps {fast * steps:.0f} ms)",
        f"a step, {classes} classes, r = {blocks}, plain autograd beside",
        **{"plain ms": slow, "ours ms": fast, "ratio": slow / fast, "differ by": gap},
    )


def compare_auto(classes: int, rounds: int = 12, steps: int = 40) -> None:
    """Prints what a run with `blocks = "auto"` costs beside one with r = 1, if r = 1 wins."""
    frozen, clients = world(classes, steps)
    times: dict[int | str, list[float]] = {1: [], "auto": []}
    runs = {}
    for blocks in (1, "auto"):
        method = make("fedot", blocks=blocks, rounds=rounds)
        sent, local = ({k: v[None] for k, v in part.items()} for part in method.init(frozen))
        runs[blocks] = (method, sent, local)
    for _ in range(rounds):
        for blocks, (method, sent, local) in runs.items():
            if "leader" in local:
                local["leader"].fill_(1)  # the costliest map
            start = process_time()
            upload, local = method.update_many(frozen, sent, local, clients)
            times[blocks].append(process_time() - start)
            runs[blocks] = (method, upload, local)
    tuning_rounds = 2 * rounds // 3
    phases = [times["auto"][:tuning_rounds], times["auto"][tuning_rounds:]]
    ratios = [median(some) / median(times[1]) for some in phases]
    total = (tuning_rounds * ratios[0] + (rounds - tuning_rounds) * ratios[1]) / rounds
    report(
        f"K={classes:<3} auto  a round costs {ratios[0]:.2f} of r=1 in the race and "
        f"{ratios[1]:.2f} after it; a run {total:.2f}",
        f"blocks = auto beside r = 1, {classes} classes",
        **{"in the race": ratios[0], "after it": ratios[1], "a run": total},
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    compare(7, 1, repeats=9, slow_steps=8)
    compare(65, 1, repeats=9, slow_steps=8)
    compare(7, 256, repeats=9, slow_steps=8)
    compare(65, 256, repeats=9, slow_steps=8)
    compare_auto(7)
    compare_auto(65)
