"""A shared head over features that every client turns by its own orthogonal map, kept at home.

The server and clients it has not seen use the identity; FedOT(+B) is more than one block.
Kong, Yeom, Jeon, Kim, Generalized and personalized federated learning with foundation models via
orthogonal transformations, 2025.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedvlm import parts, tensors
from fedvlm.core import Client, Frozen, Tensors, register
from fedvlm.maths import cayley, cayley_steps
from fedvlm.methods._blocks import (
    identity_skew,
    initial_candidates,
    selected_skew,
    train_candidates,
    update_sequentially,
)
from fedvlm.methods._head import head_traits, initial_head


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
        return self.tau * x @ cayley.rotate(-selected_skew(state), state["head"]).mT

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
        sgd = cayley_steps.SgdStep(self.lr, self.momentum, self.weight_decay, self.tau)
        state = {**sent, **local}
        head, skew = cayley_steps.train_clients(state["head"], state["skew"], clients, sgd)
        new = {"head": head, "skew": skew}
        return {key: new[key] for key in sent}, {key: new[key] for key in local}

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        """The numbers of the paper's tables for one client's map."""
        state = {**sent, **local}
        turn = cayley.orthogonal(selected_skew(state))
        blocks = int(state["leader"]) if "leader" in state else len(turn)
        return {
            "blocks": blocks,
            "condition number": cayley.condition_number(turn),
            "orthogonality error": cayley.orthogonality_error(turn),
            "degrees of freedom": cayley.degrees_of_freedom(frozen.dim, blocks),
        }

    def condition(self, local: Tensors) -> float:
        """κ of the bound on gradient differences: 1 for every orthogonal map."""
        return 1.0

    name = "fedot"
    traits = head_traits(memory=frozenset({"leader", "age"}))
    loss = parts.cross_entropy
    send, aggregate, adapt = parts.send_all, parts.uniform_mean, parts.no_adaptation
