"""fedpft by its laws: mixtures are scikit-learn's, and drawn embeddings have their moments."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture

from fedvlm.core import make
from fedvlm.engines.client import make_client
from fedvlm.errors import SettingsError
from fedvlm.maths.gaussian_classes import ABSENT_CLASS_LOGIT
from fedvlm.testing import check_method, toy_world, train_toy


def upload_of(method, x, y):
    world = toy_world(method)
    frozen = replace(world.frozen, dim=x.shape[1], text=None, text_tower=None)
    shared, local = method.init(frozen)
    client = replace(make_client(world, "client-0", 0), x=x, y=y)
    return shared, method.update(frozen, shared, local, client)[0]


def two_lumps(n_samples=200, dim=5):
    draw = torch.Generator().manual_seed(0)
    centre = torch.where(torch.rand(n_samples, 1, generator=draw) < 0.3, 3.0, -3.0)
    return centre + torch.randn(n_samples, dim, generator=draw), torch.zeros(n_samples, dtype=torch.int64)


@pytest.mark.parametrize("settings", [{}, {"mixtures": 3}, {"mixtures": 2, "covariance": "diagonal"}])
def test_every_mixture_keeps_the_contract(settings):
    check_method(make("fedpft", **settings))


@pytest.mark.parametrize(("covariance", "kind"), [("diagonal", "diag"), ("spherical", "spherical")])
@pytest.mark.parametrize("mixtures", [1, 2])
def test_a_mixture_is_scikit_learns(mixtures, covariance, kind):
    x, y = two_lumps()
    _, upload = upload_of(make("fedpft", mixtures=mixtures, covariance=covariance, iterations=100), x, y)
    expected = GaussianMixture(mixtures, covariance_type=kind, n_init=3, random_state=0, tol=1e-9, max_iter=500)
    expected.fit(x.numpy())
    weights, means, variances = (upload[key][0].numpy() for key in ("weights", "means", "variances"))
    order, wanted = np.argsort(means[:, 0]), np.argsort(expected.means_[:, 0])
    assert np.allclose(weights[order], expected.weights_[wanted], atol=1e-3)
    assert np.allclose(means[order], expected.means_[wanted], atol=1e-2)
    assert np.allclose(
        variances[order].reshape(mixtures, -1), expected.covariances_[wanted].reshape(mixtures, -1), atol=1e-2
    )


def test_drawn_embeddings_have_the_moments_of_the_samples():
    x, y = two_lumps(4000)
    method = make("fedpft", mixtures=2, covariance="diagonal")
    shared, upload = upload_of(method, x, y)
    drawn, labels = method.draw(shared, upload, "a")
    assert len(drawn) == 4000 and (labels == 0).all()
    assert torch.allclose(drawn.mean(0), x.mean(0), atol=0.2)
    assert torch.allclose(drawn.var(0), x.var(0), rtol=0.1)
    assert not torch.equal(drawn, method.draw(shared, upload, "b")[0])


def test_a_class_too_small_to_upload_has_no_mixture_and_is_never_predicted():
    x, y = two_lumps()
    y[:5] = 1
    method = make("fedpft", min_class_samples=16)
    shared, upload = upload_of(method, x, y)
    assert upload["counts"].tolist() == [195.0, 0.0, 0.0, 0.0] and not upload["means"][1].any()
    head = method.aggregate(shared, [upload], torch.ones(1), ["a"])
    assert head["bias"][1] == ABSENT_CLASS_LOGIT


def test_it_learns_and_is_one_shot():
    world = toy_world(make("fedpft", min_class_samples=1))
    outcome = train_toy(world)
    logits = world.method.predict(world.frozen, outcome.shared, {}, world.x)
    assert (logits.argmax(1) == world.y).float().mean() > 0.4  # chance: 0.25
    with pytest.raises(SettingsError, match="fedpft.rounds must be between 1 and 1, got 2"):
        make("fedpft", rounds=2)


@pytest.mark.parametrize("settings", [{}, {"mixtures": 3}])
def test_a_federation_without_a_large_enough_class_predicts_them_all_alike(settings):
    trained = train_toy(toy_world(make("fedpft", min_class_samples=1000, **settings)))
    assert torch.equal(trained.shared["weight"], torch.zeros_like(trained.shared["weight"]))
    assert (trained.shared["bias"] == ABSENT_CLASS_LOGIT).all()
