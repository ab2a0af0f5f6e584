"""Attack uploads as a server that deviates would: whose sample is in a second moment, and what single samples are.

A slab attack sends steep heads whose classes are slabs of the space along one direction. The gradient of a class then
is the sum of the samples in its slab, and slabs are split until each holds one sample.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedvlm import seeds, tensors
from fedvlm.core import Tensors
from fedvlm.engines.client import Task, World
from fedvlm.engines.loop import initial_state
from fedvlm.engines.sequential import Sequential
from fedvlm.maths import gaussian_classes
from fedvlm.maths.privacy import roc_auc
from fedvlm.methods import _logistic, auto

MAX_REQUESTS = 490  # of a slab attack; a policy of `deploy init` allows 500 rounds
STEEPNESS = 1e6  # logits for each unit of a projection
MIN_SLAB_WIDTH = 1e-6  # narrower ones hold samples that a head in float32 cannot separate
SIMILAR = 0.95  # cosine above which a guess counts as a sample
GRAM_RIDGE = 1e-3  # relative to the mean eigenvalue: above rounding, and below what samples have
GradientAt = Callable[[Tensor], Tensor]  # (classes, dim + 1) head -> Σ (p - y) [x, 1], of the same shape


def find_second_moment(upload: Tensors, dim: int) -> Tensor | None:
    """Return the Σ x xᵀ that an upload holds packed, with or without a last coordinate of 1."""
    for value in upload.values():
        for size in (dim, dim + 1):
            if value.ndim == 1 and value.numel() == size * (size + 1) // 2:
                return gaussian_classes.unpack(value.double(), size)
    return None


def span_scores(second: Tensor, x: Tensor) -> Tensor:
    """Return minus xᵀ (Σ x xᵀ)⁻¹ x: at least -1 for a sample of the sum, and huge below it outside of their span."""
    x = torch.cat([x.double(), x.new_ones(len(x), 1, dtype=torch.float64)], dim=1)[:, : len(second)]
    second = gaussian_classes.nearest_semidefinite(second)
    eye = torch.eye(len(second), dtype=torch.float64)
    ridge = GRAM_RIDGE * second.diagonal().mean().clamp(min=1e-12)
    solved: Tensor = torch.linalg.solve(second + ridge * eye, x.mT)
    return -(x * solved.mT).sum(1)


def slab_attack(gradient_at: GradientAt, classes: int, dim: int, draw: torch.Generator, limit: float) -> Tensor:
    """Return (guesses, dim): samples that the gradients of crafted heads give away.

    No class of a head is longer than `limit`.
    """
    requests = 0

    def request(head: Tensor) -> Tensor:
        nonlocal requests
        requests += 1
        return gradient_at(head * (limit / head.norm(dim=1, keepdim=True).clamp(min=1e-30)).clamp(max=1)).double()

    def all_to(label: int) -> Tensor:  # a head that gives every sample this label
        head = torch.zeros(classes, dim + 1, dtype=torch.float64)
        head[label, -1] = STEEPNESS
        return request(head)

    sums = -all_to(0)
    sums[0] = -all_to(1)[0]
    direction = torch.nn.functional.normalize(torch.randn(dim, generator=draw, dtype=torch.float64), dim=0)
    guesses, slabs = [], [(-1.0, 1.0, float(sums[:, -1].sum()))]
    while slabs and requests < MAX_REQUESTS:
        slabs.sort(key=lambda slab: -slab[2])
        edges: list[float] = []
        while slabs and len(edges) + 3 < classes:
            low, high, count = slabs.pop(0)
            if high - low < MIN_SLAB_WIDTH:
                continue
            pieces = int(min(classes - 2 - len(edges), max(2, 3 * count)))
            edges += torch.linspace(low, high, pieces + 1, dtype=torch.float64).tolist()
        if not edges:
            break
        edges = sorted(set(edges))[: classes - 1]
        inside = request(_slab_head(direction, edges, classes)) + sums  # sums of the samples in each slab
        for place in range(1, len(edges)):
            count = float(inside[place, -1])
            if 0.5 < count < 1.5:
                guesses.append(inside[place, :-1])
            elif count >= 1.5:
                slabs.append((edges[place - 1], edges[place], count))
    return torch.stack(guesses) if guesses else torch.zeros(0, dim, dtype=torch.float64)


def _slab_head(direction: Tensor, edges: list[float], classes: int) -> Tensor:
    """Return a head whose class k is the slab above edge k - 1 and below edge k; other classes are never chosen."""
    head = torch.zeros(classes, len(direction) + 1, dtype=torch.float64)
    head[len(edges) + 1 :, -1] = -STEEPNESS * classes
    slopes = torch.arange(len(edges) + 1, dtype=torch.float64)
    head[: len(edges) + 1, :-1] = STEEPNESS * slopes[:, None] * direction
    head[1 : len(edges) + 1, -1] = -STEEPNESS * torch.tensor(edges, dtype=torch.float64).cumsum(0)
    return head


def recovered_fraction(x: Tensor, guesses: Tensor) -> float:
    """Return the fraction of samples to which a guess is similar."""
    if not len(guesses) or not len(x):
        return 0.0
    unit = torch.nn.functional.normalize
    cosines = unit(x.double(), dim=1) @ unit(guesses.double(), dim=1).mT
    return float((cosines.amax(1) > SIMILAR).double().mean())


def span_auc(world: World, ids: Sequence[str], uploads: Sequence[Tensors]) -> float | None:
    """Return the AUC of telling these clients' training samples from test samples by the summed second moments."""
    moments = [find_second_moment(upload, world.frozen.dim) for upload in uploads]
    found = [second for second in moments if second is not None and second.any()]
    train, test = (np.concatenate([getattr(world.members[id], split) for id in ids]) for split in ("train", "test"))
    if len(found) < len(uploads) or not len(train) or not len(test) or isinstance(world.x, tuple):
        return None
    second = torch.stack(found).sum(0)
    inside, outside = (span_scores(second, tensors.to_float32(world.read(rows))) for rows in (train, test))
    return roc_auc(inside, outside)


def recovered_from_upload(world: World, id: str) -> float | None:
    """Return the fraction of a client's samples that a server which deviates recovers from its uploads."""
    gradient_at = _gradient_of(world, [id])
    return None if gradient_at is None else _attack(world, [id], gradient_at, math.inf)


def recovered_from_sum(world: World, ids: Sequence[str]) -> float | None:
    """Return the fraction that a server and the first member recover from the sum of the others, within the bounds."""
    gradient_at = _gradient_of(world, ids[1:]) if isinstance(world.method, auto.Auto) and len(ids) > 2 else None
    if gradient_at is None:
        return None
    return _attack(world, ids[1:], gradient_at, auto.max_head_norm(_logistic.zero_shot_head(world.frozen)))


def _attack(world: World, ids: Sequence[str], gradient_at: GradientAt, limit: float) -> float:
    draw = seeds.generator("slab attack", world.seed)
    guesses = slab_attack(gradient_at, len(world.frozen.classes), world.frozen.dim, draw, limit)
    x = tensors.to_float32(world.read(np.concatenate([world.members[id].train for id in ids])))
    return recovered_fraction(x, guesses)


def _gradient_of(world: World, ids: Sequence[str]) -> GradientAt | None:
    """Return how a server reads summed gradients at a head of its choice from uploads, if it can."""
    sent = world.method.send(initial_state(world)[0].shared, ids[0])
    shape = (len(world.frozen.classes), world.frozen.dim)
    if {"weight", "bias"} <= sent.keys() and "gradient" in _request(world, ids[0], sent):
        return partial(_gradient_sum, world, ids)
    if sent.keys() == {"head"} and sent["head"].shape == shape and len(ids) == 1 and world.frozen.text is not None:
        return _gradient_of_head(world, ids[0])
    return None


def _gradient_sum(world: World, ids: Sequence[str], head: Tensor) -> Tensor:
    sent = {"weight": head[:, :-1].float(), "bias": head[:, -1].float()}
    return torch.stack([_request(world, id, sent)["gradient"].reshape(head.shape) for id in ids]).sum(0)


def _request(world: World, id: str, sent: Tensors) -> Tensors:
    return Sequential(world).round(0, [Task(id, sent, initial_state(world)[1], True)]).replies[id].upload or {}


def _gradient_of_head(world: World, id: str) -> GradientAt | None:
    """Return the same for a head that is trained: with these settings its change is one gradient.

    A head has no bias: the mean direction of the samples, with which all have a similar product, takes its place.
    """
    n_samples, lr = len(world.members[id].train), 1000.0  # the largest learning rate that a site accepts
    crafted = {"lr": lr, "weight_decay": 0.0, "momentum": 0.0, "local_epochs": 1, "batch_size": n_samples}
    names = {field.name for field in fields(world.method)}
    if not {"lr", "batch_size"} <= names:
        return None
    world = replace(world, method=replace(world.method, **{k: v for k, v in crafted.items() if k in names}))
    scale, text = world.frozen.scale, world.frozen.text
    assert text is not None

    def gradient_at(mean: Tensor, size: float, head: Tensor) -> Tensor:
        sent = ((head[:, :-1] + head[:, -1:] * mean) / scale).float()
        change = sent.double() - _request(world, id, {"head": sent})["head"].double()
        gradient = change * n_samples / (lr * scale)
        return torch.cat([gradient, (gradient @ mean)[:, None] / size], dim=1)

    start = torch.nn.functional.normalize(text.double().sum(0), dim=0)
    heads = torch.zeros(2, *text.shape, dtype=torch.float64)
    heads = torch.cat([heads, STEEPNESS * torch.eye(2, len(text), dtype=torch.float64)[:, :, None]], dim=2)
    sums, other = (-gradient_at(start, 1.0, head)[:, :-1] for head in heads)
    sums[0] = other[0]
    total = sums.sum(0)
    return partial(gradient_at, total / total.norm(), float(total.norm()) / n_samples)
