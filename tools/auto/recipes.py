"""Candidates for the mix of auto's clients: what is believed of it before validation samples are seen."""

from dataclasses import dataclass

import torch

from fedvlm.core import Client, Frozen
from fedvlm.maths.head_mixing import MixPrior, mix_client
from fedvlm.maths.logistic_regression import Head, split_head
from fedvlm.maths.unlabelled import Labelled
from fedvlm.methods._logistic import zero_shot_head


@dataclass(frozen=True)
class Recipe:
    name: str
    prior: MixPrior | None  # None: the shared head alone

    def head(self, shared: Head, client: Client, frozen: Frozen) -> Head:
        """Return the client's head."""
        if self.prior is None:
            return shared
        labelled = Labelled(client.x, client.y, client.val_x, client.val_y)
        return mix_client(shared, split_head(zero_shot_head(frozen)), labelled, client.unlabelled, self.prior).head


SHIPPED = Recipe("as shipped", MixPrior())
RECIPES = (  # from the simplest
    Recipe("shared head alone", None),
    Recipe("4 steps of the local head", MixPrior(steps=4)),
    SHIPPED,
    Recipe("local head as strong as the shared one at 64 samples", MixPrior(local_samples=64.0)),
    Recipe("start without the likelihood", MixPrior(likelihood_power=0.0)),
    Recipe("start with the full likelihood", MixPrior(likelihood_power=1.0)),
    Recipe("penalty of the local head within a factor of 10", MixPrior(log10_penalty_std=1.0)),
    Recipe("temperatures within a factor of 7", MixPrior(temperature_std=2.0)),
    Recipe("class frequencies at full weight", MixPrior(frequency_log_weight=0.0)),
    Recipe("classes equally frequent with probability 0.8", MixPrior(equal_classes=0.8)),
)


def n_correct(head: Head, x: torch.Tensor, y: torch.Tensor) -> int:
    """Return how many samples the head classifies correctly."""
    return int((head.logits(x.to(head.weight.dtype)).argmax(1) == y).sum())
