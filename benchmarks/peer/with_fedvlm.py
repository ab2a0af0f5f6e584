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

from fedvlm.engines.client import make_client
from fedvlm.engines.loop import initial_state, open_engine, run_rounds

torch.set_num_threads(1)
ROUNDS, BATCH, RATE = int(sys.argv[1]), 10, 2e-4
method = {"name": "fedavg", "batch_size": BATCH, "lr": RATE, "weight_decay": 0.0, "head": "random"}
world, plan = opened({**method, "rounds": ROUNDS}, FEW)
clients_by_round = [[make_client(world, id, number) for id in plan.train] for number in range(ROUNDS)]
state, initial_local = initial_state(world)
test = torch.from_numpy(np.concatenate([world.members[id].test for id in plan.train]))
inputs = {
    "x": torch.stack([client_data.x for client_data in clients_by_round[0]]) * world.frozen.scale,
    "y": torch.stack([client_data.y for client_data in clients_by_round[0]]),
    "order": torch.stack(
        [torch.stack([client_data.order.flatten() for client_data in some]) for some in clients_by_round]
    ),
    "start": state.shared["head"],
    "test_x": world.x[test],
    "test_y": world.y[test],
}
assert (inputs["order"] >= 0).all(), "a short minibatch"
for name, values in inputs.items():
    np.save(FOLDER / f"{name}.npy", values.numpy())
(FOLDER / "given.json").write_text(json.dumps({"batch": BATCH, "rate": RATE}))
clock = Clock()
engine = open_engine("batched", world, 1, ROUNDS)
state = run_rounds(world, engine, plan, state, initial_local, lambda state, line: clock.tick())
engine.close()
versions = {name: version(name) for name in ("fedvlm", "torch")}
clock.close(state.shared["head"].numpy(), versions)
