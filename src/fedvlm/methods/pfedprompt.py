"""pFedPrompt: an averaged prompt, and a cache of each client's own features beside it.

The paper has neither code nor formulas, so this is in its style only: PromptFL, and after the last round a cache of the
client's training features that votes for the labels of those nearest to an image, as in Tip-Adapter. Guo et al.,
pFedPrompt: Learning personalized prompt for vision-language models in federated learning, WWW 2023; Zhang et al.,
Tip-Adapter, ECCV 2022.
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedvlm import parts
from fedvlm.core import Batch, ClassTraits, Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.methods._prompts import sgd_stacked
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods.promptfl import PromptFL

WEIGHTS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # a, as fractions of the logit scale
SHARPNESS = (1.0, 3.0, 10.0, 30.0, 100.0)  # b


@register
@dataclass(frozen=True)
class PFedPrompt(PromptSettings):
    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        shared, _ = PromptFL(n_ctx=self.n_ctx, ctx_init=self.ctx_init).init(frozen)
        empty = {"features": torch.zeros(0, frozen.dim), "labels": torch.zeros(0, dtype=torch.long)}
        return shared, {**empty, "weight": torch.tensor(0.0), "sharpness": torch.tensor(1.0)}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        votes = cache_votes(frozen, local, x @ local["features"].mT, local["sharpness"])
        return PromptFL.predict(PromptFL(), frozen, sent, {}, x) + local["weight"] * votes

    def loss(self, frozen: Frozen, shared: Tensors, local: Tensors, batch: Batch, start: Tensors) -> Tensor:
        return PromptFL.loss(PromptFL(), frozen, shared, {}, batch, start)

    def adapt(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
        """Fill the cache, and choose the a and b of least loss on validation samples.

        Without validation samples, each training sample is classified by the others.
        """
        is_real = client.y >= 0
        cache = {**local, "features": client.x[is_real].float(), "labels": client.y[is_real]}
        is_val = client.val_y >= 0
        x, y = client.val_x[is_val].float(), client.val_y[is_val]
        similarity = x @ cache["features"].mT
        if not len(y):
            x, y = cache["features"], cache["labels"]
            similarity = (x @ x.mT).fill_diagonal_(-torch.inf)  # a sample does not vote for itself
        plain = PromptFL.predict(PromptFL(), frozen, sent, {}, x)
        best_loss = torch.tensor(torch.inf)
        for part, b in product(WEIGHTS, SHARPNESS):
            a, sharp = torch.tensor(part * frozen.scale), torch.tensor(b)
            loss = cross_entropy(plain + a * cache_votes(frozen, cache, similarity, sharp), y)
            if loss < best_loss:  # of equals the first, which has the least weight
                best_loss, cache = loss, {**cache, "weight": a, "sharpness": sharp}
        return cache

    name = "pfedprompt"
    traits = Traits(
        needs=frozenset({"image", "text tower"}),
        training=TrainingTraits(memory=frozenset({"features", "labels", "weight", "sharpness"})),
        classes=ClassTraits(fixed=True),
    )
    send, update, aggregate = parts.send_all, parts.sgd, parts.mean
    update_many = sgd_stacked


def cache_votes(frozen: Frozen, cache: Tensors, similarity: Tensor, sharpness: Tensor) -> Tensor:
    """Return (samples, classes): exp(-b (1 - f Fᵀ)) Y, from the cosines of samples with the cache."""
    is_class = cache["labels"][:, None] == torch.arange(len(frozen.classes))
    return torch.exp(sharpness * (similarity - 1)) @ is_class.to(similarity.dtype)
