"""gh-ofl by its laws: scikit-learn's classifiers from sums, whoever holds the samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.covariance import shrunk_covariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.naive_bayes import GaussianNB

from fedvlm.core import make
from fedvlm.engines.client import make_client
from fedvlm.errors import SettingsError
from fedvlm.maths.gaussian_classes import ABSENT_CLASS_LOGIT
from fedvlm.testing import check_method, toy_world

HEADS = ("nb", "lda", "qda")


def samples(n_samples=160, dim=8, classes=4):
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(n_samples) % classes
    centres = torch.randn(classes, dim, generator=draw, dtype=torch.float64)
    spreads = 0.5 + torch.rand(classes, dim, generator=draw, dtype=torch.float64)
    return centres[y] + spreads[y] * torch.randn(n_samples, dim, generator=draw, dtype=torch.float64), y


def fit(method, x, y, parts):
    world = toy_world(method)
    frozen = replace(world.frozen, dim=x.shape[1], text=None, text_tower=None)
    client = make_client(world, "client-0", 0)
    shared, local = method.init(frozen)
    uploads = [method.update(frozen, shared, local, replace(client, x=x[part], y=y[part]))[0] for part in parts]
    shared = method.aggregate(shared, uploads, torch.ones(len(uploads)), [str(i) for i in range(len(uploads))])
    return frozen, shared


def probabilities(method, x, y, parts):
    frozen, shared = fit(method, x, y, parts)
    return method.predict(frozen, {k: v.double() for k, v in shared.items()}, {}, x).softmax(1).numpy()


@pytest.mark.parametrize("head", HEADS)
def test_every_head_keeps_the_contract(head):
    check_method(make("gh-ofl", classifier=head))


@pytest.mark.parametrize("head", HEADS)
def test_any_split_and_order_gives_the_pooled_classifier(head):
    x, y = samples()
    method = make("gh-ofl", classifier=head, min_class_samples=1)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(y)))
    parts = list(torch.tensor_split(order, [1, 40, 90]))
    pooled = fit(method, x, y, [slice(None)])[1]
    for split in (parts, parts[::-1]):
        found = fit(method, x, y, split)[1]
        assert torch.allclose(found["means"], pooled["means"], atol=1e-6)
        assert torch.allclose(found["bias"], pooled["bias"], atol=1e-4)


def test_naive_bayes_is_scikit_learns():
    x, y = samples()
    ours = probabilities(make("gh-ofl", classifier="nb", min_class_samples=1), x, y, [slice(None)])
    expected = GaussianNB(var_smoothing=0).fit(x.numpy(), y.numpy())
    assert np.abs(ours - expected.predict_proba(x.numpy())).max() < 1e-4


def test_linear_discriminant_is_scikit_learns():
    x, y = samples()
    ours = probabilities(make("gh-ofl", classifier="lda", shrinkage=0.0, min_class_samples=1), x, y, [slice(None)])
    expected = LinearDiscriminantAnalysis(solver="lsqr").fit(x.numpy(), y.numpy())
    # scikit-learn divides the scatter by N, the paper by N - C
    scaled = LinearDiscriminantAnalysis(solver="lsqr", covariance_estimator=Rescaled(len(y) / (len(y) - 4)))
    assert np.abs(ours - scaled.fit(x.numpy(), y.numpy()).predict_proba(x.numpy())).max() < 1e-4
    assert (ours.argmax(1) == expected.predict(x.numpy())).mean() > 0.99


class Rescaled:
    """The maximum-likelihood covariance times a factor, as scikit-learn's estimators give it."""

    def __init__(self, factor):
        self.factor = factor

    def fit(self, x):
        self.covariance_ = np.cov(x.T, bias=True) * self.factor
        return self


def test_quadratic_discriminant_is_the_formula_in_numpy():
    x, y = samples()
    ours = probabilities(make("gh-ofl", classifier="qda", shrinkage=0.2, min_class_samples=1), x, y, [slice(None)])
    logits = []
    for label in range(4):
        members = x[y == label].numpy()
        covariance = shrunk_covariance(np.cov(members.T), shrinkage=0.2) + 1e-6 * np.eye(x.shape[1])
        apart = x.numpy() - members.mean(0)
        distance = np.einsum("nd,de,ne->n", apart, np.linalg.inv(covariance), apart)
        logits.append(np.log(len(members) / len(y)) - distance / 2 - np.linalg.slogdet(covariance)[1] / 2)
    expected = torch.from_numpy(np.stack(logits, 1)).softmax(1).numpy()
    assert np.abs(ours - expected).max() < 1e-4


@pytest.mark.parametrize("head", HEADS)
def test_a_class_too_small_to_upload_is_never_predicted(head):
    x, y = samples()
    keep = torch.cat([torch.nonzero(y != 2)[:, 0], torch.nonzero(y == 2)[:3, 0]])
    method = make("gh-ofl", classifier=head, min_class_samples=10)
    frozen, shared = fit(method, x, y, [keep])
    assert shared["bias"][2] == ABSENT_CLASS_LOGIT
    assert (method.predict(frozen, shared, {}, x.float()).argmax(1) != 2).all()


def test_it_is_one_shot():
    with pytest.raises(SettingsError, match="gh-ofl.rounds must be between 1 and 1, got 2"):
        make("gh-ofl", rounds=2)
