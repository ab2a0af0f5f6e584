"""A shared mask over image features, trained against a private judge of where an image is from.

The mask is to make a client's features tell the classes and hide the client: the judge tells them
from those of an unlabelled reference set, and its gradient comes back reversed.
Wu, Chaddad, Desrosiers, Daqqaq, Kateb, FAA-CLIP: federated adversarial adaptation of CLIP, 2025.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from fedvlm import parts, seeds
from fedvlm.core import Batch, Client, Frozen, Tensors, Traits, register
from fedvlm.maths.contrast import contrastive_loss
from fedvlm.maths.layers import apply_layers, initial_parameters, running_statistics_keys
from fedvlm.maths.reversal import reverse_gradient
from fedvlm.methods._mask import Nets, update_in_chunks

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
            memory=MEMORY,
            min_samples=2,  # BatchNorm has no statistics of one row
            reference=self.reference if self.adaptation else None,
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
