"""The choice of auto's recipe: by no row of the reported tests, and of what ships."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedvlm.engines.client import make_client
from fedvlm.maths import logistic_regression
from fedvlm.testing import toy_world, train_toy
from tools.auto.choose import FIRST, REPORTED, chosen, untested
from tools.auto.measure import prepared_of
from tools.auto.recipes import RECIPES, SHIPPED, Remembering, heads_of, rotations
from tools.auto.sets import LODO, Set


@pytest.mark.parametrize("split", [False, True])
def test_no_row_that_is_reported_chooses(rows_like, split):
    rows = rows_like()
    if split:
        parts = np.random.default_rng(0).choice(["train", "validation", "test"], len(rows.labels))
        rows = replace(rows, splits=parts)
    one = Set("made", {"partition": "domain"}, LODO, rows)
    reported = {
        rows.content[row]
        for seed in REPORTED
        for member in prepared_of(one, {"name": "alone"}, seed).partition.clients.values()
        for row in member.test
    }
    assert FIRST not in REPORTED
    left = untested(one, FIRST)
    assert reported and not reported & set(left.rows.content)
    judges = prepared_of(left, {"name": "alone"}, FIRST).partition.clients.values()
    assert all(len(one.test) and len(one.validation) for one in judges)


def test_the_recipe_that_ships_is_auto():
    world = toy_world(Remembering(rounds=4), (60, 50, 70, 40))
    outcome = train_toy(world)
    sent = world.method.send(outcome.shared, "")
    for id, local in outcome.local.items():
        one = make_client(world, id, 0)
        head = SHIPPED.head(heads_of(world.method, world.frozen, outcome.shared, sent, one, False), one)
        theirs = world.method.predict(world.frozen, sent, local, one.x)
        assert torch.allclose(head.logits(one.x.double()).float(), theirs, atol=1e-3)


def test_a_rotation_starts_at_the_shared_head_and_lowers_the_loss():
    world = toy_world(Remembering(rounds=4), (60, 50, 70, 40))
    sent = world.method.send(train_toy(world).shared, "")
    one = make_client(world, "client-0", 0)
    path = rotations(logistic_regression.Head(sent["weight"].double(), sent["bias"].double()), one)
    assert torch.allclose(path.weight[0].float(), sent["weight"], atol=1e-4)
    losses = logistic_regression.summed_cross_entropy(path.logits(one.x.double()), one.y)
    assert (losses[1:4].diff() < 0).all() and losses[1] < losses[0]
    norms = torch.linalg.matrix_norm(path.weight)
    assert torch.allclose(norms, norms[0], rtol=1e-4)


def test_the_simplest_recipe_within_an_error_of_the_best_is_chosen():
    names = [one.name for one in RECIPES]

    def found(gains):
        return {
            "set": {
                seed: {name: {"own": 50.0 + gains.get(name, 0.0) * (1 + seed)} for name in names} for seed in (0, 1)
            }
        }

    *_, last = chosen(found({names[4]: 1.0, names[2]: 0.9}))
    assert last == f"chosen: {names[4]}"  # 0.15 below the best, and its error is 0.05
    *_, last = chosen(found({names[4]: 1.0, names[2]: 1.0}))
    assert last == f"chosen: {names[2]}"
