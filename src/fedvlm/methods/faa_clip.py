"""A shared mask over image features, trained against a private judge of where an image is from.

The mask is to make a client's features tell the classes and hide the client: the judge tells them
from those of an unlabelled reference set, and its gradient comes back reversed.
Wu, Chaddad, Desrosiers, Daqqaq, Kateb, FAA-CLIP: federated adversarial adaptation of CLIP, 2025.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softmax, softplus

from fedvlm import parts, seeds
from fedvlm.core import Batch, Client, Frozen, Tensors, TrainingTraits, Traits, register, schedule
from fedvlm.maths.networks import (
    MASKED_LOGIT,
    Layers,
    apply_layers,
    backward,
    batch_norm_weights,
    contrastive_loss,
    forward,
    initial_parameters,
    reverse_gradient,
    running_statistics_keys,
)
from fedvlm.parts import join_state, split_state
from fedvlm.parts.training import adam_step
from fedvlm.tensors import to_float32

LAYERS = {  # before the softmax; the last four are fea₄, fea₃, fea₂ and fea₁ of the ablation
    "full": ("linear", "norm", "leaky", "linear"),
    "deeper": ("linear", "norm", "leaky", "linear", "norm", "leaky", "linear"),
    "no norm": ("linear", "leaky", "linear"),
    "no second": ("linear", "norm", "leaky"),
    "linear, norm": ("linear", "norm"),
    "linear": ("linear",),
}
DISCRIMINATOR = ("linear", "norm", "relu", "linear", "norm", "relu", "linear")
MEMORY = running_statistics_keys("mask", "judge")


@register
@dataclass(frozen=True)
class FAACLIP:
    # layers of the mask; "no norm" to "linear" are fea₄ to fea₁ of table VIII
    mask: Literal["full", "deeper", "no norm", "no second", "linear, norm", "linear"] = "full"
    adaptation: bool = True  # False: no judge ("w/o DA"), and no reference set
    reference: Literal["public", "target"] = "public"  # D_tgt, whose rows the judge sees
    adaptation_weight: float = 0.5  # λ of eq. 6
    shared_discriminator: bool = False  # "w/ shared D"
    local_norm: bool = False  # "w/o shared BN"
    mask_duplicates: bool = False  # rows of one class are no opposites of each other
    # The mask is meant for raw features, ours have length 1. CLIP's are about 10 long: so long they
    # enter it. BatchNorm takes the length out again but for its first statistics.
    feature_norm: float = 10.0
    lr: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.02  # L2, inside Adam
    persist: bool = False  # keep Adam's moments over the rounds, at the client
    batch_size: int = 32  # B; the judge sees as many rows of the reference set
    local_epochs: int = 1
    rounds: int = 50

    @property
    def traits(self) -> Traits:
        return Traits(
            needs=frozenset({"image", "text"}),
            training=TrainingTraits(
                memory=MEMORY,
                min_samples=2,  # BatchNorm has no statistics of one sample
                reference=self.reference if self.adaptation else None,
            ),
        )

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        def draw(name: str, layers: tuple[str, ...], end: int) -> Tensors:
            widths = [frozen.dim] * layers.count("linear") + [end]
            return initial_parameters(layers, name, widths, seeds.generator(name, frozen.seed))

        local: Tensors = {}
        shared = draw("mask", LAYERS[self.mask], frozen.dim)
        if self.local_norm:
            for place, layer in enumerate(LAYERS[self.mask]):
                at = f"mask{place}."
                norm_keys = [key for key in shared if layer == "norm" and key.startswith(at)]
                local |= {key: shared.pop(key) for key in norm_keys}
        if self.adaptation:
            (shared if self.shared_discriminator else local).update(draw("judge", DISCRIMINATOR, 1))
        if self.persist:
            parameters = {**shared, **local}
            local |= parts.adam_moments({key: parameters[key] for key in parameters if key not in MEMORY})
        return shared, local

    def features(self, parameters: Tensors, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensors]:
        """I* of the paper at unit length, and the mask's new statistics."""
        logits, new = apply_layers(LAYERS[self.mask], "mask", parameters, self.feature_norm * x, real)
        return normalize(logits.softmax(-1) * x, dim=-1), new

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        assert frozen.text is not None  # promised by `needs`
        return frozen.scale * self.features({**sent, **local}, x, None)[0] @ frozen.text.mT

    def loss(
        self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors
    ) -> tuple[Tensor, Tensors]:
        assert frozen.text is not None
        parameters = {**shared, **local}
        x, y, real, rows = batch.x, batch.y, batch.real, len(batch.x)
        if self.adaptation:  # both in one pass: apart, BatchNorm would hide a shift from the judge
            real = torch.cat([real, torch.ones(len(batch.reference), dtype=torch.bool)])
            x = torch.cat([x, batch.reference])
        masked, new = self.features(parameters, x, real)
        duplicates = self.mask_duplicates
        fit = contrastive_loss(masked[:rows], frozen.text, y, batch.real, frozen.scale, duplicates)
        if not self.adaptation:
            return fit, new
        domain_logits, domain_statistics = apply_layers(
            DISCRIMINATOR, "judge", parameters, reverse_gradient(masked), real
        )
        # Half the loss for each side, also where the last minibatch is short.
        client_loss = torch.where(batch.real, softplus(-domain_logits[:rows, 0]), 0.0).sum()
        client_loss = client_loss / batch.real.sum().clamp(min=1)
        reference_loss = softplus(domain_logits[rows:, 0]).sum() / max(1, len(domain_logits) - rows)
        return fit + self.adaptation_weight * (client_loss + reference_loss) / 2, new | domain_statistics

    def update_many(self, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
        """`update` of many clients at once, by written gradients; equal to it but for rounding."""
        return update_in_chunks(self, Nets(LAYERS[self.mask], DISCRIMINATOR), frozen, sent, local, clients)

    name = "faa-clip"
    send, update, aggregate, adapt = parts.send_all, parts.adam, parts.uniform_mean, parts.no_adaptation


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
    trained = {key: value for key, value in parameters.items() if key not in self.traits.training.memory}
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
