"""ditto by its laws: the shared head is FedAvg's, the personal one a proximal fit."""

import pytest
import torch

from fedvlm.core import make
from fedvlm.engines.client import make_client
from fedvlm.testing import toy_world, train_toy

SETTINGS = {"rounds": 3, "lr": 0.05, "local_epochs": 2, "weight_decay": 0.0}


@pytest.mark.parametrize("prox_weight", [0.0, 1.0])
def test_the_shared_head_is_that_of_fedavg(prox_weight):
    ditto = train_toy(toy_world(make("ditto", prox_weight=prox_weight, **SETTINGS)))
    fedavg = train_toy(toy_world(make("fedavg", **SETTINGS)))
    assert torch.allclose(ditto.shared["head"], fedavg.shared["head"], atol=1e-6)


def test_a_round_of_the_personal_head_is_the_formula_in_float64():
    settings = {**SETTINGS, "local_epochs": 1, "rounds": 1, "batch_size": 1000}
    world = toy_world(make("ditto", prox_weight=0.7, **settings))
    client = make_client(world, "client-0", 0)
    shared, local = world.method.init(world.frozen)
    torch.manual_seed(0)
    local = {**local, "personal head": local["personal head"] + 0.1 * torch.randn_like(local["personal head"])}
    _, after = world.method.update(world.frozen, shared, local, client)
    x, y = client.x.double(), client.y
    v, w = local["personal head"].double(), shared["head"].double()
    error = (world.frozen.scale * x @ v.mT).softmax(1) - torch.nn.functional.one_hot(y, len(v)).double()
    gradient = world.frozen.scale * error.mT @ x / len(y) + 0.7 * (v - w)
    assert torch.allclose(after["personal head"].double(), v - 0.05 * gradient, atol=1e-5)


def test_a_strong_pull_keeps_the_personal_head_at_the_shared_one_of_the_round():
    settings = {**SETTINGS, "lr": 1e-3}
    world = toy_world(make("ditto", prox_weight=900.0, **settings))
    outcome = train_toy(world)
    free = train_toy(toy_world(make("ditto", prox_weight=0.0, **{**settings, "lr": 1e-3})))

    def distance(outcome):
        return float((outcome.local["client-0"]["personal head"] - outcome.shared["head"]).norm())

    assert distance(outcome) < 0.5 * distance(free)


def test_a_client_nobody_has_seen_uses_the_shared_head():
    world = toy_world(make("ditto", **SETTINGS))
    outcome = train_toy(world)
    fresh = world.method.init(world.frozen)[1]
    logits = world.method.predict(world.frozen, outcome.shared, fresh, world.x)
    assert torch.allclose(logits, world.frozen.scale * world.x @ outcome.shared["head"].mT)
    trained = world.method.predict(world.frozen, outcome.shared, outcome.local["client-0"], world.x)
    assert not torch.allclose(trained, logits)
