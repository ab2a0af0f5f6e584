"""The written gradient of a linear head is autograd's."""

from dataclasses import dataclass

import pytest
import torch

from fedvlm import tensors
from fedvlm.core import as_stacked, make
from fedvlm.methods.fedavg import FedAvg
from fedvlm.testing import toy_world, train_toy


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_the_written_gradient_is_that_of_autograd(name, momentum):
    world = toy_world(make(name, rounds=3, local_epochs=2, batch_size=4, momentum=momentum, weight_decay=0.1))
    slow, fast = train_toy(world, "single", 1), train_toy(world, "batched", 1)
    assert tensors.max_relative_difference(slow.shared, fast.shared) < 1e-6
    assert not torch.equal(fast.shared["head"], world.frozen.text)


@pytest.mark.parametrize("epochs", [(2, 1), (0, 2), (3, 0), (1, 3)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_written_gradient_of_a_head_and_of_its_map_are_those_of_autograd(epochs, momentum):
    schedule = {"lr": 0.01, "momentum": momentum, "weight_decay": 0.1, "batch_size": 4, "rounds": 2}
    method = make("fedrep", head_epochs=epochs[0], map_epochs=epochs[1], **schedule)
    world = toy_world(method, sizes=[3, 40, 9])
    slow, fast = train_toy(world, "single", 1), train_toy(world, "batched", 1)
    assert tensors.max_relative_difference(slow.shared, fast.shared) < 2e-6
    for id, local in slow.local.items():
        assert tensors.max_relative_difference(local, fast.local[id]) < 2e-6
    moved = not torch.equal(fast.shared["map"], torch.eye(world.frozen.dim))
    assert moved == (epochs[1] > 0)


@dataclass(frozen=True)
class OwnPredict(FedAvg):
    def predict(self, frozen, sent, local, x):
        return 2 * frozen.scale * x @ sent["head"].mT


def test_a_class_that_predicts_otherwise_does_not_inherit_the_fast_update():
    assert as_stacked(FedAvg()) is not None and as_stacked(OwnPredict()) is None
    world = toy_world(OwnPredict(rounds=2))
    gap = tensors.max_relative_difference(train_toy(world, "single", 1).shared, train_toy(world, "batched", 1).shared)
    assert gap < 1e-6
