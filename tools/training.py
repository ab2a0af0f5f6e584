"""One training in memory, for tools that measure many: nothing is written, all hits are kept."""

from collections.abc import Mapping
from time import process_time
from typing import Any

import numpy as np
import torch

from fedvlm.data.table import EmbeddedTable
from fedvlm.engines.client import predict
from fedvlm.engines.loop import finish_training, initial_state, open_engine, run_rounds
from fedvlm.engines.state import Plan
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build


def trained(
    rows: EmbeddedTable, clients: Mapping[str, Any], method: Mapping[str, Any], seed: int
) -> tuple[dict[str, Any], list[Any]]:
    """Every client's hits on its validation and its test rows, CPU seconds; local tensors."""
    values = {"method": method, "clients": clients, "protocol": "own-test", "seeds": [seed]}
    prepared = prepare(build(values), rows, seed)
    [training] = prepared.trainings
    world, plan = prepared.world(training), Plan(training.train, training.unseen)
    begin = process_time()
    engine = open_engine("batched", world, 1, world.method.rounds)
    state, fresh = initial_state(world)
    state = run_rounds(world, engine, plan, state, fresh, lambda state, line: None)
    outcome = finish_training(world, engine, plan, state, fresh)
    out: dict[str, Any] = {"validation": [], "test": [], "seconds": process_time() - begin}
    kept: list[Any] = [outcome.local.get(id, fresh) for id in training.train]
    for id, local in zip(training.train, kept, strict=True):
        sent = world.method.send(outcome.shared, id)
        for part in ("validation", "test"):
            index = getattr(world.members[id], part)
            right = predict(world, sent, local, index).argmax(1) == world.y[torch.from_numpy(index)]
            out[part].append("".join(map(str, right.int().tolist())))
    return out, kept


def share(hits: list[str]) -> float:
    """The mean over clients of the share of hits; clients without rows do not count."""
    return float(np.mean([one.count("1") / len(one) for one in hits if one]))


def groups(seeds: list[dict[str, Any]], part: str) -> list[list[np.ndarray[Any, Any]]]:
    """By seed and client, as tools.auto.measure.interval takes them."""
    return [[np.array([*map(int, text)], float) for text in one[part] if text] for one in seeds]
