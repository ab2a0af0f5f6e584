"""Standard bodies a method names: `update = parts.sgd`, `aggregate = parts.mean`, ..."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedvlm.core import Batch, Client, Frozen, Tensors
from fedvlm.tensors import full

# a tensor, its gradient and what was kept from its last step -> the tensor, and what to keep
Stepper = Callable[[Tensor, Tensor, Tensors], tuple[Tensor, Tensors]]


def fit(logits: Tensor, y: Tensor, real: Tensor) -> Tensor:
    """Cross-entropy over the real rows; nothing at all where there are none."""
    losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    return torch.where(real, losses, 0.0).sum() / real.sum().clamp(min=1)


def minibatch(client: Client, step: int) -> Batch:
    rows = client.order[step]
    real = rows >= 0
    rows = rows.clamp(min=0)
    others = client.reference_order[step].clamp(min=0)
    return Batch(
        full(client.x[rows]), client.y[rows].clamp(min=0), real, full(client.reference[others])
    )


def withhold(client: Client, counts: Tensor, smallest: int) -> Client:
    """The client without the rows of classes whose `counts` are below `smallest`.

    Sums over the rows that are left say nothing of the others, and clients' sums add up to those
    over all rows that were left.
    """
    stays = (counts < smallest)[client.y.clamp(min=0)]
    return replace(client, y=torch.where(stays, -1, client.y))


def everything(self: Any, shared: Tensors, id: str) -> Tensors:
    """send: every client gets all that is shared."""
    return shared


def nothing(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> Tensors:
    """adapt: what the rounds taught is kept as it is."""
    return local


def mean(
    self: Any, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]
) -> Tensors:
    """aggregate: the mean of the uploads, each client weighing as many as it has rows."""
    share = weights.double() / weights.double().sum()
    return {
        key: sum(
            (w * upload[key].double() for w, upload in zip(share, uploads, strict=True)),
            start=torch.zeros((), dtype=torch.float64),
        ).to(value.dtype)
        for key, value in shared.items()
    }


mean.sums = "rows"  # type: ignore[attr-defined]  # a secure sum of rows · upload is all it needs


def uniform(
    self: Any, shared: Tensors, uploads: Sequence[Tensors], weights: Tensor, ids: Sequence[str]
) -> Tensors:
    """aggregate: the mean of the uploads, every client weighing the same."""
    return mean(self, shared, uploads, torch.ones_like(weights), ids)


uniform.sums = "clients"  # type: ignore[attr-defined]


def idle(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client
) -> tuple[Tensors, Tensors]:
    """update: nothing is trained (methods with rounds = 0)."""
    return sent, local


def sgd(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client
) -> tuple[Tensors, Tensors]:
    """update: minibatch SGD on `self.loss` with rate, momentum and decay; velocity starts anew."""
    momentum, decay = getattr(self, "momentum", 0.0), getattr(self, "decay", 0.0)

    def step(value: Tensor, gradient: Tensor, kept: Tensors) -> tuple[Tensor, Tensors]:
        speed = gradient + decay * value
        if kept:
            speed = momentum * kept["speed"] + speed
        return value - self.rate * speed, {"speed": speed}

    return descend(self, frozen, sent, local, client, step)


def adam(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client
) -> tuple[Tensors, Tensors]:
    """update: Adam on `self.loss` with rate, betas, eps and decay; moments start anew."""
    first, second = getattr(self, "betas", (0.9, 0.999))
    eps, decay = getattr(self, "eps", 1e-8), getattr(self, "decay", 0.0)

    def step(value: Tensor, gradient: Tensor, kept: Tensors) -> tuple[Tensor, Tensors]:
        pull = gradient + decay * value
        mean, square, count = (1 - first) * pull, (1 - second) * pull.square(), torch.ones(())
        if kept:
            mean = mean + first * kept["mean"]
            square = square + second * kept["square"]
            count = count + kept["count"]
        spread = (square / (1 - second**count)).sqrt() + eps
        moved = value - self.rate * mean / (1 - first**count) / spread
        return moved, {"mean": mean, "square": square, "count": count}

    return descend(self, frozen, sent, local, client, step)


for _part in (sgd, adam):
    _part.walks = "loss"  # type: ignore[attr-defined]  # tells `register` to ask for a loss


def descend(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client, step: Stepper
) -> tuple[Tensors, Tensors]:
    """Walks the minibatches, one optimiser step each; a step without a real row changes nothing.

    `loss` returns the loss, or the loss and new values of tensors named in `memory`. `step` gets
    what it asked to keep the last time, and nothing the first time.
    """
    everything = {**sent, **local}
    trained = {key: value for key, value in everything.items() if key not in self.memory}
    kept = {key: value for key, value in everything.items() if key in self.memory}
    states: dict[str, Tensors] = {key: {} for key in trained}
    none = torch.zeros(())

    def objective(trained: Tensors, kept: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        now = {**trained, **kept}
        shared = {key: now[key] for key in sent}
        own = {key: now[key] for key in local}
        result = self.loss(frozen, shared, own, batch, sent)
        return result if isinstance(result, tuple) else (result, {})

    gradient_of = grad_and_value(objective, has_aux=True)
    for index in range(client.order.shape[0]):
        batch = minibatch(client, index)
        active = batch.real.any()
        gradient, (_, remembered) = gradient_of(trained, kept, batch)
        for key, value in trained.items():  # one by one: a whole tower is large to hold twice
            moved, after = step(value, gradient.pop(key), states[key])
            trained[key] = torch.where(active, moved, value)
            for name, new in after.items():
                states[key][name] = torch.where(active, new, states[key].get(name, none))
        kept = {
            key: torch.where(active, remembered.get(key, value), value)
            for key, value in kept.items()
        }
    now = {**trained, **kept}
    return {key: now[key] for key in sent}, {key: now[key] for key in local}
