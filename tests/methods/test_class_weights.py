"""Class weights: equal classes change nothing, rare classes count as if their samples were repeated."""

from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedvlm import tensors
from fedvlm.core import make
from fedvlm.engines.client import make_client
from fedvlm.errors import SettingsError
from fedvlm.maths.gaussian_classes import balanced_weights
from fedvlm.maths.logistic_regression import Head, fit_converged_path
from fedvlm.parts.findings import per_finding
from fedvlm.runner.settings import build, with_method
from fedvlm.testing import check_method, shorten, toy_world, train_toy


def test_weights_of_classes_are_1_on_average_and_of_absent_ones_finite():
    y = torch.tensor([[0, 0, 0, 1, -1], [2, 2, 0, 0, -1]])
    assert torch.equal(balanced_weights(y, 3), torch.tensor([[4 / 6, 2.0, 4.0], [1.0, 4.0, 1.0]]))
    assert torch.equal(balanced_weights(y[0], 3), torch.tensor([4 / 6, 2.0, 4.0]))


@pytest.mark.parametrize(
    "name", ["alone", "ditto", "fedakt", "fedavg", "fedgh", "fedot", "fedrep", "fens", "fedbens", "pooled", "scaffold"]
)
def test_a_method_with_weights_keeps_the_contract(name):
    check_method(make(name, class_weights="balanced"))


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedrep", "fedot", "promptfl", "fedavg-tower"])
def test_weights_change_the_update_only_where_classes_are_uneven(name):
    world = toy_world(shorten(make(name, class_weights="balanced")))
    method, plain = world.method, replace(world.method, class_weights="none")
    shared, local = method.init(world.frozen)
    client = make_client(world, "client-0", 0)
    n_classes = len(world.frozen.classes)
    even = torch.arange(len(client.y)) // (-(-len(client.y) // n_classes))
    even = torch.where(
        torch.arange(len(even)) < len(even) // n_classes * n_classes, torch.arange(len(even)) % n_classes, -1
    )
    order = torch.where((client.order >= 0) & (even[client.order.clamp(min=0)] >= 0), client.order, -1)
    uneven = torch.where(torch.arange(len(client.y)) == 0, 1, 0)
    for y, steps, is_same in ((even, order, True), (uneven, client.order, False)):
        given = replace(client, y=y, order=steps)
        uploads = [m.update(world.frozen, method.send(shared, "client-0"), local, given)[0] for m in (method, plain)]
        assert all(torch.equal(a, uploads[1][key]) for key, a in uploads[0].items()) == is_same


@pytest.mark.parametrize("name", ["fedavg", "fedot", "fedrep"])
@pytest.mark.parametrize("engine", ["single", "batched"])
def test_weights_equal_repeating_the_rare_samples_in_a_full_batch(name, engine):
    settings = {"batch_size": 1000, "rounds": 2, "lr": 0.01, "momentum": 0.0}
    world = toy_world(make(name, class_weights="balanced", **settings), sizes=[24])
    (id,) = world.members
    rows = world.members[id].train
    labels = torch.tensor([1] * 4 + [0] * (len(rows) - 4 - len(rows) % 4))
    y = world.y.clone()
    y[torch.from_numpy(rows[: len(labels)])] = labels
    members = {id: replace(world.members[id], train=rows[: len(labels)])}
    repeats = [len(labels) // 4 - 1 if label else 1 for label in labels.tolist()]
    repeated = {id: replace(members[id], train=members[id].train.repeat(repeats))}
    plain = replace(world.method, class_weights="none")
    weighted = train_toy(replace(world, y=y, members=members), engine, 1)
    expected = train_toy(replace(world, method=plain, y=y, members=repeated), engine, 1)
    assert tensors.max_relative_difference(weighted.shared, expected.shared) < 1e-5


def test_weighted_logistic_regression_is_scikit_learns():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(120, 6, generator=generator)
    y = (torch.arange(120) % 10 == 0).long() + (x[:, 0] > 1.3).long()
    ridge = torch.tensor([1e-2], dtype=torch.float64)
    start = Head(torch.zeros(3, 6), torch.zeros(3))
    path = fit_converged_path(x, y, ridge, start, torch.ones(3) > 0, balanced_weights(y, 3))
    reference = LogisticRegression(C=1 / (120 * 1e-2), class_weight="balanced", tol=1e-10, max_iter=5000).fit(x, y)
    p = path.heads.logits(x.double())[0].softmax(-1).numpy()
    assert abs(p - reference.predict_proba(x)).max() < 1e-5


def test_methods_of_several_findings_weight_each_finding_by_its_own_counts():
    world = toy_world(make("fedavg", class_weights="balanced", batch_size=1000, rounds=1), sizes=[24])
    frozen = replace(world.frozen, classes=("a", "b"), text=world.frozen.text[:2], negative_text=world.frozen.text[1:3])
    client = make_client(world, *world.members, 0)
    y = torch.stack([(torch.arange(len(client.y)) < n).long() for n in (2, len(client.y) // 2)], dim=1)
    client = replace(client, y=y, val_y=client.val_y[:, None].expand(-1, 2))
    uploads = []
    for weights in ("balanced", "none"):
        method = per_finding(replace(world.method, class_weights=weights))
        shared, local = method.init(frozen)
        uploads.append(method.update(frozen, shared, local, client)[0]["head"])
    assert not torch.allclose(uploads[0][0], uploads[1][0])
    if len(client.y) % 2 == 0:
        assert torch.allclose(uploads[0][1], uploads[1][1])


@pytest.mark.parametrize("name", ["auto", "zero-shot", "tofa", "fedclip", "dp-fpl"])
def test_class_weights_without_a_loss_over_samples_are_refused_with_the_reason(name):
    with pytest.raises(
        SettingsError, match=f"{name} has no class_weights: they weight the cross-entropy of a client's"
    ):
        build({"method": {"name": name, "class_weights": "balanced"}})
    with pytest.raises(SettingsError, match="methods that do: alone, .*fedavg"):
        with_method(name, {"class_weights": "balanced"})


def test_a_run_without_weights_is_the_run_of_before():
    assert "class_weights" not in build({"method": "fedavg"}).identity()["method"]
    assert build({"method": {"name": "fedavg", "class_weights": "balanced"}}).identity()["method"]["class_weights"]
