"""DP-FPL: the sum of a shared and a local prompt, trained by clipped and noisy gradients whose ε is counted.

Both prompts get noise: gradients of the shared prompt are taken at their sum, so an exact local prompt would leak
images through every upload. The gradient of the local prompt is taken on low-rank factors, which need less noise. Tran
et al., Privacy-preserving personalized federated prompt learning for multimodal large language models, ICLR 2025.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vjp, vmap

from fedvlm import parts, seeds
from fedvlm.core import Batch, Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.core.schema import COUNT, OPEN_FRACTION, POSITIVE, ranged_field
from fedvlm.maths.privacy import add_noise_to_all, clipped_sum, epsilon, orthonormal_factors, project_gradient
from fedvlm.methods._prompts import class_features, initial_prompt, prompt_length, prompt_logits, tower_of
from fedvlm.methods._settings import ContextSettings
from fedvlm.methods._stacking import update_sequentially


@register
@dataclass(frozen=True)
class DPFPL(ContextSettings):
    noise_multiplier: float = 8.0  # σ: std of the noise in a sum of gradients, as a multiple of clip
    clip: float = ranged_field(10.0, POSITIVE)  # C: norm to which the gradient of a sample is clipped
    delta: float = ranged_field(1e-5, OPEN_FRACTION)  # δ at which ε is reported
    rank: int = ranged_field(8, COUNT)  # of the local prompt's factors, at most n_ctx
    lr: float = 1e-3  # η
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 100  # T

    def __post_init__(self) -> None:
        super().__post_init__()
        epsilon(self.noise_multiplier, 0, 1.0, self.delta)  # refuses a delta that is not one

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        epsilon(self.noise_multiplier, 1, 1.0, self.delta)  # fails now if the library is missing
        prompt, local_prompt = initial_prompt(self, frozen), initial_prompt(self, frozen, "local prompt")
        if self.ctx_init == "template":  # half each, because the prompt is their sum
            prompt, local_prompt = prompt / 2, local_prompt / 2
        counts = {"noisy steps": torch.tensor(0), "passes": torch.tensor(0)}
        return {"prompt": prompt}, {"local prompt": local_prompt, **counts}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        return prompt_logits(frozen, sent["prompt"] + local["local prompt"], x)

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        prompt, local_prompt, steps = sent["prompt"], local["local prompt"], local["noisy steps"]
        rank = min(self.rank, *local_prompt.shape)
        draw = seeds.numbers("factors", frozen.seed).standard_normal((local_prompt.shape[1], rank))
        first = torch.from_numpy(draw).to(local_prompt)
        for step in range(client.order.shape[0]):
            batch = parts.minibatch(client, step)
            left, right = orthonormal_factors(local_prompt, first)
            rest = local_prompt - left @ right  # constant: only the factors are differentiated
            trained = {"prompt": prompt, "left": left, "right": right}
            gradients = sample_gradients(frozen, trained, rest, batch)
            total = clipped_sum(gradients, self.clip, batch.real)
            total = add_noise_to_all(total, self.noise_multiplier * self.clip, client.noise[step])
            # divided by B, because the number of real samples would reveal one of them
            step_size = torch.where(batch.real.any(), self.lr / self.batch_size, 0.0)
            prompt = prompt - step_size * total["prompt"]
            local_prompt = local_prompt - step_size * project_gradient(left, right, total["left"], total["right"])
            steps = steps + batch.real.any()
        passes = local["passes"] + self.local_epochs * (client.order >= 0).any()
        return {"prompt": prompt}, {"local prompt": local_prompt, "noisy steps": steps, "passes": passes}

    def noise(self, frozen: Frozen) -> int:
        """Return how many normal numbers a step takes: for the shared prompt and the two factors."""
        n_ctx, width = prompt_length(self, frozen), tower_of(frozen).width
        return n_ctx * width + min(self.rank, n_ctx, width) * (n_ctx + width)

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        """Return the privacy spent; a sample is in one noisy step of each pass."""
        steps, passes = int(local["noisy steps"]), int(local["passes"])
        out: dict[str, float] = {"noisy steps": steps, "passes": passes, "delta": self.delta}
        counts = {"epsilon": steps, "epsilon by passes": passes}
        spent = {key: epsilon(self.noise_multiplier, count, 1.0, self.delta) for key, count in counts.items()}
        return out | {key: value for key, value in spent.items() if math.isfinite(value)}

    name = "dp-fpl"
    traits = Traits(
        needs=frozenset({"image", "text tower"}), training=TrainingTraits(memory=frozenset({"noisy steps", "passes"}))
    )
    send, aggregate, adapt = parts.send_all, parts.mean, parts.no_adaptation
    update_many = update_sequentially  # stacking would hold the gradients of all samples at once


def sample_gradients(frozen: Frozen, trained: Tensors, rest: Tensor, batch: Batch) -> Tensors:
    """Return (samples, ...) gradients of the shared prompt and of the two factors, one per sample.

    Class features are computed once; each sample has its own cotangent of them.
    """

    def features(trained: Tensors) -> Tensor:
        return class_features(frozen, trained["prompt"] + trained["left"] @ trained["right"] + rest)

    text, pull_back = vjp(features, trained)[:2]
    probabilities = (frozen.scale * batch.x @ text.mT).softmax(dim=-1)
    errors = probabilities - (batch.y[:, None] == torch.arange(len(frozen.classes))).to(probabilities.dtype)
    cotangents = frozen.scale * errors[:, :, None] * batch.x[:, None, :]  # of the cross-entropy
    gradients: Tensors = vmap(pull_back)(cotangents)[0]
    return gradients
