"""DP-FPL: what the noise, the clip and the factors promise, and what is counted."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from torch.func import grad, vmap

from fedvlm import parts
from fedvlm.core import make
from fedvlm.engines.client import make_client
from fedvlm.errors import SettingsError
from fedvlm.maths.privacy import add_noise_to_all, clipped_sum, epsilon, orthonormal_factors, project_gradient
from fedvlm.methods.dp_fpl import sample_gradients
from fedvlm.testing import toy_world, train_toy


def setting(**fields):
    """A toy client of 64 rows, that is of whole minibatches, and all its tensors."""
    method = make("dp-fpl", **{"n_ctx": 6, "rank": 3, "batch_size": 16, "rounds": 2, **fields})
    world = toy_world(method, sizes=(64, 48))
    return method, world, make_client(world, "client-0", 0), *method.init(world.frozen)


def row_loss(method, frozen, moves, rest, x, y):
    local = {"local prompt": moves["left"] @ moves["right"] + rest}
    logits = method.predict(frozen, {"prompt": moves["prompt"]}, local, x[None])
    return torch.nn.functional.cross_entropy(logits, y[None])


def carriers(prompt, rank=3):
    draw = torch.randn(prompt.shape[1], rank, generator=torch.Generator().manual_seed(1))
    return orthonormal_factors(prompt, draw)


def test_row_gradients_are_those_of_each_rows_own_loss():
    method, world, toy_client, sent, local = setting()
    batch = parts.minibatch(toy_client, 0)
    left_factor, right = carriers(local["local prompt"])
    moves, rest = {**sent, "left": left_factor, "right": right}, local["local prompt"] - left_factor @ right
    actual = sample_gradients(world.frozen, moves, rest, batch)

    def loss(moves, x, y):
        return row_loss(method, world.frozen, moves, rest, x, y)

    expected = vmap(grad(loss), in_dims=(None, 0, 0))(moves, batch.x, batch.y)
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-5)


def test_no_row_adds_more_than_the_clip():
    gradients = {"a": 9 * torch.randn(20, 3, 4), "b": torch.randn(20, 5)}
    for row in range(20):
        alone = clipped_sum(gradients, 0.7, torch.arange(20) == row)
        length = math.sqrt(sum(float(value.square().sum()) for value in alone.values()))
        assert length == pytest.approx(0.7, rel=1e-5)  # all were longer


def test_a_short_gradient_is_left_alone_and_padding_adds_nothing():
    gradients = {"a": torch.tensor([[0.3, 0.4], [30.0, 40.0], [7.0, 7.0], [0.0, 0.0]])}
    real = torch.tensor([True, True, False, True])
    total = clipped_sum(gradients, 1.0, real)
    torch.testing.assert_close(total["a"], torch.tensor([0.9, 1.2]))


def test_noise_has_the_deviation_it_is_said_to_have_in_every_tensor():
    total = {"a": torch.zeros(100, 50), "b": torch.zeros(5000)}
    noise = torch.randn(10_000, generator=torch.Generator().manual_seed(2))
    for value in add_noise_to_all(total, 3.0, noise).values():
        assert value.std().item() == pytest.approx(3.0, rel=0.05)
    assert not torch.equal(*(v.flatten() for v in add_noise_to_all(total, 1.0, noise).values()))


def test_factors_are_orthonormal_and_find_the_leading_directions():
    leading = torch.outer(torch.randn(6), torch.randn(8))
    left_factor, right = carriers(leading + 1e-4 * torch.randn(6, 8))
    torch.testing.assert_close(left_factor.mT @ left_factor, torch.eye(3))
    torch.testing.assert_close(right @ right.mT, torch.eye(3))
    torch.testing.assert_close(left_factor @ left_factor.mT @ leading, leading, rtol=1e-2, atol=1e-2)


def test_the_carried_gradient_is_a_projection_and_whole_at_full_rank():
    gradient = torch.randn(6, 8)
    left_factor, right = carriers(torch.randn(6, 8))
    once = project_gradient(left_factor, right, gradient @ right.mT, left_factor.mT @ gradient)
    torch.testing.assert_close(project_gradient(left_factor, right, once @ right.mT, left_factor.mT @ once), once)
    assert not torch.allclose(once, gradient)
    left_factor, right = carriers(torch.randn(6, 8), rank=6)
    torch.testing.assert_close(
        project_gradient(left_factor, right, gradient @ right.mT, left_factor.mT @ gradient), gradient
    )


def test_without_noise_and_clip_at_full_rank_it_is_plain_sgd():
    method, world, toy_client, sent, local = setting(noise_multiplier=0.0, clip=1e9, rank=6, local_epochs=3)
    upload, new_local = method.update(world.frozen, sent, local, toy_client)

    class Plain:
        traits = method.traits
        lr = method.lr
        predict = method.predict

        def loss(self, frozen, shared, local, batch, start):
            return parts.masked_cross_entropy(self.predict(frozen, shared, local, batch.x), batch.y, batch.real)

    expected_upload, expected_local = parts.sgd(Plain(), world.frozen, sent, local, toy_client)
    torch.testing.assert_close(upload["prompt"], expected_upload["prompt"], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(new_local["local prompt"], expected_local["local prompt"], rtol=1e-4, atol=1e-7)
    assert not torch.equal(upload["prompt"], sent["prompt"])


def test_a_clip_and_noise_change_what_is_learnt():
    plain = setting(noise_multiplier=0.0, clip=1e9)
    for fields in ({"clip": 1e-3, "noise_multiplier": 0.0}, {"noise_multiplier": 0.1}):
        method, world, toy_client, sent, local = setting(**fields)
        upload, _ = method.update(world.frozen, sent, local, toy_client)
        plain_upload, _ = plain[0].update(world.frozen, sent, local, toy_client)
        assert not torch.allclose(upload["prompt"], plain_upload["prompt"])


def test_one_row_moves_a_noiseless_step_by_no_more_than_the_clip_allows():
    """The sensitivity that the ε stands on, over all that a step trains."""
    method, world, toy_client, sent, local = setting(noise_multiplier=0.0, clip=0.5, batch_size=64, rank=6)
    upload, new_local = method.update(world.frozen, sent, local, toy_client)
    less = replace(toy_client, order=torch.where(toy_client.order == 5, -1, toy_client.order))
    upload2, own2 = method.update(world.frozen, sent, local, less)
    moved = (upload["prompt"] - upload2["prompt"]).square().sum()
    moved += (new_local["local prompt"] - own2["local prompt"]).square().sum()
    # at full rank the two factors carry one gradient twice, so the local part is the tighter one
    assert 0 < moved.sqrt() <= method.lr / method.batch_size * method.clip * (1 + 1e-4)


def test_every_noisy_step_and_pass_is_counted_and_epsilon_follows():
    method = make("dp-fpl", n_ctx=4, batch_size=16, local_epochs=2, rounds=3)
    outcome = train_toy(toy_world(method, sizes=(40, 9, 33)))
    description = outcome.descriptions["client-0"]
    assert (description["noisy steps"], description["passes"], description["delta"]) == (3 * 2 * 3, 6, 1e-5)
    assert description["epsilon"] == epsilon(method.noise_multiplier, 18)
    assert description["epsilon by passes"] == epsilon(method.noise_multiplier, 6)
    small = outcome.descriptions["client-1"]  # padded to the steps of its neighbour, which cost it nothing
    assert (small["noisy steps"], small["passes"]) == (6, 6)


def test_a_client_that_took_no_part_has_paid_nothing():
    method, world, _, sent, local = setting()
    assert method.describe(world.frozen, sent, local)["epsilon"] == 0.0


def test_without_noise_no_epsilon_is_told():
    method, world, toy_client, sent, local = setting(noise_multiplier=0.0)
    description = method.describe(world.frozen, *method.update(world.frozen, sent, local, toy_client))
    assert "epsilon" not in description
    assert description["noisy steps"] == 4


@pytest.mark.parametrize("fields", [{"noise_multiplier": -1.0}, {"clip": 0.0}, {"rank": 0}, {"delta": 0.0}])
def test_a_setting_without_meaning_is_refused(fields):
    with pytest.raises(SettingsError, match=str(next(iter(fields)))):
        make("dp-fpl", **fields)


def test_a_missing_accountant_is_found_before_any_training(monkeypatch):
    method, world, *_ = setting()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(SettingsError, match=r"fedvlm\[privacy\]"):
        method.init(world.frozen)
