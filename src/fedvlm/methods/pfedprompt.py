"""An averaged prompt, helped at the end by what each client remembers of its own images.

The paper has neither code nor formulas, so this is a stand-in in its style: PromptFL, and after
the last round a cache of the client's training features that votes for the labels of those nearest
to an image, as in Tip-Adapter. Guo et al., pFedPrompt: Learning personalized prompt for
vision-language models in federated learning, WWW 2023; Zhang et al., Tip-Adapter, ECCV 2022.
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedvlm import parts
from fedvlm.core import Batch, ClassTraits, Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.methods._prompts import Start, sgd_stacked
from fedvlm.methods.promptfl import PromptFL

WEIGHTS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # a, as parts of the logit scale
SHARPNESS = (1.0, 3.0, 10.0, 30.0, 100.0)  # b


@register
@dataclass(frozen=True)
class PFedPrompt:
    n_ctx: int | None = None  # M: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 1e-3  # η
    momentum: float = 0.9
    weight_decay: float = 5e-4  # weight decay
    batch_size: int = 32  # B
    local_epochs: int = 5  # E
    rounds: int = 10  # T

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
        """Fills the cache, and takes the a and b of least loss on the validation rows.

        A client without validation rows asks each training row what the others say of it.
        """
        is_real = client.y >= 0
        cache = {**local, "features": client.x[is_real].float(), "labels": client.y[is_real]}
        held = client.val_y >= 0
        x, y = client.val_x[held].float(), client.val_y[held]
        similarity = x @ cache["features"].mT
        if not len(y):
            x, y = cache["features"], cache["labels"]
            similarity = (x @ x.mT).fill_diagonal_(-torch.inf)  # exp(-inf): no vote for itself
        plain = PromptFL.predict(PromptFL(), frozen, sent, {}, x)
        best_loss = torch.tensor(torch.inf)
        for part, b in product(WEIGHTS, SHARPNESS):
            a, sharp = torch.tensor(part * frozen.scale), torch.tensor(b)
            loss = cross_entropy(plain + a * cache_votes(frozen, cache, similarity, sharp), y)
            if loss < best_loss:  # the first, hence the least weight, of equals
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
    """(rows, classes): exp(-b (1 - f Fᵀ)) Y, from the cosines of the rows and the cache."""
    is_class = cache["labels"][:, None] == torch.arange(len(frozen.classes))
    return torch.exp(sharpness * (similarity - 1)) @ is_class.to(similarity.dtype)
