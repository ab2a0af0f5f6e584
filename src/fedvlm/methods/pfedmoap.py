"""pFedMoAP: a prompt per client; a local attention mixes its class features with those of the nearest clients' prompts.

Luo, Wang, Guo, Li, Qin, Zhang, Mixture of experts made personalized: federated prompt learning for vision-language
models, ICLR 2025. The server keeps every client's prompt and averages none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from fedvlm import parts, seeds
from fedvlm.core import Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.core.schema import COUNT, NON_NEGATIVE, POSITIVE, Range, ranged_field
from fedvlm.errors import SettingsError
from fedvlm.methods._prompts import class_features, initial_prompt
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods._stacking import update_sequentially

PROMPT_PREFIX = "of "  # with a client's id: the prompt of the client
SAMPLES_PER_CHUNK = 512  # an image has features of its own for every class
MASKED_SCORE = -1e9


@register
@dataclass(frozen=True)
class PFedMoAP(PromptSettings):
    experts: int = ranged_field(10, Range(2))  # K: a client's own prompt and the nearest others
    local_weight: float = ranged_field(0.5, NON_NEGATIVE)  # λ of the logits of the client's own prompt
    gate_dim: int = ranged_field(128, COUNT)  # dimensions of the attention; every d / 128-th of an embedding
    gate_heads: int = ranged_field(8, COUNT)  # of the attention
    gate_scale: float = ranged_field(10.0, POSITIVE)  # of the attention's scores

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        prompt, draw = initial_prompt(self, frozen), seeds.generator("gate", frozen.seed)
        size = len(range(0, frozen.dim, self.stride(frozen.dim)))
        if size % self.gate_heads:
            raise SettingsError(f"pfedmoap.gate_heads must divide the {size} dimensions, got {self.gate_heads}")
        gate = {}
        for name in ("query", "key", "value", "output"):
            for field, shape in (("weight", (size, size)), ("bias", (size,))):
                gate[f"{name} {field}"] = size**-0.5 * (2 * torch.rand(*shape, generator=draw) - 1)
        return {"prompt": prompt}, gate

    def stride(self, dim: int) -> int:
        return max(1, dim // self.gate_dim)

    def send(self, shared: Tensors, id: str) -> Tensors:
        """Send the client's own prompt (the mean of all to a new client) and those of the nearest others."""
        if "experts" in shared:  # at a site, after the last round
            return shared
        prompt = shared.get(PROMPT_PREFIX + id, shared["prompt"])
        others = [shared[key] for key in sorted(shared) if key.startswith(PROMPT_PREFIX) and key != PROMPT_PREFIX + id]
        others.sort(key=lambda other: float((other - prompt).double().square().sum()))  # a stable order
        others = others[: self.experts - 1]
        padding = [torch.zeros_like(prompt)] * (self.experts - 1 - len(others))
        is_expert = torch.arange(self.experts - 1) < len(others)
        return {"prompt": prompt, "experts": torch.stack([*others, *padding]), "is expert": is_expert.float()}

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        upload, local = parts.sgd(self, frozen, sent, local, client)
        return {"prompt": upload["prompt"]}, local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        new = {PROMPT_PREFIX + id: upload["prompt"] for id, upload in zip(ids, uploads, strict=True)}
        held = {key: value for key, value in {**shared, **new}.items() if key.startswith(PROMPT_PREFIX)}
        prompts = torch.stack([held[key] for key in sorted(held)])
        return {"prompt": prompts.double().mean(0).to(shared["prompt"]), **held}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        text = class_features(frozen, sent["prompt"])  # (classes, dim)
        local_logits = frozen.scale * x @ text.mT
        if "experts" not in sent:  # before the first send
            return local_logits
        others = class_features(frozen, sent["experts"]).detach()  # (experts - 1, classes, dim)
        keys = torch.cat([text[None], others]).transpose(0, 1)[..., :: self.stride(frozen.dim)]
        mask = torch.cat([torch.ones(1, dtype=torch.bool), sent["is expert"] > 0])
        pooled = x[:, :: self.stride(frozen.dim)]
        parts_of_x = torch.split(pooled, SAMPLES_PER_CHUNK)
        mixed = torch.cat([torch.einsum("nd,cnd->nc", part, self.mix(local, part, keys, mask)) for part in parts_of_x])
        return torch.where(mask[1:].any(), self.local_weight * local_logits + frozen.scale * mixed, local_logits)

    def mix(self, gate: Tensors, x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Return (classes, samples, gate dim): attention of images to the features of the experts, class by class."""

        def project(name: str, values: Tensor) -> Tensor:  # (..., heads, gate dim / heads)
            projected = linear(values, gate[f"{name} weight"], gate[f"{name} bias"])
            return torch.unflatten(projected, -1, (self.gate_heads, -1))

        q, k, v = project("query", x), project("key", keys), project("value", keys)
        scores = self.gate_scale * torch.einsum("nhd,ckhd->cnhk", q, k)
        attention = torch.where(mask, scores, MASKED_SCORE).softmax(-1)
        heads = torch.einsum("cnhk,ckhd->cnhd", attention, v).flatten(-2)
        return linear(heads, gate["output weight"], gate["output bias"])

    name = "pfedmoap"
    traits = Traits(
        needs=frozenset({"image", "text tower"}), training=TrainingTraits(memory=frozenset({"experts", "is expert"}))
    )
    loss, update_many, adapt = parts.cross_entropy, update_sequentially, parts.no_adaptation
