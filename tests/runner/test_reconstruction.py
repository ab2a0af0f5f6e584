"""Attacks of a server that deviates: they find what there is to find, and nothing in what is protected."""

import pytest
import torch

from fedvlm.engines.client import Task
from fedvlm.engines.loop import initial_state
from fedvlm.engines.sequential import Sequential
from fedvlm.maths.logistic_regression import Head, loss_and_gradient
from fedvlm.runner.prepare import prepare
from fedvlm.runner.reconstruction import (
    recovered_fraction,
    recovered_from_sum,
    recovered_from_upload,
    slab_attack,
    span_auc,
    span_scores,
)
from fedvlm.runner.settings import build


def unit_rows(count, dim, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, dim, generator=draw) + 1, dim=1)


def world_of(rows, method, **settings):
    built = build({"protocol": "own-test", "method": method, **settings})
    prepared = prepare(built, rows, 0)
    (training,) = prepared.trainings
    return prepared.world(training), sorted(training.train)


@pytest.mark.parametrize("has_one", [False, True])
def test_members_of_a_small_sum_are_told_by_their_span_and_those_of_a_large_one_hardly(has_one):
    for count, low, high in ((20, 0.999, 1.0), (4000, 0.4, 0.65)):
        inside, outside = unit_rows(count, 32), unit_rows(500, 32, seed=1)
        rows = torch.cat([inside, torch.ones(count, 1)], dim=1) if has_one else inside
        second = rows.double().mT @ rows.double()
        above = (span_scores(second, inside)[:, None] > span_scores(second, outside)[None]).double().mean()
        assert low <= float(above) <= high


def test_slabs_give_single_samples_of_a_gradient_and_none_of_a_bounded_head():
    x, y = unit_rows(60, 16), torch.arange(60) % 8

    def gradient_at(head):
        return loss_and_gradient(Head(head[:, :-1].float(), head[:, -1].float()), x, y, 10.0)[1].reshape(8, 17)

    draw = torch.Generator().manual_seed(0)
    assert recovered_fraction(x, slab_attack(gradient_at, 8, 16, draw, float("inf"))) > 0.9
    assert recovered_fraction(x, slab_attack(gradient_at, 8, 16, draw, 20.0)) < 0.05
    other = unit_rows(60, 16, seed=5)
    assert recovered_fraction(other, slab_attack(gradient_at, 8, 16, draw, float("inf"))) < 0.3


@pytest.mark.parametrize("method", ["auto", "fedavg", "fedot"])
def test_a_server_that_deviates_recovers_samples_from_single_uploads(rows, method):
    world, ids = world_of(rows, method)
    assert recovered_from_upload(world, ids[0]) > 0.5


def test_the_sum_within_the_bounds_of_a_verified_sum_gives_less(rows):
    world, ids = world_of(rows, "auto")
    assert recovered_from_sum(world, ids) <= recovered_from_upload(world, ids[0]) / 2


def test_a_method_without_a_head_that_the_server_sends_is_not_measured(rows):
    world, ids = world_of(rows, {"name": "tofa"})
    assert recovered_from_upload(world, ids[0]) is None and recovered_from_sum(world, ids) is None


def test_the_second_moment_of_an_upload_is_found_by_its_size(rows):
    for method in ("auto", "ridge", "tofa"):
        world, ids = world_of(rows, {"name": method, "min_class_samples": 1}, allow_small=True)
        state, local = initial_state(world)
        tasks = [Task(id, world.method.send(state.shared, id), local, True) for id in ids]
        replies = Sequential(world).round(0, tasks).replies
        assert span_auc(world, ids[:1], [replies[ids[0]].upload]) is not None
    assert span_auc(world, ids[:1], [{"head": torch.zeros(4, 16)}]) is None
