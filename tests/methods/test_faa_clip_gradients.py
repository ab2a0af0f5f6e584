"""FAA-CLIP's written gradients are those of its loss, for clients side by side."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from fedvlm import parts, tensors
from fedvlm.core import Batch, Client, Frozen, make
from fedvlm.methods import faa_clip
from fedvlm.methods.faa_clip import LAYERS, MEMORY

DIM, CLASSES, CLIENTS, ROWS = 12, 5, 4, 6
SETTINGS = [{"mask": mask, "passes": "joint"} for mask in LAYERS]
SETTINGS += [{"mask_duplicates": True, "local_norm": True, "passes": "joint"}, {"adaptation": False}]
SETTINGS += [{"shared_discriminator": True, "adaptation_weight": 0.9, "passes": "joint"}]
SETTINGS += [{"passes": "apart"}, {"passes": "apart", "mask": "deeper", "adaptation_weight": 0.9}]


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def unit(*shape, seed):
    return normalize(draw(*shape, seed=seed), dim=-1)


def world(method):
    """Shared and local tensors of each client, all different, in float64."""
    names = tuple(map(str, range(CLASSES)))
    frozen = Frozen(names, DIM, 100.0, unit(CLASSES, DIM, seed=0))
    first = [replace(frozen, seed=seed) for seed in range(CLIENTS)]
    states = [tuple(map(doubled, method.init(frozen_variant))) for frozen_variant in first]
    return frozen, states


def doubled(part):
    return {key: value.double() for key, value in part.items()}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_written_gradients_and_statistics_are_those_of_autograd(settings):
    method = make("faa-clip", **settings)
    frozen, states = world(method)
    real = torch.arange(ROWS) < torch.tensor([ROWS, 3, 1, 2])[:, None]  # one has a single row
    y = torch.tensor([[0, 1, 1, 4, 2, 0]]).expand(CLIENTS, -1)
    x, reference = unit(CLIENTS, ROWS, DIM, seed=1), unit(CLIENTS, 5, DIM, seed=2)

    stacked = tensors.stack([{**shared, **local} for shared, local in states])
    grads = {k: torch.zeros_like(v) for k, v in stacked.items() if k not in MEMORY}
    new = faa_clip.write_gradients(method, frozen, stacked, Batch(x, y, real, reference), grads)

    for i, (shared, local) in enumerate(states):
        leaf_tensors = {k: v.clone().requires_grad_() for k, v in {**shared, **local}.items()}
        loss, statistics = method.loss(
            frozen,
            {k: leaf_tensors[k] for k in shared},
            {k: leaf_tensors[k] for k in local},
            Batch(x[i], y[i], real[i], reference[i]),
            shared,
        )
        trained = [leaf_tensors[key] for key in grads]
        expected = torch.autograd.grad(loss, trained, materialize_grads=True)
        for key, gradient in zip(grads, expected, strict=True):
            torch.testing.assert_close(grads[key][i], gradient, rtol=1e-8, atol=1e-10, msg=key)
        assert statistics.keys() == new.keys()
        for key, value in statistics.items():
            torch.testing.assert_close(new[key][i], value.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"persist": True}, {"passes": "joint"}], ids=str)
def test_clients_side_by_side_take_the_steps_they_take_alone(settings, monkeypatch):
    method = make("faa-clip", batch_size=ROWS, **settings)
    frozen, states = world(method)
    shared = tensors.stack([shared_state for shared_state, _ in states])
    local = tensors.stack([local_state for _, local_state in states])
    order = torch.arange(4 * ROWS).reshape(1, 4, ROWS).repeat(CLIENTS, 1, 1)
    order[1, 2:], order[2, 1], order[0, 3, 2:] = -1, -1, -1  # fewer steps, a gap, a short one
    y = torch.arange(4 * ROWS).expand(CLIENTS, -1) % CLASSES
    x, reference = unit(CLIENTS, 4 * ROWS, DIM, seed=1), unit(CLIENTS, 4 * ROWS, DIM, seed=2)
    cohort = Client(
        x, y, order, x[:, :2], y[:, :2], reference, order.flip(1).clamp(min=0),
        torch.zeros(CLIENTS, CLASSES, 0, DIM), torch.zeros(CLIENTS, 4, 0), x[:, :0],
    )  # fmt: skip
    originals = tensors.copy(shared), tensors.copy(local)
    stacked_result = method.update_many(frozen, shared, local, cohort)
    monkeypatch.setattr(faa_clip, "BYTES_PER_CHUNK", 1)
    chunked_result = method.update_many(frozen, shared, local, cohort)
    for i in range(CLIENTS):
        client = Client(*(value[i] for value in vars(cohort).values()))
        client_state = tensors.select(shared, i), tensors.select(local, i)
        plain = parts.adam(method, frozen, *client_state, client)
        for fast in (stacked_result, chunked_result):
            for actual, expected in zip(fast, plain, strict=True):
                assert actual.keys() == expected.keys()
                assert (
                    tensors.max_relative_difference(tensors.select(actual, i), expected) < 1e-7
                )  # plain counts are float32
    assert (
        tensors.max_relative_difference(originals[0], shared)
        == tensors.max_relative_difference(originals[1], local)
        == 0
    )
