"""One exchange: prompts are joined by how sharply each client's rows determine its own.

FedLPA + PromptFL of the TOFA tables: Liu et al., FedLPA: One-shot federated learning with
layer-wise posterior aggregation, NeurIPS 2024. The public code takes 10,000 gradient steps to the
solution and then reports the better of two on the test rows; here it is solved, and there is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, Tensors, Traits, register
from fedvlm.core.schema import NON_NEGATIVE, check_ranges, ranged_field
from fedvlm.maths.fisher import sample_fisher, solve_kronecker_mean
from fedvlm.maths.gaussian_classes import pack, unpack
from fedvlm.methods._prompts import Start, class_features
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class FedLPA:
    damping: float = ranged_field(1.0, NON_NEGATIVE)  # added to a factor's diagonal, as a share of its mean
    iterations: int = 100  # of conjugate gradients, from the mean prompt
    n_ctx: int | None = None  # M: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 1e-3  # η
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 32  # B
    local_epochs: int = 50  # E: as many as PromptFL takes in all its rounds
    rounds: int = 1

    def __post_init__(self) -> None:
        check_ranges("fedlpa", self)

    def noise(self, frozen: Frozen) -> int:
        return self.batch_size * len(frozen.classes)

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        """The trained prompt, and E[G'G] and E[GG'] over the Fisher information's samples G."""
        upload, new_local = parts.sgd(self, frozen, sent, local, client)
        prompt = upload["prompt"]
        vectors, width = prompt.shape[-2:]
        tall = prompt.new_zeros(vectors, vectors)
        wide = prompt.new_zeros(width, width)
        for sample in fisher_samples(frozen, prompt, client):
            tall = tall + sample @ sample.mT
            wide = wide + sample.mT @ sample
        rows = (client.order >= 0).sum().clamp(min=1)
        # The product of the factors has the trace of the Fisher information per row.
        norm = (rows * tall.diagonal(dim1=-2, dim2=-1).sum()).clamp(min=1e-30).sqrt()
        return {**upload, "tall": pack(tall / norm), "wide": pack(wide / norm)}, new_local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        client_weights = weights.double() / weights.double().sum()
        means = [upload["prompt"].double() for upload in uploads]
        vectors, width = means[0].shape
        tall = [self.damped(upload["tall"], vectors) for upload in uploads]
        wide = [self.damped(upload["wide"], width) for upload in uploads]
        start = parts.mean(self, {"prompt": means[0]}, [{"prompt": m} for m in means], weights, ids)
        joined = solve_kronecker_mean(means, tall, wide, client_weights, start["prompt"], self.iterations)
        return {"prompt": joined.to(shared["prompt"].dtype)}

    def damped(self, triangle: Tensor, size: int) -> Tensor:
        square = unpack(triangle.double(), size)
        return square + self.damping * square.diagonal().mean() * torch.eye(size).double()

    name = "fedlpa"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    init, predict, loss = PromptFL.init, PromptFL.predict, PromptFL.loss
    send, adapt = parts.send_all, parts.no_adaptation


def fisher_samples(frozen: Frozen, prompt: Tensor, client: Client) -> list[Tensor]:
    """One sample of the Fisher information at `prompt` for every minibatch of the round."""
    out = []
    for step in range(client.order.shape[0]):
        batch = parts.minibatch(client, step)
        signs = torch.where(client.noise[step] < 0, -1.0, 1.0)
        signs = signs.reshape(-1, len(frozen.classes))
        features = lambda context: class_features(frozen, context)  # noqa: E731
        out.append(sample_fisher(features, prompt, batch.x, batch.real, frozen.scale, signs))
    return out
