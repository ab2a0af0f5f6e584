"""The written gradient of a linear head is autograd's."""

from dataclasses import dataclass

import pytest
import torch

from fedvlm import tensors
from fedvlm.core import make, stacked
from fedvlm.methods.fedavg import FedAvg
from fedvlm.testing import learn, toy_world


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_the_written_gradient_is_that_of_autograd(name, momentum):
    world = toy_world(make(name, rounds=3, epochs=2, batch=4, momentum=momentum, decay=0.1))
    slow, fast = learn(world, "single", 1), learn(world, "batched", 1)
    assert tensors.difference(slow.shared, fast.shared) < 1e-6
    assert not torch.equal(fast.shared["head"], world.frozen.text)


@dataclass(frozen=True)
class Own(FedAvg):
    def predict(self, frozen, sent, local, x):
        return 2 * frozen.scale * x @ sent["head"].mT


def test_a_class_that_predicts_otherwise_does_not_inherit_the_fast_update():
    assert stacked(FedAvg()) is not None and stacked(Own()) is None
    world = toy_world(Own(rounds=2))
    apart = tensors.difference(learn(world, "single", 1).shared, learn(world, "batched", 1).shared)
    assert apart < 1e-6
