"""Descriptions are weighed by how well they tell classes apart, and margins of 0 do no harm."""

import pytest
import torch

from fedvlm.core import Frozen, make
from fedvlm.maths import gaussian_classes
from fedvlm.maths.gaussian_classes import fixed_point_step
from fedvlm.methods import tofa
from fedvlm.testing import make_test_client

CLASSES, DIM = 4, 8
unit = torch.nn.functional.normalize


def world(texts=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    means = unit(torch.randn(CLASSES, DIM, generator=draw), dim=1)
    noise = torch.randn(CLASSES, texts, DIM, generator=draw)
    return means, unit(means[:, None] + 0.2 * noise, dim=-1)


def b(means, present, texts, temperature=0.5, sharpness=10.0):
    margins = tofa.text_margins(means, present, texts, sharpness)
    terms, voting = tofa.vote_terms(margins, present)
    has_text = texts.abs().amax(-1) > 0
    return tofa.weigh_texts(terms, voting.long(), has_text, temperature)


ALL = torch.ones(CLASSES, dtype=torch.bool)


def test_a_text_that_misleads_weighs_less_than_one_that_tells():
    means, texts = world()
    texts[0, 0] = unit(means[0] + 0.5 * means[1], dim=0)
    texts[0, 1] = means[0]
    texts[0, 2] = means[1]  # says another class: its margin is negative
    weights = b(means, ALL, texts)
    assert weights[0, 1] > weights[0, 0] > weights[0, 2] > 0
    assert torch.allclose(weights.sum(1), torch.ones(CLASSES).double())


def test_margins_of_zero_or_less_give_finite_weights():
    means, texts = world()
    for wrong in (means.roll(1, 0), torch.zeros_like(means) + means.mean(0)):
        texts[:, 1] = wrong
        terms, _ = tofa.vote_terms(tofa.text_margins(means, ALL, texts, 100.0), ALL)
        assert terms.isfinite().all()
        assert b(means, ALL, texts, sharpness=100.0).isfinite().all()


@pytest.mark.parametrize("held", [[], [2], [0, 3]])
def test_only_classes_held_beside_another_are_voted_on(held):
    means, texts = world()
    present = torch.zeros(CLASSES, dtype=torch.bool)
    present[held] = True
    margins = tofa.text_margins(means * present[:, None], present, texts, 100.0)
    terms, voting = tofa.vote_terms(margins, present)
    assert voting.nonzero().flatten().tolist() == (held if len(held) > 1 else [])
    assert (terms[~voting] == 0).all()
    weights = b(means, present, texts)
    uniform = torch.full((3,), 1 / 3).double()
    assert torch.allclose(weights[1], uniform)  # nobody votes: all texts weigh the same


def test_a_template_that_does_not_tell_a_class_gives_no_vote():
    means, texts = world()
    texts[0, 0] = means[1]
    _, voting = tofa.vote_terms(tofa.text_margins(means, ALL, texts, 100.0), ALL)
    assert voting.tolist() == [False, True, True, True]


def test_the_same_text_twice_has_the_same_weight_twice():
    means, texts = world()
    texts[:, 2] = texts[:, 1]
    weights = b(means, ALL, texts)
    assert torch.equal(weights[:, 1], weights[:, 2])


def test_a_text_that_is_not_there_has_no_weight_and_none_leaves_the_template():
    means, texts = world()
    texts[1, 1:] = 0
    weights = b(means, ALL, texts)
    assert weights[1].tolist() == [1, 0, 0]
    mixed = tofa.mix_texts(b(means, ALL, texts[:, :1]), texts[:, :1])
    assert torch.equal(mixed, texts[:, 0])
    assert torch.equal(tofa.mix_texts(weights, texts)[1], texts[1, 0])


def test_cosines_of_a_cone_without_a_scale_weigh_all_texts_the_same():
    """What eq. 5 prints; encoders put all rows into a narrow cone."""
    means, texts = world()
    cone = unit(means + 3, dim=1)
    flat, sharp = (b(cone, ALL, texts, sharpness=size) for size in (1.0, 100.0))
    assert flat.max() / flat.min() < 1.1 < sharp.max() / sharp.min()


@pytest.mark.parametrize("at_once", [1, 7, 800])
def test_margins_are_those_of_a_softmax_over_the_classes_present(at_once, monkeypatch):
    monkeypatch.setattr(tofa, "TEXTS_PER_CHUNK", at_once)
    draw = torch.Generator().manual_seed(3)
    means, texts = torch.randn(9, 6, generator=draw).double(), torch.randn(9, 3, 6, generator=draw)
    present = torch.tensor([True, False, True, True, True, False, True, True, False])
    actual = tofa.text_margins(means, present, texts, 2.0)
    for c in range(9):
        for m in range(3):
            p = (2 * means[present] @ texts[c, m].double()).softmax(0)
            other_probabilities = torch.cat([p[: present[:c].sum()], p[present[: c + 1].sum() :]])
            margin = p[present[:c].sum()] - other_probabilities.max() if present[c] else torch.tensor(-1.0)
            assert float(actual[c, m]) == pytest.approx(float(margin), abs=1e-6)


@pytest.mark.parametrize("mean", ["voters", "clients"])
def test_the_mean_of_eq_6_is_over_voters_or_over_all_clients(mean):
    means, texts = world()
    method = tofa.TOFA(visual=False, text_mean=mean, sharpness=10.0)
    frozen = Frozen(tuple("abcd"), DIM, 10.0, texts[:, 0], descriptions=texts[:, 1:])
    shared, _ = method.init(frozen)
    uploads = []
    for held in ([0, 1, 2, 3], [0, 1], []):  # the classes of each client
        y = torch.tensor([c for c in held for _ in range(20)], dtype=torch.long)
        client = make_test_client(means[y], y, y[None], means[:0], y[:0])
        uploads.append(method.update(frozen, shared, {}, client)[0])
    terms = sum(upload["scores"].double() for upload in uploads) * fixed_point_step(tofa.MAX_TERM)
    n_clients = torch.tensor([2, 2, 1, 1] if mean == "voters" else [3] * 4)
    r = torch.cat([torch.zeros(4, 1), terms / n_clients[:, None]], dim=1)
    expected = (r / method.temperature).softmax(1)
    for form in (uploads, [gaussian_classes.add_uploads(uploads, uploads[0].keys())]):  # a verified sum is one upload
        weights = method.aggregate(shared, form, torch.ones(len(form)), [str(i) for i in range(len(form))])["weights"]
        assert torch.allclose(weights.double(), expected, atol=1e-6)


def test_clip_gda_as_printed_is_the_public_formula_in_float64():
    """G = d [(N - 1) Σ + tr(Σ) I]⁻¹, W = μ G, b = log(1/C) - μ G μ / 2; a constant of all classes does not count."""
    draw = torch.Generator().manual_seed(3)
    y = torch.arange(60) % CLASSES
    x = unit(torch.randn(CLASSES, DIM, generator=draw)[y] + 0.7 * torch.randn(60, DIM, generator=draw), dim=1).double()
    method = make("clip-gda", text=False, precision_factor="dim")
    frozen = Frozen(tuple("abcd"), DIM, 10.0, None)
    local = method.adapt(frozen, {}, {}, make_test_client(x, y, y[None], x[:0], y[:0]))
    mean = torch.stack([x[y == c].mean(0) for c in range(CLASSES)])
    centred = x - mean[y]
    sigma = centred.T @ centred / (len(x) - 1)
    precision = DIM * torch.linalg.inv((len(x) - 1) * sigma + sigma.trace() * torch.eye(DIM).double())
    expected = x @ (mean @ precision).T - (mean @ precision * mean).sum(1) / 2
    actual = x @ local["weight"].double().T + local["bias"].double()
    assert torch.allclose(actual - actual[:, :1], expected - expected[:, :1], rtol=1e-4, atol=1e-3)
