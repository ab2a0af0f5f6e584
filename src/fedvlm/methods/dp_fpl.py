"""A shared plus a local prompt, trained by clipped and noisy gradients whose ε is counted.

Both prompts see noise: gradients of the shared prompt are taken at their sum, so a local prompt
that knows an image exactly would tell of it through every upload. The local prompt's gradient
travels on low-rank factors, which need less noise. Tran et al., Privacy-preserving personalized
federated prompt learning for multimodal large language models (DP-FPL), ICLR 2025.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vjp, vmap

from fedvlm import parts, seeds
from fedvlm.core import Batch, Client, Frozen, Tensors, TrainingTraits, Traits, register
from fedvlm.core.schema import COUNT, OPEN_FRACTION, POSITIVE, check_ranges, ranged_field
from fedvlm.maths.privacy import add_noise_to_all, clipped_sum, epsilon, orthonormal_factors, project_gradient
from fedvlm.methods._prompts import Start, class_features, initial_prompt, prompt_length, tower_of
from fedvlm.methods.fedot import update_sequentially
from fedvlm.methods.promptfl import PromptFL


@register
@dataclass(frozen=True)
class DPFPL:
    noise_multiplier: float = 8.0  # σ: the noise in a sum of gradients, as a multiple of clip
    # C: the most that one row adds to a sum, over all that is trained
    clip: float = ranged_field(10.0, POSITIVE)
    delta: float = ranged_field(1e-5, OPEN_FRACTION)  # δ at which ε is told
    rank: int = ranged_field(8, COUNT)  # of the local prompt's factors; at most as many as its vectors
    n_ctx: int | None = None  # M: 16, or the template's
    ctx_init: Start = "random"  # or the template's words
    lr: float = 1e-3  # η
    batch_size: int = 32  # B
    local_epochs: int = 1  # E
    rounds: int = 100  # T

    def __post_init__(self) -> None:
        check_ranges("dp-fpl", self)
        epsilon(self.noise_multiplier, 0, 1.0, self.delta)  # refuses a delta without meaning

    def init(self, frozen: Frozen) -> tuple[Tensors, Tensors]:
        epsilon(self.noise_multiplier, 1, 1.0, self.delta)  # a missing library is found now
        prompt, local_prompt = initial_prompt(self, frozen), initial_prompt(self, frozen, "local prompt")
        if self.ctx_init == "template":  # half of it each: it is their sum that is read
            prompt, local_prompt = prompt / 2, local_prompt / 2
        counts = {"noisy steps": torch.tensor(0), "passes": torch.tensor(0)}
        return {"prompt": prompt}, {"own": local_prompt, **counts}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x: Tensor) -> Tensor:
        summed = {"prompt": sent["prompt"] + local["own"]}
        return PromptFL.predict(PromptFL(), frozen, summed, {}, x)

    def update(self, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
        prompt, local_prompt, steps = sent["prompt"], local["own"], local["noisy steps"]
        rank = min(self.rank, *local_prompt.shape)
        draw = seeds.numbers("factors", frozen.seed).standard_normal((local_prompt.shape[1], rank))
        first = torch.from_numpy(draw).to(local_prompt)
        for step in range(client.order.shape[0]):
            batch = parts.minibatch(client, step)
            left_factor, right_factor = orthonormal_factors(local_prompt, first)
            rest = local_prompt - left_factor @ right_factor  # a constant: the factors only carry the gradient
            moves = {"prompt": prompt, "left": left_factor, "right": right_factor}
            gradients = sample_gradients(frozen, moves, rest, batch)
            total = clipped_sum(gradients, self.clip, batch.real)
            total = add_noise_to_all(total, self.noise_multiplier * self.clip, client.noise[step])
            # divided by B and not by the rows that are there, whose number would tell of a row
            step_size = torch.where(batch.real.any(), self.lr / self.batch_size, 0.0)
            prompt = prompt - step_size * total["prompt"]
            local_prompt = local_prompt - step_size * project_gradient(
                left_factor, right_factor, total["left"], total["right"]
            )
            steps = steps + batch.real.any()
        passes = local["passes"] + self.local_epochs * (client.order >= 0).any()
        return {"prompt": prompt}, {"own": local_prompt, "noisy steps": steps, "passes": passes}

    def noise(self, frozen: Frozen) -> int:
        """How many numbers of noise a step takes: for the shared prompt and the two factors."""
        vectors, width = prompt_length(self, frozen), tower_of(frozen).width
        rank = min(self.rank, vectors, width)
        return vectors * width + rank * (vectors + width)

    def describe(self, frozen: Frozen, sent: Tensors, local: Tensors) -> dict[str, float]:
        """What a client's images have paid; a row is in one noisy step of each pass."""
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
    update_many = update_sequentially  # stacked clients would hold the gradients of all their rows at once


def sample_gradients(frozen: Frozen, moves: Tensors, rest: Tensor, batch: Batch) -> Tensors:
    """(rows, ...): what each row alone asks of the shared prompt and of the two factors.

    Class features are computed once; each row has its own cotangent of them.
    """

    def features(moves: Tensors) -> Tensor:
        return class_features(frozen, moves["prompt"] + moves["left"] @ moves["right"] + rest)

    text, pull = vjp(features, moves)[:2]
    chances = (frozen.scale * batch.x @ text.mT).softmax(dim=-1)
    wrong = chances - (batch.y[:, None] == torch.arange(len(frozen.classes))).to(chances.dtype)
    cotangents = frozen.scale * wrong[:, :, None] * batch.x[:, None, :]  # of the cross-entropy
    gradients: Tensors = vmap(pull)(cotangents)[0]
    return gradients
