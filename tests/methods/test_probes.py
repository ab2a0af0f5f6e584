"""alone, pooled, probe and auto by their laws, on made federations."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedvlm import tensors
from fedvlm.core import make
from fedvlm.engines.client import ClientRows, make_client
from fedvlm.errors import FedVLMError
from fedvlm.maths import gaussian_classes, logistic_regression
from fedvlm.testing import toy_world, train_toy


def world_of(name, sizes=(40, 25, 70, 33), **settings):
    return toy_world(make(name, **settings), sizes)


def held_loss(world, outcome, local, id):
    member = world.members[id]
    rows = torch.from_numpy(member.validation)
    sent = world.method.send(outcome.shared, id)
    logits = world.method.predict(world.frozen, sent, local, world.x[rows])
    return float(logistic_regression.summed_cross_entropy(logits, world.y[rows]))


def test_alone_shares_nothing():
    world = world_of("alone")
    outcome = train_toy(world)
    assert outcome.shared == {} and world.method.init(world.frozen)[0] == {}


def test_alone_is_one_of_its_clients_own_fits():
    world = world_of("alone")
    local = train_toy(world).local["client-0"]
    toy_client = make_client(world, "client-0", 0)
    ridge = local["ridge"].double()[None]
    nothing = logistic_regression.Head(torch.zeros(4, 16), torch.zeros(4))
    heads = logistic_regression.fit_converged_path(
        toy_client.x, toy_client.y, ridge, nothing, torch.ones(4, dtype=torch.bool)
    ).heads
    assert torch.allclose(local["weight"], heads.weight[0].float(), rtol=1e-3, atol=1e-3)
    assert local["gradient"] < 1e-7


@pytest.mark.parametrize("has_text", [True, False])
def test_pooled_starts_from_text_where_there_is_text(has_text):
    """A class without samples keeps the text's row; without text it is ruled out."""
    world = world_of("pooled")
    frozen = world.frozen if has_text else replace(world.frozen, text=None)
    toy_client = make_client(world, "client-0", 0)
    without = replace(toy_client, y=torch.where(toy_client.y == 2, -1, toy_client.y))
    head, _ = world.method.update(frozen, {}, {}, without)
    assert head["gradient"] < 1e-7
    if not has_text:
        assert head["bias"][2] == gaussian_classes.ABSENT_CLASS_LOGIT
        return
    change = head["weight"] - frozen.scale * frozen.text
    assert head["bias"][2] > gaussian_classes.ABSENT_CLASS_LOGIT
    far = make("pooled").update(replace(frozen, scale=0.0), {}, {}, without)[0]["weight"]
    assert change.norm() < (far - frozen.scale * frozen.text).norm()


def test_alone_rules_out_a_class_it_has_no_rows_of():
    world = world_of("alone")
    toy_client = make_client(world, "client-0", 0)
    without = replace(toy_client, y=torch.where(toy_client.y == 2, -1, toy_client.y))
    local = world.method.adapt(world.frozen, {}, world.method.init(world.frozen)[1], without)
    assert local["bias"][2] == gaussian_classes.ABSENT_CLASS_LOGIT
    assert (world.method.predict(world.frozen, {}, local, toy_client.x).argmax(1) != 2).all()


def test_pooled_on_one_client_is_alone_there_without_text():
    pooled, alone = world_of("pooled"), world_of("alone")
    toy_client, frozen = make_client(pooled, "client-2", 0), replace(pooled.frozen, text=None)
    upload, _ = pooled.method.update(frozen, {}, {}, toy_client)
    local = alone.method.adapt(frozen, {}, {}, toy_client)
    assert torch.equal(upload["weight"], local["weight"])


@pytest.mark.parametrize("ridge", [1e-2, 1e-3])
def test_the_federated_probe_is_the_pooled_solution(ridge):
    world = world_of("probe", ridge=ridge)
    shared = train_toy(world).shared
    ids = sorted(world.members)[:-1]
    rows = torch.from_numpy(np.concatenate([world.members[id].train for id in ids]))
    x, y = world.x[rows], world.y[rows]
    anchor = logistic_regression.split_head(shared["server anchor"].double())
    all_classes = torch.ones(4, dtype=torch.bool)
    best = logistic_regression.fit_ridge_path(x, y, torch.tensor([ridge]).double(), anchor, all_classes, 150).heads

    def objective(weight, bias):
        loss = logistic_regression.summed_cross_entropy(
            logistic_regression.Head(weight, bias).logits(x.double()), y
        ) / len(y)
        return float(loss + ridge / 2 * (weight - anchor.weight).square().sum())

    best_objective = objective(best.weight[0], best.bias[0])
    reached_objective = objective(shared["weight"].double(), shared["bias"].double())
    assert best_objective * (1 - 1e-6) <= reached_objective <= best_objective * (1 + 1e-3)


def test_a_client_of_the_probe_is_no_worse_than_shared_or_alone_on_validation_rows():
    world = world_of("probe", rounds=6)
    outcome = train_toy(world)
    _, initial_local = world.method.init(world.frozen)
    alone_world = world_of("alone")
    single = train_toy(alone_world)
    for id, local in outcome.local.items():
        probe_loss = held_loss(world, outcome, local, id)
        assert probe_loss <= held_loss(world, outcome, initial_local, id) + 1e-4
        assert probe_loss <= held_loss(alone_world, single, single.local[id], id) + 1e-4


@pytest.mark.parametrize("name", ["probe", "auto"])
def test_a_client_of_few_rows_says_nothing_and_still_has_a_classifier(name):
    world = world_of(name, sizes=(40, 9, 70, 33), rounds=4)
    shared, local = world.method.init(world.frozen)
    sent = world.method.send(shared, "")
    small_upload, large_upload = (
        world.method.update(world.frozen, sent, local, make_client(world, id, 0))[0] for id in ("client-1", "client-0")
    )
    assert not any(tensor.any() for tensor in small_upload.values())
    assert all(large_upload[key].any() for key in ("gradient", "totals", "gram"))
    assert train_toy(world).local["client-1"]["weight change"].any()


def test_a_server_keeps_its_walk_to_itself():
    for name in ("probe", "auto"):
        world = world_of(name)
        sent = world.method.send(train_toy(world).shared, "client-0")
        assert not [key for key in sent if key.startswith("walk")]


def test_auto_sends_statistics_once_and_no_small_class():
    world = world_of("auto", sizes=(40, 90, 200, 33))
    shared, local = world.method.init(world.frozen)
    sent = world.method.send(shared, "")
    upload, _ = world.method.update(world.frozen, sent, local, make_client(world, "client-0", 0))
    counts = torch.bincount(make_client(world, "client-0", 0).y, minlength=4)
    small = counts < world.method.min_class_samples
    assert small.any() and (upload["counts"][:-1][small] == 0).all()
    assert not upload["sums"][:-1][small].any()
    started = world.method.aggregate(shared, [upload], torch.ones(1), ["client-0"])
    again, _ = world.method.update(
        world.frozen, world.method.send(started, ""), local, make_client(world, "client-0", 1)
    )
    assert sorted(again) == ["gradient", "totals"]


@pytest.mark.parametrize("text", [True, False])
def test_auto_takes_what_is_good_for_a_client_and_for_one_unseen(text):
    world = world_of("auto", sizes=(80, 80, 80, 80))
    if not text:
        world = replace(world, frozen=replace(world.frozen, text=None))
    outcome = train_toy(world)
    client_scores = [outcome.scores[id] for id in outcome.local]
    accuracy = sum(scores["test_hits"] for scores in client_scores) / sum(
        scores["test_rows"] for scores in client_scores
    )
    unseen = outcome.scores["client-3"]
    assert accuracy > 0.8 and unseen["test_hits"] / unseen["test_rows"] > 0.6
    assert torch.stack([local["mix weights"] for local in outcome.local.values()]).isfinite().all()


def test_auto_works_without_validation_rows_and_with_one_class_at_a_client():
    world = world_of("auto", sizes=(40, 40, 40, 40))
    members = {id: ClientRows(rows.train, rows.validation[:0], rows.test) for id, rows in world.members.items()}
    first = members["client-0"]
    one_class = first.train[(world.y[torch.from_numpy(first.train)] == 1).numpy()]
    members["client-0"] = ClientRows(one_class, first.validation, first.test)
    outcome = train_toy(replace(world, members=members))
    states = [outcome.shared, *outcome.local.values()]
    assert all(tensors.flatten(state).isfinite().all() for state in states)
    assert outcome.local["client-0"]["bias change"].argmax() == 1


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("auto", {"rounds": 1}, "auto.rounds must be at least 2, got 1"),
        ("auto", {"min_class_samples": 0}, "auto.min_class_samples must be at least 1, got 0"),
        ("probe", {"ridge": 0.0}, "probe.ridge must be above 0, got 0.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(name, wrong, words):
    with pytest.raises(FedVLMError, match=words):
        make(name, **wrong)
