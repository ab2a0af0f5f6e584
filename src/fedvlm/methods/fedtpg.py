"""FedTPG: a shared network generates the prompt from the texts of the classes, so that it fits classes it has not seen.

Qiu, Li, Mummadi, Ganesh, Li, Peng, Lin, Federated text-driven prompt generation for vision-language models, ICLR 2024.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from fedvlm import parts, seeds
from fedvlm.core import Frozen, Tensors, Traits, register
from fedvlm.core.schema import COUNT, ranged_field
from fedvlm.errors import SettingsError
from fedvlm.methods._prompts import prompt_length, prompt_logits, tower_of
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods._stacking import update_sequentially
from fedvlm.methods.promptfl import PromptFL

VECTORS = 4  # M of the paper
EXPANSION = 4  # the feed-forward layer is this many times wider than a prompt


@register
@dataclass(frozen=True)
class FedTPG(PromptSettings):
    attention_heads: int = ranged_field(4, COUNT)  # of the attention of prompt vectors to class texts
    n_ctx: int | None = None  # M: 4
    lr: float = 3e-3  # η
    weight_decay: float = 1e-5
    batch_size: int = 128  # B
    local_epochs: int = 1  # E
    rounds: int = 50  # T; the paper trains until it converges

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        """Return the network, initialised as torch's modules are; nothing is local."""
        if self.ctx_init != "random":
            raise SettingsError(f"fedtpg generates its prompt; ctx_init must be 'random', got {self.ctx_init!r}")
        width, dim, draw = tower_of(frozen).width, frozen.dim, seeds.generator("prompt network", frozen.seed)
        if width % self.attention_heads:
            raise SettingsError(f"fedtpg.attention_heads must divide the width {width}, got {self.attention_heads}")

        def uniform(bound: float, *shape: int) -> Tensor:
            return bound * (2 * torch.rand(*shape, generator=draw) - 1)

        def linear_layer(name: str, fan: int, out: int) -> Tensors:
            return {f"{name} weight": uniform(fan**-0.5, out, fan), f"{name} bias": uniform(fan**-0.5, out)}

        n_ctx = prompt_length(self, frozen, VECTORS)
        network = {"queries": 0.02 * torch.randn(n_ctx, width, generator=draw)}
        for name, size in (("query norm", width), ("text norm", dim), ("output norm", width)):
            network |= {f"{name} weight": torch.ones(size), f"{name} bias": torch.zeros(size)}
        for name, fan in (("query", width), ("key", dim), ("value", dim)):  # Xavier
            network[f"{name} weight"] = uniform((6 / (fan + width)) ** 0.5, width, fan)
            network[f"{name} bias"] = torch.zeros(width)
        network["output weight"], network["output bias"] = uniform(width**-0.5, width, width), torch.zeros(width)
        network |= linear_layer("up", width, 2 * EXPANSION * width) | linear_layer("down", EXPANSION * width, width)
        return network, {}

    def generate_prompt(self, network: Tensors, text: Tensor) -> Tensor:
        """Return (vectors, width): attention of learned queries to the class texts, and a gated feed-forward layer."""

        def norm(name: str, x: Tensor) -> Tensor:
            return layer_norm(x, x.shape[-1:], network[f"{name} weight"], network[f"{name} bias"])

        def layer(name: str, x: Tensor) -> Tensor:
            return linear(x, network[f"{name} weight"], network[f"{name} bias"])

        queries, texts = norm("query norm", network["queries"]), norm("text norm", text)
        q, k, v = (
            torch.unflatten(layer(name, x), -1, (self.attention_heads, -1)).transpose(0, 1)  # (heads, rows, ...)
            for name, x in (("query", queries), ("key", texts), ("value", texts))
        )
        attention = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        prompt = layer("output", (attention @ v).transpose(0, 1).flatten(1))
        values, gates = layer("up", norm("output norm", prompt)).chunk(2, dim=-1)
        return prompt + layer("down", values * gelu(gates))

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        assert frozen.text is not None  # promised by `needs`
        return prompt_logits(frozen, self.generate_prompt(sent, frozen.text.to(x.dtype)), x)

    name = "fedtpg"
    traits = Traits(needs=frozenset({"image", "text", "text tower"}))
    loss, update_many = PromptFL.loss, update_sequentially
    send, update, aggregate, adapt = parts.send_all, parts.sgd, parts.mean, parts.no_adaptation
