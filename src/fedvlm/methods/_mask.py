"""FAA-CLIP's updates for clients side by side, by gradients that are written out."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softmax

from fedvlm.core import Client, Frozen, Tensors, schedule
from fedvlm.maths.contrast import AWAY
from fedvlm.maths.layers import Layers
from fedvlm.maths.stacks import back, forth, shares
from fedvlm.parts import join_state, split_state
from fedvlm.parts.fused import adam_step
from fedvlm.tensors import full

AT_ONCE = 4 << 20  # bytes of clients' tensors; with slopes and moments four times as much
LEAST = 1e-12  # by which a feature is divided at least, as by torch's `normalize`


class Nets(NamedTuple):
    mask: Layers
    judge: Layers


class Rows(NamedTuple):
    """A minibatch of every client."""

    x: Tensor  # (clients, rows, dim)
    y: Tensor  # (clients, rows)
    real: Tensor  # (clients, rows)
    reference: Tensor  # (clients, others, dim)


def together(
    self: Any, nets: Nets, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """Every client's `parts.adam`, as many at once as a core's cache holds."""
    one = sum(v[0].numel() * v.element_size() for v in (*sent.values(), *local.values()))
    size = max(1, AT_ONCE // one)
    done = []
    for first in range(0, len(clients.y), size):
        some = slice(first, first + size)
        given, own = ({key: v[some] for key, v in part.items()} for part in (sent, local))
        crowd = Client(*(value[some] for value in vars(clients).values()))
        done.append(walk(self, nets, frozen, given, own, crowd))
    uploads, owns = zip(*done, strict=True)
    return joined(uploads), joined(owns)


def joined(parts: tuple[Tensors, ...]) -> Tensors:
    if len(parts) == 1:
        return parts[0]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


@torch.no_grad()
def walk(
    self: Any, nets: Nets, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """The steps of some clients; one without a row in a step keeps all it has."""
    own, states = split_state(local)
    every = {
        key: value.clone(memory_format=torch.contiguous_format)
        for key, value in {**sent, **own}.items()
    }
    trained = {key: value for key, value in every.items() if key not in self.traits.memory}
    slopes = {key: torch.zeros_like(value) for key, value in trained.items()}
    keeps, pace = bool(states), schedule(self)
    states = {
        key: {
            name: states[key][name].clone() if keeps else torch.zeros_like(like)
            for name, like in (("mean", one), ("square", one), ("count", one.flatten(1)[:, 0]))
        }
        for key, one in trained.items()
    }
    # each client's own, since their numbers of steps differ
    lists = [
        [
            [value[i] for value in trained.values()],
            [value[i] for value in slopes.values()],
            *([states[key][name][i] for key in trained] for name in ("mean", "square", "count")),
        ]
        for i in range(len(clients.y))
    ]
    for index in range(clients.order.shape[1]):
        batch = minibatches(clients, index)
        going = batch.real.any(1)
        who = going.nonzero()[:, 0].tolist()
        if not who:
            continue
        for key, new in gradients(self, nets, frozen, every, batch, slopes).items():
            every[key].copy_(torch.where(going[:, None], new, every[key]))
        for i in who:
            adam_step(pace, *lists[i])
    after = {key: every[key] for key in own}
    return {key: every[key] for key in sent}, after | (join_state(states) if keeps else {})


def minibatches(clients: Client, index: int) -> Rows:
    order, others = clients.order[:, index], clients.reference_order[:, index].clamp(min=0)
    who, rows = torch.arange(len(order), device=order.device)[:, None], order.clamp(min=0)
    return Rows(
        full(clients.x[who, rows]),
        clients.y[who, rows].clamp(min=0),
        order >= 0,
        full(clients.reference[who, others]),
    )


def gradients(
    self: Any, nets: Nets, frozen: Frozen, every: Tensors, batch: Rows, slopes: Tensors
) -> Tensors:
    """Writes the gradients of every client's `loss` into `slopes`; returns the new statistics."""
    x, real, rows = batch.x, batch.real, batch.x.shape[1]
    if self.adaptation:
        real = torch.cat([real, real.new_ones(batch.reference.shape[:2])], 1)
        x = torch.cat([x, batch.reference], 1)
    by, own = shares(real, x.dtype), shares(batch.real, x.dtype).rows[..., None]
    logits, kept, new = forth(nets.mask, "mask", every, self.feature_norm * x, by)
    mask = softmax(logits, 2)
    masked = mask * x
    length = torch.linalg.vector_norm(masked, dim=2, keepdim=True).clamp_(min=LEAST)
    masked.div_(length)
    slope = torch.zeros_like(masked)
    slope[:, :rows] = contrast(self, frozen, masked[:, :rows], batch, own / 2)
    if self.adaptation:
        says, seen, more = forth(nets.judge, "judge", every, masked, by)
        new |= more
        # the slope of softplus(-says) for own rows and of softplus(says) for the others
        off = torch.sigmoid(says)
        off[:, :rows].sub_(1).mul_(own)
        off[:, rows:].div_(max(1, off.shape[1] - rows))
        off.mul_(self.adaptation_weight / 2)
        slope.sub_(back(nets.judge, "judge", every, seen, off, by, slopes))  # reversed
    # back through the length, the product with x and the softmax
    slope = torch.addcmul(slope, masked, (slope * masked).sum(2, keepdim=True), value=-1)
    slope.div_(length).mul_(x)
    slope = torch.ops.aten._softmax_backward_data(slope, mask, 2, mask.dtype)
    back(nets.mask, "mask", every, kept, slope, by, slopes, inward=False)
    return new


def contrast(self: Any, frozen: Frozen, masked: Tensor, batch: Rows, share: Tensor) -> Tensor:
    """(clients, rows, dim): the gradient of `maths.contrast.contrastive` in the features.

    `share` (clients, rows, 1) is what each direction of a row weighs.
    """
    assert frozen.text is not None
    text = frozen.text[batch.y]
    logits = torch.bmm(masked, text.mT).mul_(frozen.scale)
    out = ~batch.real[:, None]  # (clients, 1, rows)
    across = out.mT
    if self.mask_duplicates:
        own = torch.eye(logits.shape[1], dtype=torch.bool, device=logits.device)
        same = (batch.y[:, :, None] == batch.y[:, None]) & ~own
        out, across = out | same, across | same
    there = softmax(logits.masked_fill(out, AWAY), 2).mul_(share)
    back = softmax(logits.masked_fill(across, AWAY), 1).mul_(share.mT)
    slope = there.add_(back)
    slope.diagonal(dim1=1, dim2=2).sub_(2 * share[..., 0])
    return torch.bmm(slope, text).mul_(frozen.scale)
