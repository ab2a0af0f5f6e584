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
    copy of the head it was sent; the one with the least loss on the validation rows leads: its
    head is uploaded, its map is used. Thereafter only the last leader is trained. The race is
    long because short ones favoured one block in our trials; to its end it would cost twice one
    block. A client without validation rows stays with one block.
    """
    racing = local["age"] < max(1, 2 * self.rounds // 3)
    new, head = {**local, "age": local["age"] + 1}, sent["head"].clone()
    leader, least = local["leader"].clone(), torch.full(racing.shape, torch.inf)
    for r in candidates(frozen.dim):
        who = (racing | (local["leader"] == r)).nonzero()[:, 0]
        if not len(who):
            continue
        some = Client(*(value[who] for value in vars(clients).values()))
        method, skew = replace(self, blocks=r), {"skew": local[lane(r)][who]}
        upload, own = train(method, frozen, {"head": sent["head"][who]}, skew, some)
        new[lane(r)] = new[lane(r)].index_copy(0, who, own["skew"])
        loss = torch.zeros(len(who))
        if racing.any():
            logits = method.predict(frozen, upload, own, some.held_x)
            loss = held_loss(logits, some.held_y).nan_to_num(nan=torch.inf)
        better = (loss < least[who]) | least[who].isinf()
        least[who[better]], leader[who[better]] = loss[better].to(least.dtype), r
        head[who[better]] = upload["head"][better]
    return {"head": head}, {**new, "leader": leader}


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


def held_loss(logits: Tensor, y: Tensor) -> Tensor:
    """(clients,): the mean cross-entropy over each client's real rows, 0 if it has none."""
    losses = cross_entropy(logits.mT, y.clamp(min=0), reduction="none")
    real = y >= 0
    return torch.where(real, losses, 0).sum(1) / real.sum(1).clamp(min=1)
