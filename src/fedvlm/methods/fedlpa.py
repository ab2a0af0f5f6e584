"""FedLPA in one round: the mean of clients' prompts, weighted by their Fisher information.

FedLPA + PromptFL of the TOFA tables: Liu et al., FedLPA: One-shot federated learning with layer-wise posterior
aggregation, NeurIPS 2024. The public code takes 10,000 gradient steps towards the solution, and reports the better of
two results on the test set; here the system is solved, and there is one result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedvlm import parts
from fedvlm.core import Client, Frozen, Tensors, Traits, register
from fedvlm.core.schema import NON_NEGATIVE, ranged_field
from fedvlm.maths.fisher import sample_fisher, solve_kronecker_mean
from fedvlm.maths.gaussian_classes import pack, unpack
from fedvlm.methods._prompts import class_features
from fedvlm.methods._settings import PromptSettings
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class FedLPA(PromptSettings):
    damping: float = ranged_field(1.0, NON_NEGATIVE)  # added to a factor's diagonal, as a fraction of its mean
    iterations: int = 100  # of conjugate gradients, from the mean prompt
    local_epochs: int = 50  # E, as many as PromptFL has in all its rounds
    rounds: int = 1

    def noise(self, frozen: Frozen) -> int:
        return self.batch_size * len(frozen.classes)

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        """Return the trained prompt, and E[G'G] and E[GG'] over samples G of the Fisher information."""
        upload, new_local = parts.sgd(self, frozen, sent, local, client)
        prompt = upload["prompt"]
        n_ctx, width = prompt.shape[-2:]
        tall, wide = prompt.new_zeros(n_ctx, n_ctx), prompt.new_zeros(width, width)
        for sample in fisher_samples(frozen, prompt, client):
            tall = tall + sample @ sample.mT
            wide = wide + sample.mT @ sample
        n_samples = (client.order >= 0).sum().clamp(min=1)
        # The product of the factors has the trace of the Fisher information per sample.
        norm = (n_samples * tall.diagonal(dim1=-2, dim2=-1).sum()).clamp(min=1e-30).sqrt()
        return {**upload, "tall": pack(tall / norm), "wide": pack(wide / norm)}, new_local

    def aggregate(self, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]) -> Tensors:
        client_weights = weights.double() / weights.double().sum()
        means = [upload["prompt"].double() for upload in uploads]
        n_ctx, width = means[0].shape
        tall = [self.damped(upload["tall"], n_ctx) for upload in uploads]
        wide = [self.damped(upload["wide"], width) for upload in uploads]
        start = parts.mean(self, {"prompt": means[0]}, [{"prompt": m} for m in means], weights, ids)
        prompt = solve_kronecker_mean(means, tall, wide, client_weights, start["prompt"], self.iterations)
        return {"prompt": prompt.to(shared["prompt"].dtype)}

    def damped(self, triangle: Tensor, size: int) -> Tensor:
        square = unpack(triangle.double(), size)
        return square + self.damping * square.diagonal().mean() * torch.eye(size).double()

    name = "fedlpa"
    traits = Traits(needs=frozenset({"image", "text tower"}))
    init, predict, loss = PromptFL.init, PromptFL.predict, PromptFL.loss
    send, adapt = parts.send_all, parts.no_adaptation


def fisher_samples(frozen: Frozen, prompt: Tensor, client: Client) -> list[Tensor]:
    """Return one sample of the Fisher information at `prompt` for every minibatch of the round."""
    out, features = [], partial(class_features, frozen)
    for step in range(client.order.shape[0]):
        batch = parts.minibatch(client, step)
        signs = torch.where(client.noise[step] < 0, -1.0, 1.0).reshape(-1, len(frozen.classes))
        out.append(sample_fisher(features, prompt, batch.x, batch.real, frozen.scale, signs))
    return out
