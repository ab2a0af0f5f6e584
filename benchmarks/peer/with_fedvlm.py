"""The federation of benchmarks/peers.py by fedvlm, which makes its rows and the minibatches.

It also measures every client's validation and test rows in every round, which the others do not.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from clock import FOLDER, Clock

sys.path.append(str(Path(__file__).parents[1]))
from clients import FEW, opened

from fedvlm.engines.client import client
from fedvlm.engines.loop import open_engine, start, train

torch.set_num_threads(1)
ROUNDS, BATCH, RATE = int(sys.argv[1]), 10, 2e-4
method = {"name": "fedavg", "batch_size": BATCH, "lr": RATE, "weight_decay": 0.0, "head": "random"}
world, plan = opened({**method, "rounds": ROUNDS}, FEW)
each = [[client(world, id, number) for id in plan.train] for number in range(ROUNDS)]
state, fresh = start(world)
test = torch.from_numpy(np.concatenate([world.members[id].test for id in plan.train]))
given = {
    "x": torch.stack([one.x for one in each[0]]) * world.frozen.scale,
    "y": torch.stack([one.y for one in each[0]]),
    "order": torch.stack([torch.stack([one.order.flatten() for one in some]) for some in each]),
    "start": state.shared["head"],
    "test_x": world.x[test],
    "test_y": world.y[test],
}
assert (given["order"] >= 0).all(), "a short minibatch"
for name, values in given.items():
    np.save(FOLDER / f"{name}.npy", values.numpy())
(FOLDER / "given.json").write_text(json.dumps({"batch": BATCH, "rate": RATE}))
clock = Clock()
engine = open_engine("batched", world, 1, ROUNDS)
state = train(world, engine, plan, state, fresh, lambda state, line: clock.tick())
engine.close()
versions = {name: version(name) for name in ("fedvlm", "torch")}
clock.close(state.shared["head"].numpy(), versions)
