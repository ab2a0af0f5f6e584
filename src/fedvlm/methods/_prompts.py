"""What prompt methods share: initial prompts, class features, and training of stacked clients.

The text tower takes prompts with leading axes, so nothing has to be vmapped: one backward pass trains the prompts of
many clients, and a step of several small prompts costs little more than one.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedvlm import parts, seeds
from fedvlm.core import Client, Frozen, Tensors, TextTower
from fedvlm.errors import SettingsError
from fedvlm.methods._settings import ContextSettings
from fedvlm.methods._stacking import stacked_minibatch, update_in_chunks

NUMBERS_PER_CHUNK = 1 << 19  # in a layer of the tower; the backward pass keeps a few hundred times as many
DEFAULT_N_CTX = 16  # of most papers


def tower_of(frozen: Frozen) -> TextTower:
    """Return the text tower, or refuse an encoder that has none."""
    if frozen.text_tower is None:
        raise SettingsError("this encoder has no text tower, which prompts need; use a CLIP model: demo, or hf:NAME")
    return frozen.text_tower


def prompt_length(method: ContextSettings, frozen: Frozen, default: int = DEFAULT_N_CTX) -> int:
    """Return the number of context vectors; refuse one that does not fit the tower or the template."""
    tower, n_ctx = tower_of(frozen), method.n_ctx
    if method.ctx_init == "template":
        n_tokens = len(tower.prefix)
        if n_ctx not in (None, n_tokens) or not n_tokens:
            detail = "" if n_ctx is None else f" and n_ctx = {n_ctx}"
            template = f"the template {tower.template!r} has {n_tokens} tokens before the class"
            remedy = "leave n_ctx out, or set ctx_init = 'random'"
            raise SettingsError(f"ctx_init = 'template'{detail}, but {template}; {remedy}")
        n_ctx = n_tokens
    elif n_ctx is None:
        n_ctx = default
    if n_ctx > tower.room:
        longest = int(tower.ends.argmax())
        name, tokens = frozen.classes[longest], int(tower.ends[longest]) + 1
        raise SettingsError(
            f"n_ctx = {n_ctx}, but the text tower reads {len(tower.positions)} tokens and the "
            f"class {name!r} takes {tokens} of them, which leaves room for {max(tower.room, 0)}; "
            "use fewer vectors, or shorten the class name"
        )
    return n_ctx


def initial_prompt(
    method: ContextSettings, frozen: Frozen, purpose: str = "prompt", default: int = DEFAULT_N_CTX
) -> Tensor:
    """Return (vectors, width) drawn from N(0, 0.02²), or the template's words before the class."""
    n_ctx, tower = prompt_length(method, frozen, default), tower_of(frozen)
    if method.ctx_init == "template":
        return tower.prefix.detach().clone()
    return 0.02 * torch.randn(n_ctx, tower.width, generator=seeds.generator(purpose, frozen.seed))


def class_features(frozen: Frozen, prompt: Tensor) -> Tensor:
    """Return (..., classes, dim) unit-norm features of each class name behind the prompt."""
    return tower_of(frozen)(prompt)


def prompt_logits(frozen: Frozen, prompt: Tensor, x: Tensor) -> Tensor:
    """Return (..., samples, classes) logits of embeddings against the class features of a prompt."""
    return frozen.scale * x @ class_features(frozen, prompt).mT


def features_of_pair(frozen: Frozen, first: Tensor, second: Tensor) -> Tensor:
    """Return (..., 2, classes, dim) of two prompts of one length; in one pass where both are trained."""
    if first.requires_grad and second.requires_grad:
        return class_features(frozen, torch.stack([first, second], dim=-3))
    return torch.stack([class_features(frozen, first), class_features(frozen, second)], dim=-3)


def sgd_stacked(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
    """update_many: `parts.sgd` of stacked clients, for a `loss` that sums over the client axis."""
    tower = tower_of(frozen)
    tokens = 1 + tower.room + tower.suffixes[..., 0].numel()
    size = max(1, NUMBERS_PER_CHUNK // (2 * tokens * tower.width))
    move = parts.per_tensor(parts.sgd_step(self))
    train = partial(parts.train_minibatches, self, frozen, move=move, eager=True, batches=stacked_minibatch)
    return update_in_chunks(train, size, sent, local, clients)
