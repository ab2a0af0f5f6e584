"""ridge by its laws: the pooled solution, whoever holds the samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge as SklearnRidge

from fedvlm.core import make
from fedvlm.engines.client import make_client
from fedvlm.errors import SettingsError
from fedvlm.maths.ridge_regression import class_log_prior
from fedvlm.methods.ridge import RIDGES, path_of
from fedvlm.testing import toy_world, train_toy

STRENGTHS = torch.tensor([0.1, 1.0, 10.0, 100.0, 1e3, 1e4], dtype=torch.float64)


def samples(seed=0, n_samples=90, dim=12, classes=4):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n_samples,), generator=draw)
    centres = torch.randn(classes, dim, generator=draw, dtype=torch.float64)
    x = centres[y] + torch.randn(n_samples, dim, generator=draw, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=1), y


def clients(x, y, parts):
    """One client per part of the samples; all hold the same validation samples."""
    client = make_client(toy_world(make("ridge")), "client-0", 0)
    return [replace(client, x=x[part], y=y[part], val_x=x[:20], val_y=y[:20]) for part in parts]


def frozen_for(x, classes=4, text=True):
    world = toy_world(make("ridge"))
    draw = torch.Generator().manual_seed(5)
    vectors = torch.nn.functional.normalize(
        torch.randn(classes, x.shape[1], generator=draw, dtype=torch.float64), dim=1
    )
    names = tuple(f"class {k}" for k in range(classes))
    return replace(world.frozen, classes=names, dim=x.shape[1], text=vectors if text else None, text_tower=None)


def fit(method, frozen, members):
    shared, local = method.init(frozen)
    shared = {key: value.double() for key, value in shared.items()}
    for _ in range(method.rounds):
        uploads = [method.update(frozen, method.send(shared, ""), local, member)[0] for member in members]
        shared = method.aggregate(shared, uploads, torch.ones(len(uploads)), [str(i) for i in range(len(uploads))])
    return shared


def largest_difference(a, b):
    return max(float((a[key] - b[key]).abs().max()) for key in ("weight", "bias"))


def parts_of(n_samples, kind):
    order = torch.from_numpy(np.random.default_rng(3).permutation(n_samples))
    cuts = {"three": [10, 50], "one sample each": list(range(1, n_samples)), "one client": []}[kind]
    return torch.tensor_split(order, cuts)


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("kind", ["three", "one sample each", "one client"])
def test_any_split_and_order_gives_the_pooled_solution(kind, text):
    x, y = samples()
    method, frozen = make("ridge", ridge=1e-3, min_class_samples=1), frozen_for(x, text=text)
    pooled = fit(method, frozen, clients(x, y, [slice(None)]))
    members = clients(x, y, parts_of(len(y), kind))
    assert largest_difference(fit(method, frozen, members), pooled) < 1e-8
    assert largest_difference(fit(method, frozen, members[::-1]), pooled) < 1e-8


def test_without_a_client_it_is_as_if_it_had_never_been_there():
    x, y = samples()
    method, frozen = make("ridge", ridge=1e-3, min_class_samples=1), frozen_for(x)
    members = clients(x, y, parts_of(len(y), "three"))
    shared, local = method.init(frozen)
    uploads = [method.update(frozen, shared, local, member)[0] for member in members]
    total = {key: sum(upload[key] for upload in uploads) for key in uploads[0]}
    rest = {key: total[key] - uploads[1][key] for key in total}
    shared = {key: value.double() for key, value in shared.items()}
    subtracted = method.aggregate(shared, [rest], torch.ones(1), ["rest"])
    never = method.aggregate(shared, [uploads[0], uploads[2]], torch.ones(2), ["a", "c"])
    for ridge in (1e-4, 1e-1):
        a, b = (path_head(state, ridge) for state in (subtracted, never))
        assert torch.allclose(a.weight, b.weight, atol=1e-8) and torch.allclose(a.bias, b.bias, atol=1e-8)


def path_head(shared, ridge):
    return path_of({key: value.double() for key, value in shared.items()}).head(ridge)


def test_statistics_of_a_new_class_give_the_training_with_all_classes_from_the_start():
    x, y = samples()
    method, frozen = make("ridge", ridge=1e-3, min_class_samples=1), frozen_for(x)
    first, later = clients(x, y, [y < 3, y == 3])
    shared, local = method.init(frozen)
    shared = {key: value.double() for key, value in shared.items()}
    uploads = [method.update(frozen, shared, local, member)[0] for member in (first, later)]
    grown = {key: uploads[0][key] + uploads[1][key] for key in uploads[0]}
    at_once = method.update(frozen, shared, local, *clients(x, y, [slice(None)]))[0]
    a, b = (path_head(method.aggregate(shared, [u], torch.ones(1), ["a"]), 1e-3) for u in (grown, at_once))
    assert torch.allclose(a.weight, b.weight, atol=1e-8) and torch.allclose(a.bias, b.bias, atol=1e-8)


@pytest.mark.parametrize("ridge", [1e-4, 1e-2])
def test_without_text_it_is_scikit_learns_ridge(ridge):
    x, y = samples()
    method, frozen = make("ridge", ridge=ridge, min_class_samples=1), frozen_for(x, text=False)
    shared, local = method.init(frozen)
    shared = {key: value.double() for key, value in shared.items()}
    upload = method.update(frozen, shared, local, *clients(x, y, [slice(None)]))[0]
    head = path_head(method.aggregate(shared, [upload], torch.ones(1), ["a"]), ridge)
    expected = SklearnRidge(alpha=ridge * len(y)).fit(x.numpy(), torch.nn.functional.one_hot(y).double().numpy())
    assert np.allclose(head.weight.numpy(), expected.coef_, atol=1e-8)
    assert np.allclose(head.bias.numpy(), expected.intercept_, atol=1e-8)


def test_a_strong_ridge_gives_the_direction_of_the_text():
    x, y = samples()
    method, frozen = make("ridge", ridge=1e9, min_class_samples=1), frozen_for(x)
    weight = fit(method, frozen, clients(x, y, [slice(None)]))["weight"]
    assert torch.nn.functional.cosine_similarity(weight, frozen.text, dim=1).min() > 1 - 1e-6


def test_without_any_statistics_it_is_zero_shot():
    x, y = samples()
    method, frozen = make("ridge", min_class_samples=10_000), frozen_for(x)
    shared = fit(method, frozen, clients(x, y, [slice(None)]))
    predicted = method.predict(frozen, shared, method.init(frozen)[1], x)
    assert torch.equal(predicted.argmax(1), (x @ frozen.text.mT).argmax(1))


def test_a_class_too_small_to_upload_keeps_its_text():
    x, y = samples()
    small = torch.cat([torch.nonzero(y != 2)[:, 0], torch.nonzero(y == 2)[:3, 0]])
    method, frozen = make("ridge", min_class_samples=10), frozen_for(x)
    shared = fit(method, frozen, clients(x, y, [small]))
    assert torch.nn.functional.cosine_similarity(shared["weight"][2], frozen.text[2], dim=0) > 1 - 1e-6
    other = torch.nn.functional.cosine_similarity(shared["weight"][0], frozen.text[0], dim=0)
    assert other < 0.999


def test_the_chosen_regularisation_has_the_lowest_validation_loss_of_all():
    x, y = samples(n_samples=60)
    frozen, members = frozen_for(x), clients(x, y, [slice(20, None)])

    def loss(method):
        shared = fit(method, frozen, members)
        logits = method.predict(frozen, shared, method.init(frozen)[1], x[:20])
        return float(torch.nn.functional.cross_entropy(logits, y[:20]))

    chosen = loss(make("ridge", min_class_samples=1))
    assert chosen <= min(loss(make("ridge", ridge=r, min_class_samples=1)) for r in RIDGES) + 1e-9


def test_few_samples_move_the_class_prior_little_and_many_move_it_far():
    frequencies = torch.full((5,), 0.2, dtype=torch.float64)
    none = class_log_prior(torch.zeros(5, dtype=torch.float64), frequencies, STRENGTHS)
    assert torch.allclose(none, torch.zeros(5, dtype=torch.float64), atol=1e-12)
    few, many = (
        class_log_prior(torch.tensor([n, n, 0.0, 0.0, 0.0], dtype=torch.float64), frequencies, STRENGTHS)
        for n in (1.0, 500.0)
    )
    assert few[2:].min() > -1.2 and many[2:].max() < -4


def test_two_communication_rounds_are_all_it_takes():
    with pytest.raises(SettingsError, match="ridge.rounds must be between 2 and 2, got 3"):
        toy_world(make("ridge", rounds=3))
    outcome = train_toy(toy_world(make("ridge", min_class_samples=1)))
    assert set(outcome.shared) == {"weight", "bias", "frequencies"}
