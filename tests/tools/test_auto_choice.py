"""The choice of auto's recipe: by no row of the reported tests, and of what ships."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedvlm.core import make
from fedvlm.engines.client import make_client
from fedvlm.maths.logistic_regression import Head
from fedvlm.testing import toy_world, train_toy
from tools.auto.choose import FIRST, REPORTED, chosen, untested
from tools.auto.measure import prepared_of
from tools.auto.recipes import RECIPES, SHIPPED
from tools.auto.sets import LODO, Set
from tools.auto.sizes import pool_and_judges, small_clients


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
    world = toy_world(make("auto"), (60, 50, 70, 40))
    outcome = train_toy(world)
    sent = world.method.send(outcome.shared, "")
    for id, local in outcome.local.items():
        client = make_client(world, id, 0)
        head = SHIPPED.head(Head(sent["weight"], sent["bias"]), client, world.frozen)
        expected = world.method.predict(world.frozen, sent, local, client.x)
        assert torch.allclose(head.logits(client.x.double()).float(), expected, atol=1e-3)


def test_small_clients_have_no_sample_that_they_are_tested_on():
    world = toy_world(make("auto"), (60, 50, 70, 40))
    draw = np.random.default_rng(0)
    (x, y), (test_x, test_y) = pool_and_judges(world, "client-0", False, draw)
    rows = {tuple(row) for row in test_x.tolist()}
    assert len(test_y) and not rows & {tuple(row) for row in x.tolist()}
    client = make_client(world, "client-0", 0)
    assert not rows & {tuple(row) for row in client.x.tolist()}
    sizes = [(size, len(one.y), len(one.val_y)) for size, one in small_clients(client, (x, y), 1, draw)]
    assert sizes[:3] == [(1, 1, 0), (2, 2, 0), (4, 3, 1)]


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
