"""Descriptions are weighed by how well they tell classes apart, and margins of 0 do no harm."""

import pytest
import torch

from fedvlm.methods import tofa

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
