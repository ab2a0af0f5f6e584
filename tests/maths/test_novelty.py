"""Strange embeddings are rejected, and familiar ones at the promised rate."""

import pytest
import torch

from fedvlm.errors import DataError
from fedvlm.maths.novelty import Novelty, fit_novelty


def draw(n_samples, seed, dim=24, n_classes=3, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(n_classes, dim, generator=torch.Generator().manual_seed(1))
    y = torch.randint(n_classes, (n_samples,), generator=generator)
    return centres[y] + 0.3 * torch.randn(n_samples, dim, generator=generator) + shift, y


def test_the_score_is_the_mahalanobis_distance_to_the_nearest_mean():
    x, y = draw(60, 0)
    novelty = fit_novelty(x, y, draw(40, 2)[0])
    assert novelty is not None
    unit = torch.nn.functional.normalize(x, dim=1).double()
    means = torch.stack([unit[y == label].mean(0) for label in range(3)])
    deviations = unit - means[y]
    covariance = deviations.T @ deviations / len(unit)
    shrinkage = 24 / (24 + 60)
    covariance = (1 - shrinkage) * covariance + shrinkage * covariance.trace() / 24 * torch.eye(24)
    query = torch.nn.functional.normalize(draw(9, 5)[0], dim=1).double()
    gaps = query[:, None] - means
    expected = torch.einsum("ncd,de,nce->nc", gaps, torch.linalg.inv(covariance), gaps).amin(1)
    torch.testing.assert_close(novelty.scores(query).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_held_out", [19, 29, 39])
def test_false_rejections_are_as_promised_over_many_draws(n_held_out):
    rejected, total = 0, 0
    for seed in range(100):
        x, y = draw(80, 10 * seed)
        novelty = fit_novelty(x, y, draw(n_held_out, 10 * seed + 1)[0])
        assert novelty is not None
        test = draw(50, 10 * seed + 2)[0]
        rejected += int((novelty.scores(test) > novelty.limit(0.05)).sum())
        total += len(test)
    assert 0.035 < rejected / total < 0.065


def test_strangers_are_rejected():
    x, y = draw(200, 0)
    novelty = fit_novelty(x, y, draw(39, 1)[0])
    assert novelty is not None
    assert (novelty.scores(draw(100, 2, shift=1.5)[0]) > novelty.limit()).float().mean() > 0.95


def test_too_few_calibration_samples_are_refused_with_the_number():
    x, y = draw(50, 0)
    novelty = fit_novelty(x, y, draw(18, 1)[0])
    assert isinstance(novelty, Novelty)
    with pytest.raises(DataError, match="rejecting 5% of familiar images needs 19 validation samples, got 18"):
        novelty.limit()
    assert novelty._replace(held_out_scores=torch.arange(19.0)).limit() == 18.0


@pytest.mark.parametrize("n_samples", [0, 1])
def test_a_site_with_too_few_samples_has_no_detector(n_samples):
    x, y = draw(n_samples, 0)
    assert fit_novelty(x, y, draw(30, 1)[0]) is None
    assert fit_novelty(*draw(30, 0), draw(0, 1)[0]) is None


def test_equal_samples_do_not_divide_by_zero():
    x = torch.ones(30, 4)
    novelty = fit_novelty(x, torch.zeros(30, dtype=torch.int64), x)
    assert novelty is not None and novelty.scores(torch.eye(4)).isfinite().all()


def test_patches_are_scored_by_their_mean():
    x, y = draw(40, 0)
    patches = torch.nn.functional.normalize(x, dim=1)[:, None].expand(-1, 5, -1)
    by_patches, pooled = fit_novelty(patches, y, patches), fit_novelty(x, y, x)
    assert by_patches is not None and pooled is not None
    torch.testing.assert_close(by_patches.scores(patches), pooled.scores(x), rtol=1e-3, atol=1e-3)
