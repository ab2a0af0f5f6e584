"""The federation of benchmarks/peers.py by Flower's simulation and its own federated averaging."""

from importlib.metadata import version

import numpy as np
import torch
from clock import Clock, rows
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

inputs, clock = rows(), Clock()
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    inputs_here = rows()
    number = int(message.content["config"]["server-round"]) - 1
    x, y = (torch.from_numpy(array) for array in inputs_here.of(int(context.node_config["partition-id"]), number))
    head = torch.from_numpy(message.content["arrays"]["head"].numpy().copy()).requires_grad_()
    optimizer = torch.optim.SGD([head], lr=inputs_here.rate)
    for some, targets in zip(x.split(inputs_here.batch), y.split(inputs_here.batch), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(some @ head.T, targets).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord({"head": Array(head.detach().numpy())}),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):
    def aggregate_train(self, server_round: int, replies: object) -> object:
        result = super().aggregate_train(server_round, replies)
        clock.tick()
        return result


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    # In the first round a fraction would be one of those who are there already.
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=len(inputs.x))
    start = ArrayRecord({"head": Array(np.array(inputs.start))})
    result = strategy.start(grid, start, num_rounds=len(inputs.order))
    versions = {name: version(name) for name in ("flwr", "ray", "torch")}
    clock.close(result.arrays["head"].numpy(), versions)


if __name__ == "__main__":
    cores = {"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1}}
    run_simulation(server_app, client_app, len(inputs.x), backend_config=cores)
