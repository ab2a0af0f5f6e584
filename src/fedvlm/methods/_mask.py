"""FAA-CLIP's updates for clients side by side, by gradients that are written out."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softmax

from fedvlm.core import Client, Frozen, Tensors, schedule
from fedvlm.maths.contrast import MASKED_LOGIT
from fedvlm.maths.layers import Layers
from fedvlm.maths.stacks import backward, batch_norm_weights, forward
from fedvlm.parts import join_state, split_state
from fedvlm.parts.training import adam_step
from fedvlm.tensors import to_float32

BYTES_PER_CHUNK = 4 << 20  # bytes of clients' tensors; with slopes and moments four times as much
MIN_NORM = 1e-12  # by which a feature is divided at least, as by torch's `normalize`


class Nets(NamedTuple):
    mask: Layers
    discriminator: Layers


class StackedBatch(NamedTuple):
    """A minibatch of every client."""

    x: Tensor  # (clients, rows, dim)
    y: Tensor  # (clients, rows)
    real: Tensor  # (clients, rows)
    reference: Tensor  # (clients, others, dim)


def update_in_chunks(
    self: Any, nets: Nets, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """Every client's `parts.adam`, as many at once as a core's cache holds."""
    bytes_per_client = sum(v[0].numel() * v.element_size() for v in (*sent.values(), *local.values()))
    size = max(1, BYTES_PER_CHUNK // bytes_per_client)
    done = []
    for first in range(0, len(clients.y), size):
        clients_of_chunk = slice(first, first + size)
        sent_chunk, local_chunk = ({key: v[clients_of_chunk] for key, v in part.items()} for part in (sent, local))
        chunk = Client(*(value[clients_of_chunk] for value in vars(clients).values()))
        done.append(train_chunk(self, nets, frozen, sent_chunk, local_chunk, chunk))
    uploads, owns = zip(*done, strict=True)
    return concatenate(uploads), concatenate(owns)


def concatenate(parts: tuple[Tensors, ...]) -> Tensors:
    if len(parts) == 1:
        return parts[0]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


@torch.no_grad()
def train_chunk(
    self: Any, nets: Nets, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """The steps of some clients; one without a row in a step keeps all it has."""
    local_tensors, states = split_state(local)
    parameters = {
        key: value.clone(memory_format=torch.contiguous_format) for key, value in {**sent, **local_tensors}.items()
    }
    trained = {key: value for key, value in parameters.items() if key not in self.traits.memory}
    grads = {key: torch.zeros_like(value) for key, value in trained.items()}
    has_moments, step_settings = bool(states), schedule(self)
    states = {
        key: {
            name: states[key][name].clone() if has_moments else torch.zeros_like(like)
            for name, like in (("mean", parameter), ("square", parameter), ("count", parameter.flatten(1)[:, 0]))
        }
        for key, parameter in trained.items()
    }
    # each client's own, since their numbers of steps differ
    lists = [
        [
            [value[i] for value in trained.values()],
            [value[i] for value in grads.values()],
            *([states[key][name][i] for key in trained] for name in ("mean", "square", "count")),
        ]
        for i in range(len(clients.y))
    ]
    for index in range(clients.order.shape[1]):
        batch = minibatches(clients, index)
        is_active = batch.real.any(1)
        active_clients = is_active.nonzero()[:, 0].tolist()
        if not active_clients:
            continue
        for key, new in gradients(self, nets, frozen, parameters, batch, grads).items():
            parameters[key].copy_(torch.where(is_active[:, None], new, parameters[key]))
        for i in active_clients:
            adam_step(step_settings, *lists[i])
    after = {key: parameters[key] for key in local_tensors}
    return {key: parameters[key] for key in sent}, after | (join_state(states) if has_moments else {})


def minibatches(clients: Client, index: int) -> StackedBatch:
    order, reference_indices = clients.order[:, index], clients.reference_order[:, index].clamp(min=0)
    client_indices, sample_indices = torch.arange(len(order), device=order.device)[:, None], order.clamp(min=0)
    return StackedBatch(
        to_float32(clients.x[client_indices, sample_indices]),
        clients.y[client_indices, sample_indices].clamp(min=0),
        order >= 0,
        to_float32(clients.reference[client_indices, reference_indices]),
    )


def gradients(
    self: Any, nets: Nets, frozen: Frozen, parameters: Tensors, batch: StackedBatch, grads: Tensors
) -> Tensors:
    """Writes the gradients of every client's `loss` into `slopes`; returns the new statistics."""
    x, real, rows = batch.x, batch.real, batch.x.shape[1]
    if self.adaptation:
        real = torch.cat([real, real.new_ones(batch.reference.shape[:2])], 1)
        x = torch.cat([x, batch.reference], 1)
    norm_weights, sample_weights = (
        batch_norm_weights(real, x.dtype),
        batch_norm_weights(batch.real, x.dtype).rows[..., None],
    )
    logits, mask_saved, new = forward(nets.mask, "mask", parameters, self.feature_norm * x, norm_weights)
    mask = softmax(logits, 2)
    masked = mask * x
    length = torch.linalg.vector_norm(masked, dim=2, keepdim=True).clamp_(min=MIN_NORM)
    masked.div_(length)
    grad = torch.zeros_like(masked)
    grad[:, :rows] = contrastive_gradient(self, frozen, masked[:, :rows], batch, sample_weights / 2)
    if self.adaptation:
        domain_logits, domain_saved, domain_statistics = forward(
            nets.discriminator, "judge", parameters, masked, norm_weights
        )
        new |= domain_statistics
        # the slope of softplus(-says) for own rows and of softplus(says) for the others
        domain_error = torch.sigmoid(domain_logits)
        domain_error[:, :rows].sub_(1).mul_(sample_weights)
        domain_error[:, rows:].div_(max(1, domain_error.shape[1] - rows))
        domain_error.mul_(self.adaptation_weight / 2)
        grad.sub_(
            backward(nets.discriminator, "judge", parameters, domain_saved, domain_error, norm_weights, grads)
        )  # reversed
    # back through the length, the product with x and the softmax
    grad = torch.addcmul(grad, masked, (grad * masked).sum(2, keepdim=True), value=-1)
    grad.div_(length).mul_(x)
    grad = torch.ops.aten._softmax_backward_data(grad, mask, 2, mask.dtype)
    backward(nets.mask, "mask", parameters, mask_saved, grad, norm_weights, grads, needs_input_gradient=False)
    return new


def contrastive_gradient(
    self: Any, frozen: Frozen, masked: Tensor, batch: StackedBatch, sample_weights: Tensor
) -> Tensor:
    """(clients, rows, dim): the gradient of `maths.contrast.contrastive` in the features.

    `share` (clients, rows, 1) is what each direction of a row weighs.
    """
    assert frozen.text is not None
    text = frozen.text[batch.y]
    logits = torch.bmm(masked, text.mT).mul_(frozen.scale)
    out = ~batch.real[:, None]  # (clients, 1, rows)
    across = out.mT
    if self.mask_duplicates:
        is_self = torch.eye(logits.shape[1], dtype=torch.bool, device=logits.device)
        same = (batch.y[:, :, None] == batch.y[:, None]) & ~is_self
        out, across = out | same, across | same
    image_to_text = softmax(logits.masked_fill(out, MASKED_LOGIT), 2).mul_(sample_weights)
    text_to_image = softmax(logits.masked_fill(across, MASKED_LOGIT), 1).mul_(sample_weights.mT)
    logit_grad = image_to_text.add_(text_to_image)
    logit_grad.diagonal(dim1=1, dim2=2).sub_(2 * sample_weights[..., 0])
    return torch.bmm(logit_grad, text).mul_(frozen.scale)
