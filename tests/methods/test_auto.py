"""auto by its laws: four rounds, the pooled problem, and no client below its parts."""

from dataclasses import replace

import pytest
import torch

from fedvlm.core import make
from fedvlm.engines.client import make_client
from fedvlm.maths import head_mixing
from fedvlm.maths.head_mixing import CANDIDATE_WEIGHTS, MixPrior, mix_client, trust_in_shared
from fedvlm.maths.logistic_regression import CURVATURE, MAX_SAMPLE_LOSS, RELATIVE_RIDGES, Head, split_head
from fedvlm.maths.unlabelled import Labelled
from fedvlm.methods._logistic import zero_shot_head
from fedvlm.testing import toy_world, train_toy


def fit(method, frozen, clients):
    shared, local = method.init(frozen)
    phases = []
    for _ in range(method.rounds):
        sent = method.send(shared, "")
        uploads = [method.update(frozen, sent, local, client)[0] for client in clients]
        phases.append(sorted(uploads[0]))
        shared = method.aggregate(shared, uploads, torch.ones(len(uploads)), [str(i) for i in range(len(uploads))])
    return shared, phases


def made_world(text=True, n_samples=80):
    world = toy_world(make("auto", min_class_samples=1), [n_samples] * 4)
    return world if text else replace(world, frozen=replace(world.frozen, text=None))


def clients_of(world):
    return [make_client(world, id, 0) for id in world.members]


def pooled(clients):
    parts = {key: torch.cat([getattr(client, key) for client in clients]) for key in ("x", "y", "val_x", "val_y")}
    return replace(clients[0], **parts)


def logits(shared, x):
    return Head(shared["weight"], shared["bias"]).logits(x)


def test_four_rounds_of_three_phases_leave_one_head():
    world = made_world()
    shared, phases = fit(world.method, world.frozen, clients_of(world))
    gradients = ["gradient", "totals"]
    assert phases == [["counts", "gradient", "gram", "sums", "totals"], gradients, gradients, ["mix losses"]]
    assert sorted(shared) == ["bias", "weight"]


@pytest.mark.parametrize("text", [True, False])
def test_the_split_of_samples_over_clients_does_not_matter(text):
    world = made_world(text)
    clients = clients_of(world)
    apart, together = (fit(world.method, world.frozen, many)[0] for many in (clients, [pooled(clients)]))
    backwards = fit(world.method, world.frozen, clients[::-1])[0]
    x = clients[0].val_x
    for other in (together, backwards):
        assert (logits(apart, x) - logits(other, x)).abs().max() < 2e-2 * logits(apart, x).abs().max()


@pytest.mark.parametrize("text", [True, False])
def test_the_shared_head_is_as_good_as_a_pooled_regression(text):
    world = made_world(text)
    clients = clients_of(world)
    shared, _ = fit(world.method, world.frozen, clients)
    everyone = pooled(clients)
    ridge = make("pooled")
    upload, _ = ridge.update(world.frozen, {}, {}, everyone)
    of_auto, of_pooled = (
        float((head.logits(everyone.val_x).argmax(1) == everyone.val_y).double().mean())
        for head in (Head(shared["weight"], shared["bias"]), Head(upload["weight"], upload["bias"]))
    )
    assert of_auto >= of_pooled - 0.02


def client_with(client, n_samples, n_val=0):
    y = torch.where(torch.arange(len(client.y)) < n_samples, client.y, -1)
    val_y = torch.where(torch.arange(len(client.val_y)) < n_val, client.val_y, -1)
    return replace(client, y=y, val_y=val_y)


def test_a_client_without_samples_has_the_shared_head():
    world = made_world()
    clients = clients_of(world)
    sent, local = fit(world.method, world.frozen, clients)[0], world.method.init(world.frozen)[1]
    adapted = world.method.adapt(world.frozen, sent, local, client_with(clients[0], 0))
    assert adapted["weight change"].abs().max() < 1e-5 and adapted["bias change"].abs().max() < 1e-5


def test_the_fewer_samples_the_nearer_a_client_is_to_the_shared_head():
    world = made_world()
    clients = clients_of(world)
    sent, local = fit(world.method, world.frozen, clients)[0], world.method.init(world.frozen)[1]

    def change(n_samples):
        return world.method.adapt(world.frozen, sent, local, client_with(clients[0], n_samples))["weight change"].norm()

    assert change(1) < 0.5 * change(40)


def test_a_poisoned_shared_head_does_not_take_a_client_with_validation_samples_along():
    world = made_world()
    client = pooled(clients_of(world))
    sent, _ = fit(world.method, world.frozen, clients_of(world))
    poisoned = Head(-2 * sent["weight"].double(), -2 * sent["bias"].double())
    half = len(client.val_y) // 2
    zero = split_head(torch.zeros(4, 17, dtype=torch.float64))
    labelled = Labelled(client.x.double(), client.y, client.val_x[:half].double(), client.val_y[:half])
    mix = mix_client(poisoned, zero, labelled, torch.zeros(0, 16), MixPrior())
    alone = make("alone")
    local = alone.adapt(world.frozen, {}, alone.init(world.frozen)[1], client)
    test_x, test_y = client.val_x[half:], client.val_y[half:]
    of_mix = (mix.head.logits(test_x.double()).argmax(1) == test_y).double().mean()
    of_alone = (alone.predict(world.frozen, {}, local, test_x).argmax(1) == test_y).double().mean()
    assert of_mix >= of_alone - 0.03


def test_a_fit_limited_in_work_is_nearly_the_full_one(monkeypatch):
    world = made_world()
    client = clients_of(world)[0]
    labelled, zero = Labelled(client.x, client.y, client.val_x, client.val_y), Head(torch.zeros(4, 16), torch.zeros(4))

    def own_head():
        head = mix_client(zero, zero, labelled, torch.zeros(0, 16), MixPrior()).head
        return head.weight.dtype, head.logits(client.x.to(head.weight.dtype)).argmax(1)

    dtype, predictions = own_head()
    monkeypatch.setattr(head_mixing, "MAX_FIT_PRODUCTS", 1)
    few_steps_dtype, few_steps_predictions = own_head()
    assert (dtype, few_steps_dtype) == (torch.float64, torch.float32)
    assert (predictions == few_steps_predictions).double().mean() > 0.95
    assert (few_steps_predictions == client.y).double().mean() > 0.6


def test_weights_of_the_parts_are_reported():
    world = made_world()
    outcome = train_toy(world)
    described = world.method.describe(world.frozen, {}, outcome.local["client-0"])
    assert list(described) == [
        f"weight of {part}" for part in ("shared head", "local head", "class frequencies", "unlabelled images")
    ]


def attacked(method, frozen, clients, change):
    shared, local = method.init(frozen)
    for _ in range(method.rounds):
        sent = method.send(shared, "")
        uploads = [method.update(frozen, sent, local, client)[0] for client in clients]
        uploads[0] = {key: change(value) for key, value in uploads[0].items()}
        shared = method.aggregate(shared, uploads, torch.ones(len(uploads)), [str(i) for i in range(len(uploads))])
        assert all(tensor.isfinite().all() for tensor in shared.values())
    return shared


@pytest.mark.parametrize("factor", [-2.0, -4.0, 1e6, -1e6])
@pytest.mark.parametrize("text", [True, False])
def test_no_upload_moves_the_shared_head_farther_than_a_minimiser_can_lie(text, factor):
    world = made_world(text)
    shared = attacked(world.method, world.frozen, clients_of(world), lambda value: factor * value)
    anchor = zero_shot_head(world.frozen).double()
    curvature = CURVATURE if text else 1 / len(anchor)
    radius = (2 * MAX_SAMPLE_LOSS / (curvature * min(RELATIVE_RIDGES))) ** 0.5
    head = Head(shared["weight"].double(), shared["bias"].double()).joined()
    largest = (
        max(CANDIDATE_WEIGHTS) * (radius + anchor.norm()) + anchor.norm() + 2 * radius
    )  # candidate, text, Gaussian
    assert head.norm() < largest


@pytest.mark.parametrize("text", [True, False])
def test_a_client_beside_an_attacker_is_no_worse_than_alone(text):
    world = made_world(text, 1000)
    everyone = clients_of(world)
    clients = [client_with(client, 40, 10) for client in everyone]
    shared = attacked(world.method, world.frozen, clients, lambda value: -2 * value)
    alone, n_correct = make("alone"), {"auto": 0, "alone": 0}
    for client, whole in zip(clients[1:], everyone[1:], strict=True):
        test_x, test_y = whole.x[40:], whole.y[40:]
        for method, sent in ((world.method, shared), (alone, {})):
            local = method.adapt(world.frozen, sent, method.init(world.frozen)[1], client)
            n_correct[method.name] += int((method.predict(world.frozen, sent, local, test_x).argmax(1) == test_y).sum())
    assert n_correct["auto"] >= n_correct["alone"] - 0.01 * 3 * 960


def test_a_shared_head_is_trusted_unless_the_samples_speak_against_it():
    world = made_world()
    client, prior = pooled(clients_of(world)), MixPrior()
    start = split_head(zero_shot_head(world.frozen).double())
    sent = fit(world.method, world.frozen, clients_of(world))[0]
    good = Head(sent["weight"].double(), sent["bias"].double())
    bad = Head(-2 * good.weight, -2 * good.bias)
    labelled = Labelled(client.x.double(), client.y, client.val_x.double(), client.val_y)
    nothing = labelled._replace(y=torch.full_like(client.y, -1), val_y=torch.full_like(client.val_y, -1))
    assert trust_in_shared(good, start, labelled, prior) == 1
    assert trust_in_shared(bad, start, labelled, prior) < 1e-6
    assert trust_in_shared(bad, start, nothing, prior) == 1
