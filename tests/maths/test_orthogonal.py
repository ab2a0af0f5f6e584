import math

import pytest
import torch
from torch import Tensor

from fedvlm.errors import SettingsError
from fedvlm.maths import client_drift, orthogonal
from fedvlm.parts import masked_cross_entropy

torch.set_num_threads(1)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(draw(*shape, seed=seed), dim=-1)


@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
def test_maps_are_orthogonal_and_keep_orientation_whatever_the_skew(size: float) -> None:
    turn = orthogonal.orthogonal(size * draw(3, 2, 24, 24, dtype=torch.float32))
    assert orthogonal.orthogonality_error(turn) < 1e-5
    torch.testing.assert_close(torch.linalg.det(turn), torch.ones(3, 2), rtol=1e-4, atol=0)
    assert orthogonal.condition_number(turn) == pytest.approx(1, abs=1e-4)


def test_map_is_the_quotient_of_the_paper() -> None:
    raw = draw(1, 6, 6)
    skew, eye = (raw - raw.mT) / 2, torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(orthogonal.orthogonal(raw), (eye + skew) @ torch.linalg.inv(eye - skew))


def test_symmetric_part_is_a_null_direction() -> None:
    raw, other_raw = draw(2, 6, 6), draw(2, 6, 6, seed=1)
    torch.testing.assert_close(orthogonal.orthogonal(raw + other_raw + other_raw.mT), orthogonal.orthogonal(raw))


@pytest.mark.parametrize("blocks", [1, 3, 12])
def test_rows_turn_as_by_the_dense_matrix(blocks: int) -> None:
    raw = draw(2, blocks, 12 // blocks, 12 // blocks)  # two maps, so leading axes are batches
    x = draw(2, 5, 12, seed=1)
    full = orthogonal.dense(orthogonal.orthogonal(raw)).squeeze(-3)
    torch.testing.assert_close(orthogonal.rotate(raw, x), x @ full.mT)
    torch.testing.assert_close(orthogonal.orthogonal(orthogonal.dense(raw)).squeeze(-3), full)


def test_blocks_of_size_one_are_the_identity() -> None:
    x = draw(4, 9)
    torch.testing.assert_close(orthogonal.rotate(draw(9, 1, 1), x), x, rtol=0, atol=1e-15)


@pytest.mark.parametrize("size", [1, 7, 65, 130, 131])
def test_block_elimination_inverts(size: int) -> None:
    skew = orthogonal.skew_part(3 * draw(2, size, size))
    eye = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(orthogonal.inverse(eye + skew) @ (eye + skew), eye.expand(2, -1, -1))


@pytest.mark.parametrize("distance", [1e-7, 1e-3, 0.02, 0.05, 3.0])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_followed_inverse_is_the_inverse_however_far_the_step(kind: torch.dtype, distance: float) -> None:
    eye = torch.eye(32, dtype=kind)
    first = eye + orthogonal.skew_part(0.3 * draw(4, 32, 32)).to(kind)
    then = first + distance * orthogonal.skew_part(draw(4, 32, 32, seed=1)).to(kind)
    actual = orthogonal.update_inverse(torch.linalg.inv(first), then)
    assert (then @ actual - eye).abs().max() < 32 * torch.finfo(kind).eps


@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_exact_gradient_is_that_of_autograd(blocks: int) -> None:
    size = 8 // blocks
    head = draw(2, 3, 8).requires_grad_()
    raw = (0.5 * draw(2, blocks, size, size, seed=1)).requires_grad_()
    x, y = unit(2, 5, 8, seed=2), torch.tensor([[0, 1, 2, 1, 0], [2, 2, 0, 1, 1]])
    real = torch.tensor([[True] * 5, [True, True, False, True, False]])
    turned = torch.nn.functional.normalize(orthogonal.rotate(raw, x), dim=-1)
    logits = 7.0 * turned @ head.mT
    loss = masked_cross_entropy(logits[0], y[0], real[0]) + masked_cross_entropy(logits[1], y[1], real[1])
    expected = torch.autograd.grad(loss, (head, raw))
    actual = orthogonal.gradients(
        head.detach(),
        orthogonal.inverse(torch.eye(size, dtype=torch.float64) + orthogonal.skew_part(raw.detach())),
        7 * x,
        *orthogonal.cross_entropy_terms(y, real, 3, torch.float64),
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradient_at_the_identity_is_skew_and_not_zero() -> None:
    lesson = orthogonal.cross_entropy_terms(torch.tensor([0, 1, 2, 1, 0]), torch.ones(5) > 0, 3, torch.float64)
    back = torch.eye(8, dtype=torch.float64)[None]
    _, gradient = orthogonal.gradients(draw(3, 8), back, 100 * unit(5, 8), *lesson)
    assert gradient.abs().max() > 0.1
    torch.testing.assert_close(gradient, -gradient.mT)


def test_degrees_of_freedom_are_those_of_the_paper() -> None:
    assert orthogonal.degrees_of_freedom(512, 1) == 512 * 511 // 2
    assert orthogonal.degrees_of_freedom(512, 256) == 256
    assert orthogonal.degrees_of_freedom(512, 512) == 0


def test_blocks_that_do_not_divide_are_refused_with_the_divisors() -> None:
    with pytest.raises(SettingsError, match=r"blocks = 5 .* 12 .* 1, 2, 3, 4, 6, 12$"):
        orthogonal.block_size(12, 5)
    with pytest.raises(SettingsError, match="blocks = 0"):
        orthogonal.block_size(12, 0)


def test_condition_number_of_a_stretch_is_its_ratio() -> None:
    assert orthogonal.condition_number(torch.diag(torch.tensor([4.0, 2.0, 1.0]))) == pytest.approx(4)


def mean_cosine(start, ends):
    agreement = client_drift.GradientAgreement(start)
    for end in ends:
        agreement.add(end)
    return agreement.mean()


def test_conflict_of_equal_opposite_and_square_moves() -> None:
    start, move, flipped = draw(2, 3), torch.eye(2, 3), torch.eye(2, 3).flip(0)
    assert mean_cosine([start], [[start + move], [start + 3 * move]]) == pytest.approx(1)
    assert mean_cosine([start], [[start + move], [start - move]]) == pytest.approx(-1)
    assert mean_cosine([start], [[start + move], [start + flipped]]) == pytest.approx(0)
    assert mean_cosine([start], [[start + move], [start]]) == pytest.approx(0, abs=1e-12)
    assert math.isnan(mean_cosine([start], [[start]]))


def test_gradient_difference_is_per_step_and_its_bound_takes_the_two_worst() -> None:
    start, move = draw(2, 3), torch.eye(2, 3)
    ends = [start - 0.1 * 4 * move, start - 0.1 * 2 * move, start]
    actual = client_drift.largest_gradient_difference(start, ends, steps=[4, 1, 0], rate=0.1)
    assert actual == pytest.approx(2 * math.sqrt(2))
    assert client_drift.gradient_difference_bound(100.0, [1.0, 1.0, 1.0]) == 400
    assert client_drift.gradient_difference_bound(100.0, [3.0, 1.0, 2.0]) == 1000
    assert math.isnan(client_drift.gradient_difference_bound(100.0, [1.0]))
