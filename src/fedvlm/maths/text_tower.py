"""Encode prompts: class features from learned context vectors, through a frozen causal text transformer.

A prompt is [SOS][context][class name and the rest of the template][EOT] and its feature is read at EOT. Attention is
causal, so SOS and context are the same for every class: they are encoded once, and each class's suffix attends to their
keys and values. Tokens behind EOT do not affect it and are not computed. Both are exact. The attention is our own code
because it has to be causal whatever the library's backend does, and has to pass through torch.func.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.nn.functional import gelu, layer_norm, linear, normalize, silu

from fedvlm.errors import SettingsError

MAX_CACHED_PROMPTS = 32  # whose features a tower keeps: those of the clients of a round
MAX_CACHE_BYTES = 64 << 20  # CoCoOp has a prompt for every image
QUICK_GELU_SCALE = 1.702  # of CLIP's quick GELU
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": lambda x: x * torch.sigmoid(QUICK_GELU_SCALE * x),
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
}


class Affine(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class Layer(NamedTuple):
    """One pre-norm transformer layer."""

    norm1: Affine
    qkv: Affine  # (3 * width, width): queries, keys, values
    out: Affine
    norm2: Affine
    up: Affine
    down: Affine


@dataclass(frozen=True)
class TextTower:
    """Turn context vectors into class features, for a fixed list of classes; nothing in it is trained."""

    start: Tensor  # (width,) embedding of SOS
    template: str  # the sentence around a class name
    prefix: Tensor  # (tokens, width) its tokens before the name: an initial context
    suffixes: Tensor  # (classes, longest, width) embeddings of [class name and the rest][EOT], padded
    ends: Tensor  # (classes,) where EOT is in the suffix
    positions: Tensor  # (length, width)
    layers: tuple[Layer, ...]
    final: Affine  # the last layer norm
    projection: Tensor  # (dim, width)
    heads: int
    eps: float
    activation: str  # a key of ACTIVATIONS
    cache: dict[bytes, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def width(self) -> int:
        return self.start.shape[-1]

    @property
    def room(self) -> int:
        """Return how many context vectors fit before the longest class name."""
        return self.positions.shape[0] - 1 - self.suffixes.shape[1]

    def __call__(self, context: Tensor) -> Tensor:
        """Encode (..., vectors, width) to (..., classes, dim) of unit norm; leading axes are more prompts.

        A prompt that is not being trained is encoded once and cached, for all clients and minibatches.
        """
        if context.requires_grad or peek_interpreter_stack() is not None:  # in vmap or grad
            return self.encode(context)
        exact = f"{context.dtype} {tuple(context.shape)}".encode()
        key = sha256(exact + context.contiguous().view(torch.uint8).cpu().numpy().tobytes()).digest()
        features = self.cache.get(key)
        if features is None:
            features = self.encode(context)
            self._store(key, features)
        return features

    def _store(self, key: bytes, features: Tensor) -> None:
        """Add to the cache, and drop the oldest entries if it is full."""
        held = sum(cached_features.nbytes for cached_features in self.cache.values()) + features.nbytes
        while self.cache and (len(self.cache) >= MAX_CACHED_PROMPTS or held > MAX_CACHE_BYTES):
            held -= self.cache.pop(next(iter(self.cache))).nbytes
        self.cache[key] = features

    def encode(self, context: Tensor) -> Tensor:
        """Compute the features of a prompt."""
        *batch_shape, vectors, width = context.shape
        if width != self.width:
            raise SettingsError(f"context vectors have width {width}; the text tower needs {self.width}")
        if vectors > self.room:
            problem = f"a context of {vectors} vectors does not fit before the longest class name"
            room = f"the text tower has room for {max(self.room, 0)}"
            raise SettingsError(f"{problem}; {room}: use fewer or shorten the names")
        classes, longest, _ = self.suffixes.shape
        head = 1 + vectors
        token_indices, spread, ends = self._tokens
        tail = (self.suffixes + self.positions[head : head + longest]).flatten(0, 1)[token_indices]
        sos = (self.start + self.positions[0]).expand(*batch_shape, 1, width)
        front = torch.cat([sos, context + self.positions[1:head]], dim=-2)
        # the common prefix once, then every class's suffix: (..., head + len(kept), width)
        x = torch.cat([front, tail.expand(*batch_shape, *tail.shape)], dim=-2)
        prefix = torch.arange(head, device=x.device)
        padded, packed = (torch.cat([prefix, head + indices]) for indices in (spread, token_indices))
        for layer in self.layers:
            if layer is self.layers[0]:  # suffixes are frozen: one pass for all prompts
                projected = (linear(self._norm(part, layer.norm1), *layer.qkv) for part in (front, tail))
                qkv = torch.cat([next(projected), next(projected).expand(*batch_shape, -1, -1)], dim=-2)
            else:
                qkv = linear(self._norm(x, layer.norm1), *layer.qkv)
            # classes are padded to one length for the attention only
            q, k, v = self._heads(qkv.index_select(-2, padded))
            if layer is self.layers[-1]:  # after its attention only EOT is needed
                x, packed = x.index_select(-2, head + ends), head + token_indices[ends]
            attended = attend_causally(q, k, v, head, classes).index_select(-2, packed)
            x = x + linear(attended.transpose(-2, -3).flatten(-2), *layer.out)
            x = x + self._feed_forward(self._norm(x, layer.norm2), layer)
        return normalize(linear(self._norm(x, self.final), self.projection), dim=-1)

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices that pack all suffixes without their padding.

        Which of (classes * longest) padded tokens are kept; which kept token is at each padded position (EOT for
        padding); and where each class has its EOT.
        """
        at = torch.arange(self.suffixes.shape[1], device=self.ends.device)
        last = self.ends[:, None]
        ends = (self.ends + 1).cumsum(0) - 1
        token_indices = (at <= last).flatten().nonzero()[:, 0]
        return token_indices, (ends[:, None] - last + torch.minimum(at, last)).flatten(), ends

    def _norm(self, x: Tensor, by: Affine) -> Tensor:
        return layer_norm(x, (x.shape[-1],), by.weight, by.bias, self.eps)

    def _feed_forward(self, x: Tensor, layer: Layer) -> Tensor:
        if self.activation != "quick_gelu":
            return linear(ACTIVATIONS[self.activation](linear(x, *layer.up)), *layer.down)
        # x σ(1.702 x) is silu(1.702 x) / 1.702: one kernel each way, and the products scale it
        wide = silu(scaled_linear(QUICK_GELU_SCALE, x, layer.up, QUICK_GELU_SCALE))
        return scaled_linear(1 / QUICK_GELU_SCALE, wide, layer.down)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Split (..., tokens, 3 * width) into queries, keys and values of (..., heads, tokens, size)."""
        parts = torch.unflatten(qkv, -1, (3, self.heads, -1))
        return parts.movedim(-4, -2).unbind(-4)


def scaled_linear(alpha: float, x: Tensor, by: Affine, beta: float = 1.0) -> Tensor:
    """Return alpha times x W^T plus beta times the bias."""
    bias = x.new_zeros(()) if by.bias is None else by.bias
    out = torch.addmm(bias, x.flatten(0, -2), by.weight.mT, beta=beta, alpha=alpha)
    return out.reshape(*x.shape[:-1], -1)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, head: int, classes: int) -> Tensor:
    """Apply causal attention in which each class's suffix sees the common prefix and itself."""
    q = q * q.shape[-1] ** -0.5
    (q1, q2), (k1, k2), (v1, v2) = (part.tensor_split([head], dim=-2) for part in (q, k, v))
    prefix = mask_later_tokens(q1 @ k1.mT).softmax(dim=-1) @ v1
    q3, k3, v3 = (torch.unflatten(part, -2, (classes, -1)) for part in (q2, k2, v2))
    suffix_scores = mask_later_tokens(q3 @ k3.mT).flatten(-3, -2)
    on_prefix, on_suffix = torch.cat([q2 @ k1.mT, suffix_scores], dim=-1).softmax(dim=-1).tensor_split([head], dim=-1)
    suffix = on_prefix @ v1 + (torch.unflatten(on_suffix, -2, (classes, -1)) @ v3).flatten(-3, -2)
    return torch.cat([prefix, suffix], dim=-2)


def mask_later_tokens(scores: Tensor) -> Tensor:
    """Return (..., tokens, tokens) scores with minus infinity for later tokens."""
    is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(is_later, -torch.inf)


def suffixes(tokens: Sequence[Sequence[int]], end: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return `TextTower.suffixes` and `.ends` of token ids; padding repeats EOT."""
    ends = [len(ids) for ids in tokens]
    longest = max(ends) + 1
    rows = [[*ids, *[end] * (longest - len(ids))] for ids in tokens]
    ids = torch.tensor(rows, device=table.device)
    return table[ids], torch.tensor(ends, device=table.device)


def count_common_prefix(token_lists: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens all lists share."""
    columns = zip(*token_lists, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
