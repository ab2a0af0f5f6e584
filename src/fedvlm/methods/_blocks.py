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

DOUBT = 1.0  # standard errors
Train = Callable[[Any, Frozen, Tensors, Tensors, Client], tuple[Tensors, Tensors]]


def identity(dim: int, blocks: int) -> Tensor:
    """The skew of the identity: X = I has no skew part."""
    size = cayley.block_size(dim, blocks)
    return torch.zeros(blocks, size, size)


def candidates(dim: int) -> list[int]:
    """1, 8 and 64, as far as they divide the dimension and leave more than the identity.

    Three, because they are trained side by side, for less than twice the cost of one block.
    """
    return [1] + [r for r in (8, 64) if dim % r == 0 and r < dim]


def lane(blocks: int) -> str:
    return f"skew{blocks}"


def first_lanes(dim: int) -> Tensors:
    """The local tensors of a client that has seen nothing: the identity, in every lane."""
    lanes = {lane(r): identity(dim, r) for r in candidates(dim)}
    return {**lanes, "leader": torch.tensor(1), "age": torch.tensor(0)}


def chosen(every: Tensors) -> Tensor:
    """(..., r, m, m): the skew of the map in use; that of the leader as one dense block."""
    if "skew" in every:
        return every["skew"]
    leader = every["leader"][..., None, None, None]
    lanes = [value for key, value in every.items() if key.startswith("skew")]
    ours = [torch.where(leader == one.shape[-3], cayley.dense(one), 0) for one in lanes]
    return torch.stack(ours).sum(0)


def race(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client, train: Train
) -> tuple[Tensors, Tensors]:
    """The update of stacked clients that each look for their own number of blocks.

    In two thirds of its rounds a client trains a map of every candidate, each with its own
    copy of the head it was sent; the one its validation rows choose leads: its head is uploaded,
    its map is used. Thereafter only the last leader is trained. A client without validation rows
    stays with one block.
    """
    racing = local["age"] < max(1, 2 * self.rounds // 3)
    new, many = {**local, "age": local["age"] + 1}, candidates(frozen.dim)
    heads = sent["head"].repeat(len(many), *[1] * sent["head"].ndim)
    losses, misses = torch.full((2, len(many), *clients.held_y.shape), torch.inf)
    for number, r in enumerate(many):
        who = (racing | (local["leader"] == r)).nonzero()[:, 0]
        if not len(who):
            continue
        some = Client(*(value[who] for value in vars(clients).values()))
        method, skew = replace(self, blocks=r), {"skew": local[lane(r)][who]}
        upload, own = train(method, frozen, {"head": sent["head"][who]}, skew, some)
        new[lane(r)] = new[lane(r)].index_copy(0, who, own["skew"])
        heads[number, who] = upload["head"]
        if racing.any():
            logits = method.predict(frozen, upload, own, some.held_x)
            losses[number, who] = row_losses(logits, some.held_y).to(losses.dtype)
            misses[number, who] = (logits.argmax(-1) != some.held_y).to(losses.dtype)
    judged = racing & (clients.held_y >= 0).any(1)
    places = torch.tensor(many)
    first = (places == local["leader"][:, None]).int().argmax(1)
    place = torch.where(judged, elect(losses, misses, clients.held_y >= 0), first)
    head = heads[place, torch.arange(len(place))]
    return {"head": head}, {**new, "leader": places[place].to(local["leader"])}


def elect(losses: Tensor, misses: Tensor, real: Tensor) -> Tensor:
    """(clients,): of (candidates, clients, rows) the last that is not clearly worse than any.

    It is worse by neither measure: a map of many freedoms that is right more often may lose by
    the few rows that it is sure of and has wrong, and one that misses no more may do so by chance.
    Where no map stands both tests, the one with the fewest misses is taken.
    """
    broken = losses.isnan()
    misses = torch.where(broken, 1.0, misses)
    losses = losses.masked_fill(broken, torch.inf)
    good = level(losses, real) & level(misses, real)
    fewest = torch.where(real, misses, 0.0).sum(-1).argmin(0)
    last = len(good) - 1 - good.flip(0).int().argmax(0)
    return torch.where(good.any(0), last, fewest)


def level(worth: Tensor, real: Tensor) -> Tensor:
    """(candidates, clients): whose mean is within DOUBT standard errors of the least, paired."""
    count = real.sum(1).clamp(min=1)
    worth = torch.where(real, worth, 0.0)
    least = worth.sum(-1).argmin(0)
    apart = worth - worth[least, torch.arange(len(least))]
    gap = apart.sum(-1) / count
    spread = torch.where(real, (apart - gap[..., None]).square(), 0.0).sum(-1)
    error = (spread / (count - 1).clamp(min=1) / count).sqrt().nan_to_num(nan=0.0)
    return gap <= DOUBT * error


def one_by_one(
    method: Method, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client
) -> tuple[Tensors, Tensors]:
    """The plain update of stacked clients."""
    done = []
    for i in range(len(clients.y)):
        client = Client(*(value[i] for value in vars(clients).values()))
        both = (tensors.select(sent, i), tensors.select(local, i))
        done.append(method.update(frozen, *both, client))
    return tensors.stack([upload for upload, _ in done]), tensors.stack([own for _, own in done])


def row_losses(logits: Tensor, y: Tensor) -> Tensor:
    """(clients, rows): the cross-entropy of every row; padding has one of no meaning."""
    return cross_entropy(logits.mT, y.clamp(min=0), reduction="none")
