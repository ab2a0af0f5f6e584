"""PromptFL with a prompt per client, drawn towards those of clients whose prompts are like it.

PromptFL+FedAMP of the FedOTP tables: Huang et al., Personalized cross-silo federated learning on
non-IID data, AAAI 2021. The server holds every client's prompt and sends each client its own cloud;
in the public code the attraction has the wrong sign and no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Batch, Frozen, Tensors, Traits, register
from fedvlm.core.schema import AMOUNT, POSITIVE, check_ranges, within
from fedvlm.methods._prompt import Start, sgd_together
from fedvlm.methods.promptfl_ft import PromptFLFT

HELD = "of "  # the server's name for a client's prompt: this and the client's id


@register
@dataclass(frozen=True)
class PromptFLFedAMP:
    # α_K: how much of another client's equal prompt goes into a cloud
    alpha: float = within(0.1, POSITIVE)
    # σ: squared distance at which the attraction has fallen to 1/e
    sigma: float = within(1.0, POSITIVE)
    prox_weight: float = within(0.05, AMOUNT)  # λ: of a client's prompt towards its cloud
    n_ctx: int | None = None  # M: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 1e-3  # η
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 5  # E
    rounds: int = 10  # T

    def __post_init__(self) -> None:
        check_ranges("promptfl-fedamp", self)

    def shares(self, own: Tensor, others: Sequence[Tensor]) -> Tensor:
        """(others,) ξ: what each other prompt weighs in a cloud; together at most 1."""
        far = torch.stack([(own - other).double().square().sum() for other in others])
        weight = self.alpha * torch.exp(-far / self.sigma) / self.sigma
        return weight / weight.sum().clamp(min=1)

    def send(self, shared: Tensors, id: str) -> Tensors:
        """The cloud of a client that has taken part; the mean of all for any other."""
        own = shared.get(HELD + id)
        others = [
            shared[key] for key in sorted(shared) if key.startswith(HELD) and key != HELD + id
        ]
        if own is None or not others:
            return {"prompt": shared["prompt"] if own is None else own}
        share = self.shares(own, others)
        moved = (share[:, None, None] * torch.stack([o.double() - own for o in others])).sum(0)
        return {"prompt": (own + moved).to(own.dtype)}

    def loss(
        self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors
    ) -> Tensor:
        logits = PromptFLFT.predict(PromptFLFT(), frozen, shared, local, batch.x)
        away = (shared["prompt"] - start["prompt"]).square().sum()
        return (
            parts.masked_cross_entropy(logits, batch.y, batch.real)
            + self.prox_weight / (2 * self.alpha) * away
        )

    def aggregate(
        self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]
    ) -> Tensors:
        new = {HELD + id: upload["prompt"] for id, upload in zip(ids, uploads, strict=True)}
        held = {key: value for key, value in {**shared, **new}.items() if key.startswith(HELD)}
        known = [{"prompt": held[key]} for key in sorted(held)]
        first = {"prompt": shared["prompt"]}
        return {**parts.uniform(self, first, known, torch.ones(len(known)), sorted(held)), **held}

    name = "promptfl-fedamp"
    traits = Traits(needs=frozenset({"image", "text tower"}), memory=frozenset({"offset"}))
    # A client's own model is what it makes of its last cloud, as after fine-tuning.
    init, predict, adapt = PromptFLFT.init, PromptFLFT.predict, PromptFLFT.adapt
    update = parts.sgd
    update_many = sgd_together
