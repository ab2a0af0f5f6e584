"""Points that belong together are drawn together."""

import numpy as np
import pytest

from fedvlm.maths.tsne import neighbours, squares, tsne


def clusters(count=3, size=12, dim=40):
    draw = np.random.default_rng(0)
    centres = 10 * draw.normal(size=(count, dim))
    label = np.repeat(np.arange(count), size)
    return centres[label] + draw.normal(size=(len(label), dim)), label


@pytest.mark.parametrize(("count", "size"), [(2, 5), (3, 12), (6, 25)])
def test_separated_clusters_stay_separated(count, size):
    points, label = clusters(count, size)
    place = tsne(points)
    distance = squares(place)
    np.fill_diagonal(distance, np.inf)
    assert (label[distance.argmin(1)] == label).all()
    means = np.stack([place[label == one].mean(0) for one in range(count)])
    inside = max(np.linalg.norm(place[label == i] - means[i], axis=1).max() for i in range(count))
    apart = np.sqrt(squares(means)[~np.eye(count, dtype=bool)].min())
    assert apart > 2 * inside


def test_the_same_points_always_give_the_same_picture():
    points, _ = clusters()
    assert np.array_equal(tsne(points), tsne(points.copy()))


def test_every_point_has_neighbours_of_the_wanted_perplexity():
    points, _ = clusters()
    chance = neighbours(squares(points), np.log(5.0))
    entropy = -(chance * np.log(np.maximum(chance, 1e-300))).sum(1)
    np.testing.assert_allclose(np.exp(entropy), 5.0, rtol=1e-3)
    assert np.diag(chance).max() == 0


@pytest.mark.parametrize("points", [np.zeros((6, 9)), np.ones((5, 1)), np.eye(4)])
def test_equal_or_few_points_give_finite_places(points):
    place = tsne(points)
    assert place.shape == (len(points), 2)
    assert np.isfinite(place).all()


def test_prompts_of_any_shape_are_points():
    points, _ = clusters(dim=40)
    np.testing.assert_array_equal(tsne(points.reshape(-1, 8, 5)), tsne(points))
