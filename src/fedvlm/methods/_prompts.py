"""What prompt methods share: first prompts, class features, and stacked training.

The text tower takes prompts with leading axes, so nothing has to be vmapped: many clients' prompts
are trained with one backward pass, and a step of small prompts costs little more for several
clients than for one.
"""

from dataclasses import fields
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fedvlm import parts, seeds
from fedvlm.core import Batch, Client, Frozen, Tensors, TextTower
from fedvlm.errors import SettingsError
from fedvlm.tensors import to_float32

NUMBERS_PER_CHUNK = 1 << 19  # numbers in a layer of the tower; the backward pass keeps a few hundred as many
DEFAULT_N_CTX = 16  # vectors of a prompt in most papers
Start = Literal["random", "template"]


class Prompted(Protocol):
    """A method with a prompt's two settings."""

    @property
    def n_ctx(self) -> int | None: ...  # None: the usual number, or as many as the template has
    @property
    def ctx_init(self) -> Start: ...


def tower_of(frozen: Frozen) -> TextTower:
    if frozen.text_tower is None:
        raise SettingsError(
            "prompts are learned through the text tower, which this encoder does not offer; "
            "use a CLIP model: demo, or hf:NAME"
        )
    return frozen.text_tower


def prompt_length(method: Prompted, frozen: Frozen, default: int = DEFAULT_N_CTX) -> int:
    """The vectors of a prompt; what does not fit the tower or the template is refused."""
    tower = tower_of(frozen)
    vectors, words = method.n_ctx, len(tower.prefix)
    if method.ctx_init == "template":
        if vectors not in (None, words) or not words:
            detail = "" if vectors is None else f" and n_ctx = {vectors}"
            raise SettingsError(
                f"ctx_init = 'template'{detail}, but the template {tower.template!r} has {words} "
                "tokens before the class; leave n_ctx out, or set ctx_init = 'random'"
            )
        vectors = words
    elif vectors is None:
        vectors = default
    if vectors < 1:
        raise SettingsError(f"n_ctx = {vectors}; a prompt has 1 or more")
    if vectors > tower.room:
        longest = int(tower.ends.argmax())
        name, tokens = frozen.classes[longest], int(tower.ends[longest]) + 1
        raise SettingsError(
            f"n_ctx = {vectors}, but the text tower reads {len(tower.positions)} tokens and the "
            f"class {name!r} takes {tokens} of them, which leaves room for {max(tower.room, 0)}; "
            "use fewer vectors, or shorten the class name"
        )
    return vectors


def initial_prompt(method: Prompted, frozen: Frozen, purpose: str = "prompt", default: int = DEFAULT_N_CTX) -> Tensor:
    """(vectors, width) drawn from N(0, 0.02²), or the template's words before the class."""
    vectors, tower = prompt_length(method, frozen, default), tower_of(frozen)
    if method.ctx_init == "template":
        return tower.prefix.detach().clone()
    return 0.02 * torch.randn(vectors, tower.width, generator=seeds.generator(purpose, frozen.seed))


def class_features(frozen: Frozen, prompt: Tensor) -> Tensor:
    """(..., classes, dim) unit-norm: what the text tower makes of each class behind the prompt."""
    return tower_of(frozen)(prompt)


def features_of_pair(frozen: Frozen, first: Tensor, second: Tensor) -> Tensor:
    """(..., 2, classes, dim): of two prompts of one length, at once where both are in training."""
    if first.requires_grad and second.requires_grad:
        return class_features(frozen, torch.stack([first, second], dim=-3))
    return torch.stack([class_features(frozen, first), class_features(frozen, second)], dim=-3)


def sgd_stacked(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
    """update_many: `parts.sgd` of stacked clients, for a `loss` that sums over a leading axis."""
    tower = frozen.text_tower
    assert tower is not None  # promised by `needs`
    tokens = 1 + tower.room + tower.suffixes[..., 0].numel()
    size = max(1, NUMBERS_PER_CHUNK // (2 * tokens * tower.width))
    count = clients.order.shape[0]
    done = []
    for first in range(0, count, size):
        chunk = slice(first, first + size)
        done.append(
            parts.train_minibatches(
                self,
                frozen,
                {key: value[chunk] for key, value in sent.items()},
                {key: value[chunk] for key, value in local.items()},
                Client(*(getattr(clients, part.name)[chunk] for part in fields(Client))),
                parts.per_tensor(parts.sgd_step(self)),
                eager=True,
                batches=_minibatches,
            )
        )
    joined = ({key: torch.cat([result[i][key] for result in done]) for key in done[0][i]} for i in (0, 1))
    return next(joined), next(joined)


def _minibatches(clients: Client, step: int) -> Batch:
    rows = clients.order[:, step]
    client_indices = torch.arange(len(rows))[:, None]
    sample_indices = rows.clamp(min=0)
    reference = clients.reference[:, :0]
    return Batch(
        to_float32(clients.x[client_indices, sample_indices]),
        clients.y[client_indices, sample_indices].clamp(min=0),
        rows >= 0,
        reference,
    )
