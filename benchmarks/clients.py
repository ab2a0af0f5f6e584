"""CPU time of a round of many small clients, and the memory it takes, on embeddings it makes.

python benchmarks/clients.py [--rounds 5] [--methods fedavg,fedprox]
100 clients of 82 rows (50 to train on) in minibatches of 10, and 1,000 clients of 5 to 500 rows;
ten classes, 512 numbers a row, all of them take part. One core, CPU time.
"""

import argparse
import resource
from time import process_time
from typing import Any

import torch
from federation import made
from figures import say

from fedvlm.engines.client import World
from fedvlm.engines.loop import open_engine, start, train
from fedvlm.engines.state import Plan
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build

FEW = {f"{i:03}": 82 for i in range(100)}
MANY = {f"{i:03}": 5 + (i * 331) % 496 for i in range(1000)}


def opened(method: dict[str, Any], sizes: dict[str, int]) -> tuple[World, Plan]:
    """Clients of these sizes, who all take part."""
    rows = made(sizes, classes=10)
    own = {"protocol": "own-test", "clients": {"by": "own"}}
    prepared = prepare(build({"method": method, **own}), rows, 0)
    [training] = prepared.trainings
    return prepared.world(training), Plan(training.train, training.unseen)


def round_of(method: dict[str, Any], sizes: dict[str, int], rounds: int) -> float:
    """Seconds of CPU time of one round, the first left out."""
    world, plan = opened({**method, "rounds": rounds + 1}, sizes)
    engine = open_engine("batched", world, 1, rounds)
    state, fresh = start(world)
    ends: list[float] = []
    train(world, engine, plan, state, fresh, lambda state, line: ends.append(process_time()))
    return (ends[-1] - ends[0]) / rounds


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--methods", default="fedavg,fedprox,scaffold,fedrep,fedot")
    ask.add_argument("--crowds", default="100,1000")
    args = ask.parse_args()
    torch.set_num_threads(1)
    for name in args.methods.split(","):
        more = {"blocks": 16} if name == "fedot" else {}
        for crowd in args.crowds.split(","):
            sizes, batch = (FEW, 10) if crowd == "100" else (MANY, 32)
            spent = round_of({"name": name, "batch": batch, **more}, sizes, args.rounds)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            say(
                f"{name}, {crowd} clients: {1000 * spent:.0f} ms a round, at most {peak:.2f} GB",
                f"{name}, {crowd} clients",
                **{"processor ms a round": 1000 * spent, "GB at most": peak},
            )


if __name__ == "__main__":
    main()
