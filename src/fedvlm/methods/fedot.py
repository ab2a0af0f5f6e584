"""A shared head over features that every client turns by its own orthogonal map, kept at home.

The server and clients it has not seen use the identity; FedOT(+B) is more than one block.
Kong, Yeom, Jeon, Kim, Generalized and personalized federated learning with foundation models via
orthogonal transformations, 2025.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedvlm import parts, tensors
from fedvlm.core import Client, Frozen, Method, Tensors, TrainingTraits, register
from fedvlm.maths import orthogonal
from fedvlm.methods._heads import head_traits, initial_head


@register
@dataclass(frozen=True)
class FedOT:
    blocks: int | Literal["auto"] = 1  # r, any divisor of d; "auto": each client's own choice
    tau: float = 100.0  # τ; the paper does not say, CLIP's own is 100
    lr: float = 5e-5  # η of both the head and the map
    momentum: float = 5e-4  # "weight decay and momentum set to 5e-4", read literally
    weight_decay: float = 5e-4
    batch_size: int = 32  # B, after FedCLIP; the paper does not say
    local_epochs: int = 1  # E
    rounds: int = 200  # T
    head: Literal["text", "random"] = "text"  # text embeddings, or RandInit

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared = {"head": initial_head(self.head, frozen)}
        if self.blocks != "auto":
            return shared, {"skew": identity_skew(frozen.dim, self.blocks)}
        return shared, initial_candidates(frozen.dim)

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        state = {**sent, **local}  # the variants hold head and skew elsewhere
        # W (Q h) = (W Q) h: turning the few rows of the head costs less than turning those of x.
        return self.tau * x @ orthogonal.rotate(-selected_skew(state), state["head"]).mT

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        if self.blocks != "auto":
            return parts.sgd(self, frozen, sent, local, client)
        alone = Client(*(value[None] for value in vars(client).values()))
        stacked = (tensors.stack([sent]), tensors.stack([local]))
        upload, new_local = train_candidates(self, frozen, *stacked, alone, update_sequentially)
        return tensors.select(upload, 0), tensors.select(new_local, 0)

    def update_many(self, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
        """`update` of many clients at once, by exact gradients; equal to it but for rounding."""
        if self.blocks == "auto":
            return train_candidates(self, frozen, sent, local, clients, FedOT.update_many)
        sgd = orthogonal.SgdStep(self.lr, self.momentum, self.weight_decay, self.tau)
        state = {**sent, **local}
        head, skew = orthogonal.train_clients(state["head"], state["skew"], clients, sgd)
        new = {"head": head, "skew": skew}
        return {key: new[key] for key in sent}, {key: new[key] for key in local}

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        """The numbers of the paper's tables for one client's map."""
        state = {**sent, **local}
        turn = orthogonal.orthogonal(selected_skew(state))
        blocks = int(state["leader"]) if "leader" in state else len(turn)
        return {
            "blocks": blocks,
            "condition number": orthogonal.condition_number(turn),
            "orthogonality error": orthogonal.orthogonality_error(turn),
            "degrees of freedom": orthogonal.degrees_of_freedom(frozen.dim, blocks),
        }

    def condition(self, local: Tensors) -> float:
        """κ of the bound on gradient differences: 1 for every orthogonal map."""
        return 1.0

    name = "fedot"
    traits = head_traits(training=TrainingTraits(memory=frozenset({"leader", "age"})))
    loss = parts.cross_entropy
    send, aggregate, adapt = parts.send_all, parts.uniform_mean, parts.no_adaptation


MAX_STANDARD_ERRORS = 1.0  # standard errors
Train = Callable[[Any, Frozen, Tensors, Tensors, Client], tuple[Tensors, Tensors]]


def identity_skew(dim: int, blocks: int) -> Tensor:
    """The skew of the identity: X = I has no skew part."""
    size = orthogonal.block_size(dim, blocks)
    return torch.zeros(blocks, size, size)


def candidate_blocks(dim: int) -> list[int]:
    """1, 8 and 64, as far as they divide the dimension and leave more than the identity.

    Three, because they are trained side by side, for less than twice the cost of one block.
    """
    return [1] + [r for r in (8, 64) if dim % r == 0 and r < dim]


def skew_key(blocks: int) -> str:
    return f"skew{blocks}"


def initial_candidates(dim: int) -> Tensors:
    """The local tensors of a client that has seen nothing: the identity, in every lane."""
    skews = {skew_key(r): identity_skew(dim, r) for r in candidate_blocks(dim)}
    return {**skews, "leader": torch.tensor(1), "age": torch.tensor(0)}


def selected_skew(state: Tensors) -> Tensor:
    """(..., r, m, m): the skew of the map in use; that of the leader as one dense block."""
    if "skew" in state:
        return state["skew"]
    leader = state["leader"][..., None, None, None]
    skews = [value for key, value in state.items() if key.startswith("skew")]
    dense_skews = [torch.where(leader == skew.shape[-3], orthogonal.dense(skew), 0) for skew in skews]
    return torch.stack(dense_skews).sum(0)


def train_candidates(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client, train: Train
) -> tuple[Tensors, Tensors]:
    """The update of stacked clients that each look for their own number of blocks.

    In two thirds of its rounds a client trains a map of every candidate, each with its own
    copy of the head it was sent; the one its validation rows choose leads: its head is uploaded,
    its map is used. Thereafter only the last leader is trained. A client without validation rows
    stays with one block.
    """
    is_searching = local["age"] < max(1, 2 * self.rounds // 3)
    new, block_counts = {**local, "age": local["age"] + 1}, candidate_blocks(frozen.dim)
    heads = sent["head"].repeat(len(block_counts), *[1] * sent["head"].ndim)
    losses, misses = torch.full((2, len(block_counts), *clients.val_y.shape), torch.inf)
    for number, r in enumerate(block_counts):
        members = (is_searching | (local["leader"] == r)).nonzero()[:, 0]
        if not len(members):
            continue
        chunk = Client(*(value[members] for value in vars(clients).values()))
        method, skew = replace(self, blocks=r), {"skew": local[skew_key(r)][members]}
        upload, new_local = train(method, frozen, {"head": sent["head"][members]}, skew, chunk)
        new[skew_key(r)] = new[skew_key(r)].index_copy(0, members, new_local["skew"])
        heads[number, members] = upload["head"]
        if is_searching.any():
            logits = method.predict(frozen, upload, new_local, chunk.val_x)
            losses[number, members] = sample_losses(logits, chunk.val_y).to(losses.dtype)
            misses[number, members] = (logits.argmax(-1) != chunk.val_y).to(losses.dtype)
    judged = is_searching & (clients.val_y >= 0).any(1)
    places = torch.tensor(block_counts)
    first = (places == local["leader"][:, None]).int().argmax(1)
    place = torch.where(judged, select_candidate(losses, misses, clients.val_y >= 0), first)
    head = heads[place, torch.arange(len(place))]
    return {"head": head}, {**new, "leader": places[place].to(local["leader"])}


def select_candidate(losses: Tensor, misses: Tensor, real: Tensor) -> Tensor:
    """(clients,): of (candidates, clients, rows) the last that is not clearly worse than any.

    It is worse by neither measure: a map of many freedoms that is right more often may lose by
    the few rows that it is sure of and has wrong, and one that misses no more may do so by chance.
    Where no map stands both tests, the one with the fewest misses is taken.
    """
    broken = losses.isnan()
    misses = torch.where(broken, 1.0, misses)
    losses = losses.masked_fill(broken, torch.inf)
    good = is_near_best(losses, real) & is_near_best(misses, real)
    fewest_misses = torch.where(real, misses, 0.0).sum(-1).argmin(0)
    last = len(good) - 1 - good.flip(0).int().argmax(0)
    return torch.where(good.any(0), last, fewest_misses)


def is_near_best(measure: Tensor, real: Tensor) -> Tensor:
    """(candidates, clients): whose mean is within DOUBT standard errors of the least, paired."""
    count = real.sum(1).clamp(min=1)
    measure = torch.where(real, measure, 0.0)
    best = measure.sum(-1).argmin(0)
    difference = measure - measure[best, torch.arange(len(best))]
    gap = difference.sum(-1) / count
    spread = torch.where(real, (difference - gap[..., None]).square(), 0.0).sum(-1)
    error = (spread / (count - 1).clamp(min=1) / count).sqrt().nan_to_num(nan=0.0)
    return gap <= MAX_STANDARD_ERRORS * error


def update_sequentially(
    method: Method, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """The plain update of stacked clients."""
    done = []
    for i in range(len(clients.y)):
        client = Client(*(value[i] for value in vars(clients).values()))
        client_state = (tensors.select(sent, i), tensors.select(local, i))
        done.append(method.update(frozen, *client_state, client))
    return tensors.stack([upload for upload, _ in done]), tensors.stack([new_local for _, new_local in done])


def sample_losses(logits: Tensor, y: Tensor) -> Tensor:
    """(clients, rows): the cross-entropy of every row; padding has one of no meaning."""
    return cross_entropy(logits.mT, y.clamp(min=0), reduction="none")
