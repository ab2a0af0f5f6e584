"""One gradient walk over a client's minibatches, and the steppers that go with it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedvlm.core import Alternating, Batch, Client, Frozen, Tensors, schedule, walks
from fedvlm.machine import give_back
from fedvlm.parts.bodies import minibatch
from fedvlm.tensors import count_bytes

LARGE = 64 << 20  # bytes of weights
# a tensor, its gradient and what was kept from its last step -> the tensor, and what to keep
Stepper = Callable[[Tensor, Tensor, Tensors], tuple[Tensor, Tensors]]
# what is trained, what is kept and a minibatch -> the loss, and new values of what is kept
Objective = Callable[[Tensors, Tensors, Batch], tuple[Tensor, Tensors]]
STATE = "state "  # starts the names of local tensors that hold an optimiser's state over the rounds


@walks
def sgd(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client
) -> tuple[Tensors, Tensors]:
    """update: minibatch SGD on `self.loss` with rate, momentum and decay; velocity starts anew."""
    return descend(self, frozen, sent, local, client, sgd_step(self))


def sgd_step(self: Any) -> Stepper:
    pace = schedule(self)

    def step(value: Tensor, gradient: Tensor, kept: Tensors) -> tuple[Tensor, Tensors]:
        speed = gradient + pace.decay * value
        if kept:
            speed = pace.momentum * kept["speed"] + speed
        return value - pace.rate * speed, {"speed": speed}

    return step


@walks
def adam(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client
) -> tuple[Tensors, Tensors]:
    """update: Adam on `self.loss` with rate, betas, eps and decay.

    Moments start anew in every round, unless `init` puts `moments` among the local tensors.
    """
    pace = schedule(self)
    first, second = pace.betas

    def step(value: Tensor, gradient: Tensor, kept: Tensors) -> tuple[Tensor, Tensors]:
        pull = gradient + pace.decay * value
        mean, square, count = (1 - first) * pull, (1 - second) * pull.square(), torch.ones(())
        if kept:
            mean = mean + first * kept["mean"]
            square = square + second * kept["square"]
            count = count + kept["count"]
        spread = (square / (1 - second**count)).sqrt() + pace.eps
        moved = value - pace.rate * mean / (1 - first**count) / spread
        return moved, {"mean": mean, "square": square, "count": count}

    return descend(self, frozen, sent, local, client, step)


def moments(trained: Tensors) -> Tensors:
    """Local tensors in which `adam` keeps its moments from round to round, for `init`."""
    return {
        f"{STATE}{name} {key}": torch.zeros_like(value)
        for key, one in trained.items()
        for name, value in (("mean", one), ("square", one), ("count", torch.zeros(())))
    }


def split_state(local: Tensors) -> tuple[Tensors, dict[str, Tensors]]:
    """Local tensors of the method, and what its optimiser kept of each trained one."""
    states: dict[str, Tensors] = {}
    for key, value in local.items():
        if key.startswith(STATE):
            name, of = key.removeprefix(STATE).split(" ", 1)
            states.setdefault(of, {})[name] = value
    return {key: one for key, one in local.items() if not key.startswith(STATE)}, states


def join_state(states: dict[str, Tensors]) -> Tensors:
    return {f"{STATE}{name} {key}": v for key, one in states.items() for name, v in one.items()}


def descend(
    self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client, step: Stepper
) -> tuple[Tensors, Tensors]:
    """Walks the minibatches, one optimiser step each; a step without a real row changes nothing.

    `loss` returns the loss, or the loss and new values of tensors named in `memory`. `step` gets
    what it asked to keep the last time, and nothing the first time.
    """
    local, states = split_state(local)
    keeps = bool(states)
    everything = {**sent, **local}
    memory = self.traits.memory
    trained = {key: value for key, value in everything.items() if key not in memory}
    kept = {key: value for key, value in everything.items() if key in memory}
    states = {key: dict(states.get(key, {})) for key in trained}
    none = torch.zeros(())

    def objective(trained: Tensors, kept: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        now = {**trained, **kept}
        shared = {key: now[key] for key in sent}
        own = {key: now[key] for key in local}
        result = self.loss(frozen, shared, own, batch, sent)
        return result if isinstance(result, tuple) else (result, {})

    # Engines take clients that train a tower one by one.
    plain = "image tower" in self.traits.needs
    gradient_of = slopes_of(objective) if plain else grad_and_value(objective, has_aux=True)
    epochs = epoch_of(self, client.order)
    for index in range(client.order.shape[0]):
        batch = minibatch(client, index)
        active = batch.real.any()
        gradient, (_, remembered) = gradient_of(trained, kept, batch)
        for key, value in trained.items():  # one by one: a whole tower is large to hold twice
            moved, after = step(value, gradient.pop(key), states[key])
            moves = active
            if isinstance(self, Alternating):
                moves = active & self.in_turn(key, epochs[index])
            trained[key] = torch.where(moves, moved, value)
            for name, new in after.items():
                states[key][name] = torch.where(moves, new, states[key].get(name, none))
        kept |= {
            key: torch.where(active, remembered[key], kept[key])
            for key in kept.keys() & remembered.keys()
        }
    now = {**trained, **kept}
    own = {key: now[key] for key in local}
    if keeps:
        own |= join_state(states)
    return {key: now[key] for key in sent}, own


def epoch_of(self: Any, order: Tensor) -> Tensor:
    """(..., steps): in which pass over its rows a step is; steps without a row do not count."""
    real = (order >= 0).any(dim=-1)
    each = real.sum(dim=-1, keepdim=True) // schedule(self).epochs
    return (real.cumsum(dim=-1) - 1).clamp(min=0) // each.clamp(min=1)


def slopes_of(objective: Objective) -> Callable[[Tensors, Tensors, Batch], Any]:
    """`grad_and_value` for one client alone: under vmap it would not do.

    torch.func keeps what a second derivative would need, which for a tower is gigabytes.
    """

    def of(trained: Tensors, kept: Tensors, batch: Batch) -> Any:
        with torch.enable_grad():
            leaves = {key: value.detach().requires_grad_() for key, value in trained.items()}
            loss, remembered = objective(leaves, kept, batch)
            slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            after = {key: value.detach() for key, value in remembered.items()}
            told = loss.detach()
        del loss, remembered
        if count_bytes(trained) > LARGE:
            give_back()  # what the minibatch held, before the step takes its own
        return dict(zip(leaves, slopes, strict=True)), (told, after)

    return of
