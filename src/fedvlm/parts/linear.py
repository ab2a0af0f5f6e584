"""`parts.sgd` of a linear head for many clients at once: its gradient written out, no autograd."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedvlm.core import Client, Frozen, Tensors, schedule
from fedvlm.parts.walk import epoch_of
from fedvlm.tensors import to_float32

# (clients, classes, dim) heads -> what is added to their gradients
ExtraGradient = Callable[[Tensor], Tensor | float]


# (clients, batch, dim) scaled rows, (clients, batch, 1) labels and weights, (clients, 1, 1) going
LinearBatch = tuple[Tensor, Tensor, Tensor, Tensor]


def iterate_batches(scale: float, clients: Client) -> Iterator[LinearBatch]:
    """The minibatches in which anyone has a row."""
    rows_of, labels = clients.x.flatten(0, 1), clients.y.clamp(min=0).flatten()
    first = torch.arange(len(clients.y))[:, None] * clients.y.shape[1]
    for rows in clients.order.unbind(1):
        real = rows >= 0
        count = real.sum(1)
        if not count.any():
            continue
        index = (rows.clamp(min=0) + first).flatten()
        batch = to_float32(rows_of.index_select(0, index)).reshape(*rows.shape, -1)
        batch_labels = labels.index_select(0, index).reshape(*rows.shape, 1)
        sample_weights = (real / count.clamp(min=1)[:, None])[..., None]
        # scaled in autograd's order: the same rounding
        yield batch.mul_(scale), batch_labels, sample_weights, (count > 0)[:, None, None]


def head_gradient(head: Tensor, batch: Tensor, batch_labels: Tensor, sample_weights: Tensor) -> Tensor:
    """(clients, classes, dim) the gradient of each client's mean cross-entropy."""
    errors = torch.bmm(batch, head.mT).log_softmax(2).exp_()
    errors.scatter_(2, batch_labels, errors.gather(2, batch_labels) - 1)
    return torch.bmm(errors.mul_(sample_weights).mT, batch)


@torch.no_grad()
def train_heads(self: Any, scale: float, head: Tensor, clients: Client, extra_gradient: ExtraGradient) -> Tensor:
    """(clients, classes, dim) after the steps of `parts.sgd` on `scale * x @ head.mT`'s loss."""
    settings = schedule(self)
    head = head.clone()
    velocity = torch.zeros_like(head)
    for batch, batch_labels, sample_weights, is_active in iterate_batches(scale, clients):
        gradient = head_gradient(head, batch, batch_labels, sample_weights)
        gradient = (gradient + extra_gradient(head)).add_(head, alpha=settings.weight_decay)
        # A client without rows in this step keeps its head and its speed.
        velocity = (
            torch.where(is_active, settings.momentum * velocity + gradient, velocity) if settings.momentum else gradient
        )
        head.sub_(torch.where(is_active, velocity, 0.0), alpha=settings.lr)
    return head


@torch.no_grad()
def train_maps(self: Any, scale: float, first: Tensor, head: Tensor, clients: Client) -> Tensor:
    """(clients, dim, dim) after the steps of `parts.sgd` on `scale * x @ map.mT @ head.mT`'s loss.

    A gradient is headᵀ times one of the classes' rows, so that the map is a part of the first one
    and headᵀ times what was added: each step costs as much as one of a head.
    """
    settings = schedule(self)
    initial_logit_map, square = torch.bmm(head, first), torch.bmm(head, head.mT)
    part = initial_logit_map.new_ones(len(head), 1, 1)  # of the first map that is left
    added, part_speed, added_speed = torch.zeros_like(head), 0 * part, torch.zeros_like(head)
    for batch, batch_labels, sample_weights, is_active in iterate_batches(scale, clients):
        gradient = head_gradient(
            part * initial_logit_map + torch.bmm(square, added), batch, batch_labels, sample_weights
        )
        faster = settings.momentum * part_speed + settings.weight_decay * part
        part_speed = torch.where(is_active, faster, part_speed)
        faster = settings.momentum * added_speed + gradient + settings.weight_decay * added
        added_speed = torch.where(is_active, faster, added_speed)
        step_size = settings.lr * is_active
        part, added = part - step_size * part_speed, added - step_size * added_speed
    return torch.baddbmm(part * first, head.mT, added)


def map_sgd(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
    """update_many: every client's `parts.sgd` of a local `head` over a shared `map`, in turns."""
    epochs = epoch_of(self, clients.order)

    def turn(key: str) -> Client:
        is_trained = self.in_turn(key, epochs)[..., None]
        return replace(clients, order=torch.where(is_trained, clients.order, -1))

    mapped = torch.bmm(to_float32(clients.x), sent["map"].mT)
    head = train_heads(self, frozen.scale, local["head"], replace(turn("head"), x=mapped), lambda _: 0.0)
    return {"map": train_maps(self, frozen.scale, sent["map"], head, turn("map"))}, {"head": head}


def head_sgd(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
    """update_many: every client's `parts.sgd` where a shared `head` is all that is trained."""
    return {"head": train_heads(self, frozen.scale, sent["head"], clients, lambda head: 0.0)}, local


def regularised_head_sgd(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """update_many: as `head_sgd`, where the loss has another part, whose gradient is `pull`."""

    def extra_gradient(head: Tensor) -> Tensor:
        return torch.as_tensor(self.pull(sent, local, head))

    return {"head": train_heads(self, frozen.scale, sent["head"], clients, extra_gradient)}, local
