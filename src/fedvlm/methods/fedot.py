"""FedOT: a shared head over features that every client rotates by its own orthogonal map.

The server and unseen clients use the identity; FedOT(+B) has more than one block. The paper picks the number of blocks
r by hand for each data set (256, 1, 1, 4 and 16); with `blocks = "auto"` every client chooses its own by validation.
Kong, Yeom, Jeon, Kim, Generalized and personalized federated learning with foundation models via orthogonal
transformations, 2025.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedvlm import parts, tensors
from fedvlm.core import ClassTraits, Client, Frozen, Tensors, TrainingTraits, register
from fedvlm.core.schema import COUNT, ranged_field
from fedvlm.maths import orthogonal
from fedvlm.methods._heads import initial_head
from fedvlm.methods._settings import FedOTSettings, head_traits
from fedvlm.methods._stacking import select_clients, select_tensors, update_sequentially

MAX_STANDARD_ERRORS = 1.0  # by which a candidate may be worse than the best
Train = Callable[[Any, Frozen, Tensors, Tensors, Client], tuple[Tensors, Tensors]]


@register
@dataclass(frozen=True)
class FedOT(FedOTSettings):
    blocks: int | Literal["auto"] = ranged_field(1, COUNT)  # r, any divisor of d; "auto": each client chooses its own

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared = {"head": initial_head(self.head, frozen)}
        if self.blocks != "auto":
            return shared, {"skew": identity_skew(frozen.dim, self.blocks)}
        skews = {f"skew{r}": identity_skew(frozen.dim, r) for r in candidate_blocks(frozen.dim)}
        return shared, {**skews, "leader": torch.tensor(1), "age": torch.tensor(0)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        state = {**sent, **local}  # variants have head and skew in other places
        # W (Q h) = (W Q) h: rotating the head costs less than rotating x, which has more rows.
        return self.tau * x @ orthogonal.rotate(-selected_skew(state), state["head"]).mT

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        if self.blocks != "auto":
            return parts.sgd(self, frozen, sent, local, client)
        stacked = select_tensors(sent, None), select_tensors(local, None), select_clients(client, None)
        upload, new_local = train_candidates(self, frozen, *stacked, update_sequentially)
        return tensors.select(upload, 0), tensors.select(new_local, 0)

    def update_many(self, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
        """Update many clients at once, by exact gradients; equal to `update` but for rounding."""
        if self.blocks == "auto":
            return train_candidates(self, frozen, sent, local, clients, FedOT.update_many)
        if self.class_weights != "none":
            return update_sequentially(self, frozen, sent, local, clients)
        sgd = orthogonal.SgdStep(self.lr, self.momentum, self.weight_decay, self.tau)
        state = {**sent, **local}
        head, skew = orthogonal.train_clients(state["head"], state["skew"], clients, sgd)
        new = {"head": head, "skew": skew}
        return {key: new[key] for key in sent}, {key: new[key] for key in local}

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        """Return the numbers of the paper's tables for one client's map."""
        state = {**sent, **local}
        rotation = orthogonal.orthogonal(selected_skew(state))
        blocks = int(state["leader"]) if "leader" in state else len(rotation)
        return {
            "blocks": blocks,
            "condition number": orthogonal.condition_number(rotation),
            "orthogonality error": orthogonal.orthogonality_error(rotation),
            "degrees of freedom": orthogonal.degrees_of_freedom(frozen.dim, blocks),
        }

    def condition(self, local: Tensors) -> float:
        """Return κ of the bound on gradient differences: 1 for every orthogonal map."""
        return 1.0

    name = "fedot"
    traits = head_traits(
        training=TrainingTraits(memory=frozenset({"leader", "age"})), classes=ClassTraits(multi_label=True)
    )
    loss = parts.cross_entropy
    send, aggregate, adapt = parts.send_all, parts.uniform_mean, parts.no_adaptation


def identity_skew(dim: int, blocks: int) -> Tensor:
    """Return the skew part of the identity, which is 0."""
    size = orthogonal.block_size(dim, blocks)
    return torch.zeros(blocks, size, size)


def candidate_blocks(dim: int) -> list[int]:
    """Return 1, 8 and 64, as far as they divide the dimension and leave more than the identity.

    Three, because training them together costs less than twice as much as one block.
    """
    return [1] + [r for r in (8, 64) if dim % r == 0 and r < dim]


def selected_skew(state: Tensors) -> Tensor:
    """Return (..., r, m, m): the skew of the map in use; that of a selected candidate as one dense block."""
    if "skew" in state:
        return state["skew"]
    leader = state["leader"][..., None, None, None]
    skews = [value for key, value in state.items() if key.startswith("skew")]
    dense_skews = [torch.where(leader == skew.shape[-3], orthogonal.dense(skew), 0) for skew in skews]
    return torch.stack(dense_skews).sum(0)


def train_candidates(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client, train: Train
) -> tuple[Tensors, Tensors]:
    """Update stacked clients that each select their own number of blocks.

    In the first two thirds of the rounds a client trains a map of every candidate, each with its own copy of the head;
    the head of the one that is best on validation samples is uploaded. Later only the last selected one is trained. A
    client without validation samples stays with one block.
    """
    is_searching = local["age"] < max(1, 2 * self.rounds // 3)
    new, block_counts = {**local, "age": local["age"] + 1}, candidate_blocks(frozen.dim)
    heads = sent["head"].repeat(len(block_counts), *[1] * sent["head"].ndim)
    losses, misses = torch.full((2, len(block_counts), *clients.val_y.shape), torch.inf)
    for number, r in enumerate(block_counts):
        index = (is_searching | (local["leader"] == r)).nonzero()[:, 0]
        if not len(index):
            continue
        chunk = select_clients(clients, index)
        method, skew = replace(self, blocks=r), {"skew": local[f"skew{r}"][index]}
        upload, new_local = train(method, frozen, {"head": sent["head"][index]}, skew, chunk)
        new[f"skew{r}"] = new[f"skew{r}"].index_copy(0, index, new_local["skew"])
        heads[number, index] = upload["head"]
        if is_searching.any():
            logits = method.predict(frozen, upload, new_local, chunk.val_x)
            losses[number, index] = cross_entropy(logits.mT, chunk.val_y.clamp(min=0), reduction="none")
            misses[number, index] = (logits.argmax(-1) != chunk.val_y).to(losses.dtype)
    is_judged = is_searching & (clients.val_y >= 0).any(1)
    places = torch.tensor(block_counts)
    first = (places == local["leader"][:, None]).int().argmax(1)
    place = torch.where(is_judged, select_candidate(losses, misses, clients.val_y >= 0), first)
    head = heads[place, torch.arange(len(place))]
    return {"head": head}, {**new, "leader": places[place].to(local["leader"])}


def select_candidate(losses: Tensor, misses: Tensor, real: Tensor) -> Tensor:
    """Return (clients,): of (candidates, clients, samples) the last that is not significantly worse than the best.

    Both measures have to agree: a map of many degrees of freedom may have fewer errors and a larger loss, by a few
    confident errors, and equal errors may be chance. If no map passes both, the one with the fewest errors is taken.
    """
    broken = losses.isnan()
    misses = torch.where(broken, 1.0, misses)
    losses = losses.masked_fill(broken, torch.inf)
    good = is_near_best(losses, real) & is_near_best(misses, real)
    fewest_misses = torch.where(real, misses, 0.0).sum(-1).argmin(0)
    last = len(good) - 1 - good.flip(0).int().argmax(0)
    return torch.where(good.any(0), last, fewest_misses)


def is_near_best(measure: Tensor, real: Tensor) -> Tensor:
    """Return (candidates, clients): whether the mean is within MAX_STANDARD_ERRORS of the least, paired."""
    count = real.sum(1).clamp(min=1)
    measure = torch.where(real, measure, 0.0)
    best = measure.sum(-1).argmin(0)
    difference = measure - measure[best, torch.arange(len(best))]
    gap = difference.sum(-1) / count
    spread = torch.where(real, (difference - gap[..., None]).square(), 0.0).sum(-1)
    error = (spread / (count - 1).clamp(min=1) / count).sqrt().nan_to_num(nan=0.0)
    return gap <= MAX_STANDARD_ERRORS * error
