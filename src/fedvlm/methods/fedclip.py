"""FedCLIP: a shared mask over image features, trained by CLIP's own loss and averaged each round.

Lu, Hu, Wang, Xie, FedCLIP: fast generalization and personalization for CLIP in federated learning, IEEE Data
Engineering Bulletin 2023.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize

from fedvlm import parts, seeds
from fedvlm.core import Batch, Frozen, Tensors, Traits, register
from fedvlm.core.schema import POSITIVE, ranged_field
from fedvlm.maths.networks import apply_layers, contrastive_loss, initial_parameters
from fedvlm.methods._heads import zero_shot_logits
from fedvlm.methods._settings import AdamSettings

LAYERS = ("linear", "tanh", "linear")  # before the softmax


@register
@dataclass(frozen=True)
class FedCLIP(AdamSettings):
    feature_norm: float = ranged_field(10.0, POSITIVE)  # that of CLIP's raw features, for which the mask is made
    mask_duplicates: bool = False  # samples of one class are not negatives of each other
    weight_decay: float = 0.2
    rounds: int = 200

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        draw = seeds.generator("mask", frozen.seed)
        return initial_parameters(LAYERS, "mask", [frozen.dim] * 3, draw), {}

    def features(self, parameters: Tensors, x: Tensor) -> Tensor:
        logits, _ = apply_layers(LAYERS, "mask", parameters, self.feature_norm * x)
        return normalize(logits.softmax(-1) * x, dim=-1)

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return zero_shot_logits(frozen, self.features(sent, x))

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        assert frozen.text is not None
        masked = self.features(shared, batch.x)
        return contrastive_loss(masked, frozen.text, batch.y, batch.real, frozen.scale, self.mask_duplicates)

    name = "fedclip"
    traits = Traits(needs=frozenset({"image", "text"}))
    send, update, aggregate, adapt = parts.send_all, parts.adam, parts.uniform_mean, parts.no_adaptation
    update_many = parts.fused_adam
