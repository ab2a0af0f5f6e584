"""How a FedOT client finds its own number of blocks (`blocks = "auto"`) on its validation rows.

The FedOT paper picks r per data set by hand: 256, 1, 1, 4 and 16.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedvlm import tensors
from fedvlm.core import Client, Frozen, Method, Tensors
from fedvlm.maths import cayley

MAX_STANDARD_ERRORS = 1.0  # standard errors
Train = Callable[[Any, Frozen, Tensors, Tensors, Client], tuple[Tensors, Tensors]]


def identity_skew(dim: int, blocks: int) -> Tensor:
    """The skew of the identity: X = I has no skew part."""
    size = cayley.block_size(dim, blocks)
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
    dense_skews = [torch.where(leader == skew.shape[-3], cayley.dense(skew), 0) for skew in skews]
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
