"""Transport plans: against POT, by their marginals, and at their limits."""

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from fedvlm.errors import SettingsError
from fedvlm.maths import optimal_transport
from fedvlm.maths.optimal_transport import transport_plan

WIDE_STEPS = 30  # steps for cosines much wider than CLIP's


def cosines(*shape, spread=0.05, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(*shape, generator=draw, dtype=torch.float64)
    common = torch.randn(*shape[:-2], 1, shape[-1], generator=draw, dtype=torch.float64)
    bias = torch.randn(*shape[:-1], 1, generator=draw, dtype=torch.float64)
    return (0.2 + spread * (vectors + common + bias)).clamp(-1, 1).to(dtype)


def oracle(similarity, gamma, entropy_reg):
    """POT's plan of one problem; what prompts may take sums to γ, so it is tight."""
    prompts, patches = similarity.shape
    rows, columns = np.full(patches, 1 / patches), np.full(prompts, gamma / prompts)
    reference_plan = ot.partial.entropic_partial_wasserstein(
        rows,
        columns,
        1 - similarity.T.numpy(),
        entropy_reg,
        m=gamma,
        numItermax=20000,
        stopThr=1e-12,
    )
    return torch.from_numpy(reference_plan.T)


@pytest.mark.parametrize("prompts", [1, 2, 3, 5])
@pytest.mark.parametrize(("gamma", "entropy_reg"), [(0.8, 0.1), (0.3, 0.1), (0.8, 0.03), (0.95, 0.1)])
def test_unbalanced_plan_is_pots_partial_plan(prompts, gamma, entropy_reg):
    similarity = cosines(4, prompts, 49)
    plans = transport_plan(similarity, "unbalanced", gamma, entropy_reg)
    for cosine, actual in zip(similarity, plans, strict=True):
        assert torch.allclose(actual, oracle(cosine, gamma, entropy_reg), atol=1e-6, rtol=0)


@pytest.mark.parametrize("spread", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("prompts", [2, 4])
def test_classical_plan_is_pots_sinkhorn_plan_and_so_is_the_unbalanced_one_of_all_mass(prompts, spread):
    similarity = cosines(3, prompts, 49, spread=spread)
    classical = transport_plan(similarity, "classical", entropy_reg=0.1)
    assert torch.equal(transport_plan(similarity, "unbalanced", 1.0, 0.1), classical)
    rows, columns = np.full(49, 1 / 49), np.full(prompts, 1 / prompts)
    for cosine, actual in zip(similarity, classical, strict=True):
        theirs = ot.sinkhorn(
            rows, columns, 1 - cosine.T.numpy(), 0.1, method="sinkhorn_log", numItermax=20000,
            stopThr=1e-12,
        )  # fmt: skip
        assert torch.allclose(actual, torch.from_numpy(theirs.T), atol=1e-6, rtol=0)


def test_unbalanced_plan_goes_over_into_the_classical_one():
    similarity = cosines(5, 2, 49)
    gaps = [
        (transport_plan(similarity, "unbalanced", gamma, 0.1, WIDE_STEPS) - transport_plan(similarity, "classical"))
        .abs()
        .max()
        for gamma in (0.9, 0.99, 0.999, 0.99999)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 2e-5  # one patch may keep all the mass that is not taken


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    prompts=st.integers(1, 4),
    patches=st.integers(2, 60),
    gamma=st.floats(1e-3, 1.0),
    entropy_reg=st.floats(0.001, 1.0),
    spread=st.floats(0.0, 0.3),
    kind=st.sampled_from(["unbalanced", "classical"]),
)
def test_marginals_hold(seed, prompts, patches, gamma, entropy_reg, spread, kind):
    similarity = cosines(2, prompts, patches, spread=spread, seed=seed)
    plans = transport_plan(similarity, kind, gamma, entropy_reg, 2 * WIDE_STEPS)
    mass = gamma if kind == "unbalanced" else 1.0
    assert (plans >= 0).all()
    prompt_mass = plans.sum(dim=-1)
    assert torch.allclose(prompt_mass, torch.full_like(prompt_mass, mass / prompts), rtol=1e-9)
    patch_mass = plans.sum(dim=-2) * patches
    assert patch_mass.max() <= 1 + 1e-5
    if kind == "classical":
        assert patch_mass.min() >= 1 - 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("entropy_reg", [0.1, 0.03, 0.01, 0.003, 0.001, 1e-4])
@pytest.mark.parametrize(("kind", "gamma"), [("unbalanced", 0.8), ("classical", 1.0)])
def test_low_precision_is_finite_and_close_at_every_entropy_reg(kind, gamma, entropy_reg, dtype):
    similarity = cosines(8, 2, 196, spread=0.03, dtype=dtype)
    actual = transport_plan(similarity, kind, gamma, entropy_reg)
    assert actual.dtype == torch.float32
    truth = transport_plan(similarity.double(), kind, gamma, entropy_reg, WIDE_STEPS)
    # rounding moves a patch by 1e-7/λ between prompts
    assert (actual - truth).abs().max() * 196 < 1e-5 + 2e-6 / entropy_reg
    assert torch.allclose(actual.sum(dim=-1), torch.full((8, 2), gamma / 2), rtol=1e-4)


@pytest.mark.parametrize("entropy_reg", [0.1, 0.003, 0.001])
def test_opposite_cosines_do_not_overflow(entropy_reg):
    similarity = torch.ones(2, 50)
    similarity[:, 25:] = -1
    similarity[1] *= -1
    for gamma in (1e-4, 0.5, 0.999, 1.0):
        actual = transport_plan(similarity, "unbalanced", gamma, entropy_reg)
        assert actual.isfinite().all()
        assert torch.allclose(actual.sum(dim=-1), torch.full((2,), gamma / 2), rtol=1e-4)


def test_vanishing_mass_stays_finite_and_goes_to_the_nearest_patches():
    similarity = cosines(3, 2, 49, dtype=torch.float32)
    for gamma in (1e-2, 1e-4, 1e-8):
        actual = transport_plan(similarity, "unbalanced", gamma, 0.01)
        assert actual.isfinite().all()
        assert torch.allclose(actual.sum(dim=(-1, -2)), torch.full((3,), gamma), rtol=1e-4)
        assert torch.equal(actual.argmax(dim=-1), similarity.argmax(dim=-1))


def test_an_image_does_not_see_the_others_of_its_batch(monkeypatch):
    monkeypatch.setattr(optimal_transport, "NUMBERS_PER_CHUNK", 30_000)
    similarity = cosines(40, 6, 2, 196, dtype=torch.float32)  # more than are solved at once
    similarity[7] = cosines(6, 2, 196, spread=0.4, dtype=torch.float32)  # hard for the others
    batched = transport_plan(similarity, "unbalanced", 0.8, 0.03)
    for index in (0, 7, 39):
        alone = transport_plan(similarity[index], "unbalanced", 0.8, 0.03)
        assert torch.allclose(batched[index], alone, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("prompts", [2, 3])
def test_it_passes_through_vmap(prompts):
    similarity = cosines(3, 4, prompts, 25)
    for kind in ("unbalanced", "classical", "averaging"):
        mapped = vmap(lambda cosine, kind=kind: transport_plan(cosine, kind, 0.8, 0.05))(similarity)
        assert torch.allclose(mapped, transport_plan(similarity, kind, 0.8, 0.05), atol=1e-12)


def test_averaging_is_uniform_whatever_the_image():
    actual = transport_plan(cosines(3, 2, 49), "averaging", 0.8, 0.1)
    assert torch.allclose(actual, torch.full((3, 2, 49), 1 / 98, dtype=torch.float64))


@pytest.mark.parametrize(("gamma", "entropy_reg"), [(0.0, 0.1), (1.01, 0.1), (-1.0, 0.1)])
def test_mass_outside_zero_and_one_is_refused(gamma, entropy_reg):
    with pytest.raises(SettingsError, match=rf"gamma must be above 0 and at most 1, got {gamma}"):
        transport_plan(cosines(2, 9), "unbalanced", gamma, entropy_reg)


@pytest.mark.parametrize("entropy_reg", [0.0, -0.1, float("nan"), float("inf")])
def test_entropy_reg_that_is_not_positive_is_refused(entropy_reg):
    with pytest.raises(SettingsError, match=rf"entropy_reg must be (finite and )?above 0, got {entropy_reg}"):
        transport_plan(cosines(2, 9), "unbalanced", 0.8, entropy_reg)


@pytest.mark.parametrize("entropy_reg", [0.1, 0.2, 0.5])
def test_the_usual_steps_are_enough_for_cosines_of_any_width(entropy_reg):
    wide = 2 * torch.rand(64, 2, 49, generator=torch.Generator().manual_seed(0)) - 1
    usual = transport_plan(wide, "unbalanced", 0.8, entropy_reg)
    exact = transport_plan(wide.double(), "unbalanced", 0.8, entropy_reg, steps=60)
    assert (usual - exact).abs().max() < 1e-4 * exact.max()
