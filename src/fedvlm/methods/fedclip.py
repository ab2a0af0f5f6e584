"""A shared mask over image features, trained by CLIP's own loss and averaged each round.

Lu, Hu, Wang, Xie, FedCLIP: fast generalization and personalization for CLIP in federated learning,
IEEE Data Engineering Bulletin 2023.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize

from fedvlm import parts, seeds
from fedvlm.core import Batch, Frozen, Tensors, Traits, register
from fedvlm.maths.networks import apply_layers, contrastive_loss, initial_parameters

LAYERS = ("linear", "tanh", "linear")  # before the softmax


@register
@dataclass(frozen=True)
class FedCLIP:
    # The mask is meant for raw features, ours have length 1. CLIP's are about 10 long: so long they
    # enter it.
    feature_norm: float = 10.0
    mask_duplicates: bool = False  # rows of one class are no opposites of each other
    lr: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.2  # L2, inside Adam
    batch_size: int = 32
    local_epochs: int = 1
    rounds: int = 200

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        draw = seeds.generator("mask", frozen.seed)
        return initial_parameters(LAYERS, "mask", [frozen.dim] * 3, draw), {}

    def features(self, parameters: Tensors, x: Tensor) -> Tensor:
        logits, _ = apply_layers(LAYERS, "mask", parameters, self.feature_norm * x)
        return normalize(logits.softmax(-1) * x, dim=-1)

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        assert frozen.text is not None  # promised by `needs`
        return frozen.scale * self.features(sent, x) @ frozen.text.mT

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        assert frozen.text is not None
        masked = self.features(shared, batch.x)
        duplicates = self.mask_duplicates
        return contrastive_loss(masked, frozen.text, batch.y, batch.real, frozen.scale, duplicates)

    name = "fedclip"
    traits = Traits(needs=frozenset({"image", "text"}))
    send, update, aggregate, adapt = parts.send_all, parts.adam, parts.uniform_mean, parts.no_adaptation
    update_many = parts.fused_adam
