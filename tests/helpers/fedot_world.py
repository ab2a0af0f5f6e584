"""Small stacked clients for the tests of the FedOT family."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedvlm import tensors
from fedvlm.core import Client, Frozen, Tensors
from fedvlm.testing import make_test_client

torch.set_num_threads(1)
DIM, CLASSES = 64, 3


def unit(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)


def frozen(dim: int = DIM, classes: int = CLASSES, seed: int = 0) -> Frozen:
    names = tuple(f"class {k}" for k in range(classes))
    return Frozen(names, dim, 100.0, unit(classes, dim, seed=seed))


def clients(world: Frozen, count: int = 3, rows: int = 40, batch: int = 8, steps: int = 10) -> Client:
    """Stacked clients whose minibatches are full, short or missing."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randint(rows, (count, steps, batch), generator=generator)
    order[0, 3] = -1  # a step without rows in the middle
    order[-1, steps // 2 :] = -1  # a client with fewer steps
    order[:, 1, 2:] = -1  # a short minibatch, with K > B and K < B
    y = torch.randint(len(world.classes), (count, rows), generator=generator)
    x = unit(count, rows, world.dim, seed=2)
    return make_test_client(x, y, order, x[:, :9], y[:, :9])


def pick(stacked_clients: Client, index: int) -> Client:
    return Client(*(field[index] for field in vars(stacked_clients).values()))


def double(stacked_clients: Client) -> Client:
    return replace(stacked_clients, x=stacked_clients.x.double(), val_x=stacked_clients.val_x.double())


def stacked(tensors_of_one: Tensors, count: int) -> Tensors:
    return {key: value.expand(count, *value.shape) for key, value in tensors_of_one.items()}


def one_by_one(
    method: Any, world: Frozen, sent: Tensors, local: Tensors, stacked_clients: Client
) -> tuple[Tensors, Tensors]:
    """The plain update, client after client."""
    done = [
        method.update(world, tensors.select(sent, i), tensors.select(local, i), pick(stacked_clients, i))
        for i in range(len(stacked_clients.y))
    ]
    return tensors.stack([up for up, _ in done]), tensors.stack([new_local for _, new_local in done])
