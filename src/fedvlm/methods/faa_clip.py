"""FAA-CLIP: a shared mask over image features, trained against a local domain discriminator.

The masked features should separate classes but not domains: the discriminator tells a client's features from those of
an unlabelled reference set, and its gradient is reversed.
Wu, Chaddad, Desrosiers, Daqqaq, Kateb, FAA-CLIP: federated adversarial adaptation of CLIP, 2025.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize, softmax, softplus

from fedvlm import parts, seeds
from fedvlm.core import Batch, Client, Frozen, Tensors, TrainingTraits, Traits, register, schedule
from fedvlm.core.schema import NON_NEGATIVE, POSITIVE, ranged_field
from fedvlm.maths import networks
from fedvlm.methods._heads import zero_shot_logits
from fedvlm.methods._settings import AdamSettings
from fedvlm.methods._stacking import stacked_minibatch, update_in_chunks
from fedvlm.parts import join_state, split_state
from fedvlm.parts.training import adam_step

LAYERS = {  # before the softmax; the last four are fea₄, fea₃, fea₂ and fea₁ of the ablation
    "full": ("linear", "norm", "leaky", "linear"),
    "deeper": ("linear", "norm", "leaky", "linear", "norm", "leaky", "linear"),
    "no norm": ("linear", "leaky", "linear"),
    "no second": ("linear", "norm", "leaky"),
    "linear, norm": ("linear", "norm"),
    "linear": ("linear",),
}
DISCRIMINATOR = ("linear", "norm", "relu", "linear", "norm", "relu", "linear")
MEMORY = networks.running_statistics_keys("mask", "judge")
BYTES_PER_CHUNK = 4 << 20  # of clients' tensors; gradients and moments take three times as much again
MIN_NORM = 1e-12  # divisor of a feature, as in torch's `normalize`


@register
@dataclass(frozen=True)
class FAACLIP(AdamSettings):
    # layers of the mask; "no norm" to "linear" are fea₄ to fea₁ of table VIII
    mask: Literal["full", "deeper", "no norm", "no second", "linear, norm", "linear"] = "full"
    adaptation: bool = True  # False: no discriminator ("w/o DA"), and no reference set
    reference: Literal["public", "target"] = "public"  # D_tgt, the samples that the discriminator compares with
    adaptation_weight: float = ranged_field(0.5, NON_NEGATIVE)  # λ of eq. 6
    # "joint" is eq. 5 and 6: one pass of both domains, gradients through both; "apart" is the public code: a pass of
    # each domain through mask and discriminator, without a gradient through the reference samples
    passes: Literal["apart", "joint"] = "apart"
    shared_discriminator: bool = False  # "w/ shared D"
    local_norm: bool = False  # "w/o shared BN"
    mask_duplicates: bool = False  # samples of one class are not negatives of each other
    # The mask is made for raw features of CLIP, whose norm is about 10; ours have norm 1 and are scaled to this.
    # BatchNorm removes the scale except for its initial statistics.
    feature_norm: float = ranged_field(10.0, POSITIVE)
    persist: bool = False  # keep Adam's moments over the rounds, at the client
    batch_size: int = 32  # B, and as many samples of the reference set

    @property
    def traits(self) -> Traits:
        return Traits(
            needs=frozenset({"image", "text"}),
            training=TrainingTraits(
                memory=MEMORY,
                min_samples=2,  # BatchNorm needs two samples
                reference=self.reference if self.adaptation else None,
            ),
        )

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        def draw(name: str, layers: tuple[str, ...], end: int) -> Tensors:
            widths = [frozen.dim] * layers.count("linear") + [end]
            return networks.initial_parameters(layers, name, widths, seeds.generator(name, frozen.seed))

        local: Tensors = {}
        shared = draw("mask", LAYERS[self.mask], frozen.dim)
        if self.local_norm:
            norms = tuple(f"mask{i}." for i, layer in enumerate(LAYERS[self.mask]) if layer == "norm")
            local |= {key: shared.pop(key) for key in list(shared) if key.startswith(norms)}
        if self.adaptation:
            (shared if self.shared_discriminator else local).update(draw("judge", DISCRIMINATOR, 1))
        if self.persist:
            parameters = {**shared, **local}
            local |= parts.adam_moments({key: parameters[key] for key in parameters if key not in MEMORY})
        return shared, local

    def features(self, parameters: Tensors, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensors]:
        """Return I* of the paper at unit norm, and the new statistics of the mask's BatchNorms."""
        logits, new = networks.apply_layers(LAYERS[self.mask], "mask", parameters, self.feature_norm * x, real)
        return normalize(logits.softmax(-1) * x, dim=-1), new

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return zero_shot_logits(frozen, self.features({**sent, **local}, x, None)[0])

    def loss(
        self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors
    ) -> tuple[Tensor, Tensors]:
        assert frozen.text is not None
        parameters = {**shared, **local}
        x, y, real, size = batch.x, batch.y, batch.real, len(batch.x)
        is_joint = self.adaptation and self.passes == "joint"
        if is_joint:  # separate BatchNorms hide a shift from the discriminator
            real = torch.cat([real, torch.ones(len(batch.reference), dtype=torch.bool)])
            x = torch.cat([x, batch.reference])
        masked, new = self.features(parameters, x, real)
        fit = networks.contrastive_loss(masked[:size], frozen.text, y, batch.real, frozen.scale, self.mask_duplicates)
        if not self.adaptation:
            return fit, new
        judge = partial(networks.apply_layers, DISCRIMINATOR, "judge")
        if is_joint:
            domain_logits, statistics = judge(parameters, networks.reverse_gradient(masked), real)
            client_logits, reference_logits = domain_logits[:size, 0], domain_logits[size:, 0]
        else:
            all_real = torch.ones(len(batch.reference), dtype=torch.bool)
            reference, reference_new = self.features({**parameters, **new}, batch.reference, all_real)
            new = new | reference_new
            logits, statistics = judge(parameters, networks.reverse_gradient(masked), real)
            more_logits, more = judge({**parameters, **statistics}, reference.detach(), all_real)
            client_logits, reference_logits, statistics = logits[:, 0], more_logits[:, 0], statistics | more
        # Both domains have half of the loss, also where the last minibatch is short.
        client_loss = torch.where(batch.real, softplus(-client_logits), 0.0).sum() / batch.real.sum().clamp(min=1)
        reference_loss = softplus(reference_logits).sum() / max(1, len(reference_logits))
        return fit + self.adaptation_weight * (client_loss + reference_loss) / 2, new | statistics

    def update_many(self, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
        """Update many clients at once, as many as fit a core's cache; equal to `update` but for rounding."""
        bytes_per_client = sum(v[0].numel() * v.element_size() for v in (*sent.values(), *local.values()))
        size = max(1, BYTES_PER_CHUNK // bytes_per_client)
        return update_in_chunks(partial(train_stacked, self, frozen), size, sent, local, clients)

    name = "faa-clip"
    send, update, aggregate, adapt = parts.send_all, parts.adam, parts.uniform_mean, parts.no_adaptation


# Training of stacked clients by gradients that are written out: autograd would take several times as long.


@torch.no_grad()
def train_stacked(
    method: FAACLIP, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """Do every client's `parts.adam`; a client without a sample in a step does not change."""
    local_tensors, states = split_state(local)
    state, contiguous = {**sent, **local_tensors}, torch.contiguous_format
    parameters = {key: value.clone(memory_format=contiguous) for key, value in state.items()}
    trained = {key: value for key, value in parameters.items() if key not in MEMORY}
    grads = {key: torch.zeros_like(value) for key, value in trained.items()}
    has_moments, step_settings = bool(states), schedule(method)
    states = {
        key: {
            name: states[key][name].clone() if has_moments else torch.zeros_like(like)
            for name, like in (("mean", parameter), ("square", parameter), ("count", parameter.flatten(1)[:, 0]))
        }
        for key, parameter in trained.items()
    }
    # separate lists for each client, because their numbers of steps differ
    lists = [
        [
            [value[i] for value in trained.values()],
            [value[i] for value in grads.values()],
            *([states[key][name][i] for key in trained] for name in ("mean", "square", "count")),
        ]
        for i in range(len(clients.y))
    ]
    for index in range(clients.order.shape[1]):
        batch = stacked_minibatch(clients, index)
        is_active = batch.real.any(1)
        active_clients = is_active.nonzero()[:, 0].tolist()
        if not active_clients:
            continue
        for key, new in write_gradients(method, frozen, parameters, batch, grads).items():
            parameters[key].copy_(torch.where(is_active[:, None], new, parameters[key]))
        for i in active_clients:
            adam_step(step_settings, *lists[i])
    after = {key: parameters[key] for key in local_tensors}
    return {key: parameters[key] for key in sent}, after | (join_state(states) if has_moments else {})


def write_gradients(method: FAACLIP, frozen: Frozen, parameters: Tensors, batch: Batch, grads: Tensors) -> Tensors:
    """Write the gradients of every client's `loss` into `grads`; return the new statistics of the BatchNorms.

    The batch has a leading axis of clients.
    """
    x, real, size = batch.x, batch.real, batch.x.shape[1]
    mask_network = networks.StackedNetwork(LAYERS[method.mask], "mask", parameters)
    discriminator = networks.StackedNetwork(DISCRIMINATOR, "judge", parameters)
    is_joint = method.adaptation and method.passes == "joint"
    if is_joint:
        real = torch.cat([real, real.new_ones(batch.reference.shape[:2])], 1)
        x = torch.cat([x, batch.reference], 1)
    norm_weights = networks.batch_norm_weights(real, x.dtype)
    sample_weights = networks.batch_norm_weights(batch.real, x.dtype).samples[..., None]
    logits, mask_saved, new = networks.forward(mask_network, method.feature_norm * x, norm_weights)
    mask = softmax(logits, 2)
    masked = mask * x
    norm = torch.linalg.vector_norm(masked, dim=2, keepdim=True).clamp_(min=MIN_NORM)
    masked.div_(norm)
    grad = torch.zeros_like(masked)
    grad[:, :size] = contrastive_gradient(method, frozen, masked[:, :size], batch, sample_weights / 2)
    if method.adaptation and not is_joint:
        grad.sub_(
            separate_gradients(method, mask_network._replace(parameters=parameters | new), masked, batch, grads, new)
        )
    if is_joint:
        domain_logits, domain_saved, statistics = networks.forward(discriminator, masked, norm_weights)
        new |= statistics
        # the derivative of softplus(-logit) for the client's samples and of softplus(logit) for the reference's
        domain_error = torch.sigmoid(domain_logits)
        domain_error[:, :size].sub_(1).mul_(sample_weights)
        domain_error[:, size:].div_(max(1, domain_error.shape[1] - size))
        domain_error.mul_(method.adaptation_weight / 2)
        grad.sub_(networks.backward(discriminator, domain_saved, domain_error, norm_weights, grads))  # reversed
    # through the division by the norm, the product with x and the softmax
    grad = torch.addcmul(grad, masked, (grad * masked).sum(2, keepdim=True), value=-1)
    grad.div_(norm).mul_(x)
    grad = torch.ops.aten._softmax_backward_data(grad, mask, 2, mask.dtype)
    networks.backward(mask_network, mask_saved, grad, norm_weights, grads, needs_input_gradient=False)
    return new


def separate_gradients(
    method: FAACLIP, mask_network: networks.StackedNetwork, masked: Tensor, batch: Batch, grads: Tensors, new: Tensors
) -> Tensor:
    """Write the discriminator's gradients of separate passes, and both passes' new statistics into `new`.

    Return the gradient of the client's loss in its masked features; the reference samples have none.
    """
    reference, parameters = batch.reference, mask_network.parameters
    norm_weights = networks.batch_norm_weights(batch.real, masked.dtype)
    all_weights = networks.batch_norm_weights(batch.real.new_ones(reference.shape[:2]), masked.dtype)
    logits, _, statistics = networks.forward(mask_network, method.feature_norm * reference, all_weights)
    new |= statistics
    reference = normalize(softmax(logits, 2) * reference, dim=2, eps=MIN_NORM)
    network = networks.StackedNetwork(DISCRIMINATOR, "judge", parameters)
    logits, saved, statistics = networks.forward(network, masked, norm_weights)
    after = network._replace(parameters=parameters | statistics)
    reference_logits, reference_saved, reference_statistics = networks.forward(after, reference, all_weights)
    new |= statistics | reference_statistics
    weight = method.adaptation_weight / 2
    error = torch.sigmoid(reference_logits).mul_(weight * all_weights.samples[..., None])
    networks.backward(network, reference_saved, error, all_weights, grads, needs_input_gradient=False)
    of_reference = {key: value.clone() for key, value in grads.items() if key.startswith("judge")}
    error = torch.sigmoid(logits).sub_(1).mul_(weight * norm_weights.samples[..., None])
    gradient = networks.backward(network, saved, error, norm_weights, grads)
    for key, value in of_reference.items():
        grads[key].add_(value)
    return gradient


def contrastive_gradient(
    method: FAACLIP, frozen: Frozen, masked: Tensor, batch: Batch, sample_weights: Tensor
) -> Tensor:
    """Return (clients, samples, dim): the gradient of `contrastive_loss` in the masked features.

    `sample_weights` (clients, samples, 1) are those of each direction.
    """
    assert frozen.text is not None
    text = frozen.text[batch.y]
    logits = torch.bmm(masked, text.mT).mul_(frozen.scale)
    out = ~batch.real[:, None]  # (clients, 1, samples)
    across = out.mT
    if method.mask_duplicates:
        is_self = torch.eye(logits.shape[1], dtype=torch.bool, device=logits.device)
        same = (batch.y[:, :, None] == batch.y[:, None]) & ~is_self
        out, across = out | same, across | same
    image_to_text = softmax(logits.masked_fill(out, networks.MASKED_LOGIT), 2).mul_(sample_weights)
    text_to_image = softmax(logits.masked_fill(across, networks.MASKED_LOGIT), 1).mul_(sample_weights.mT)
    logit_grad = image_to_text.add_(text_to_image)
    logit_grad.diagonal(dim1=1, dim2=2).sub_(2 * sample_weights[..., 0])
    return torch.bmm(logit_grad, text).mul_(frozen.scale)
