"""One gradient walk over a client's minibatches, and the steppers that go with it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedvlm.core import Alternating, Batch, Client, Frozen, Tensors, gradient_update, schedule
from fedvlm.machine import release_memory
from fedvlm.parts.bodies import minibatch
from fedvlm.tensors import count_bytes

LARGE_WEIGHTS_BYTES = 64 << 20  # bytes of weights
# a tensor, its gradient and what was kept from its last step -> the tensor, and what to keep
Stepper = Callable[[Tensor, Tensor, Tensors], tuple[Tensor, Tensors]]
States = dict[str, Tensors]  # what was kept from the last step, of each trained tensor
# what is trained and its gradients, the states, and by tensor whether it is its turn (bool)
Move = Callable[[Tensors, Tensors, States, Tensors], None]
# what is trained, what is kept and a minibatch -> the loss, and new values of what is kept
Objective = Callable[[Tensors, Tensors, Batch], tuple[Tensor, Tensors]]
STATE_PREFIX = "state "  # starts the names of local tensors that hold an optimiser's state over the rounds


@gradient_update
def sgd(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
    """update: minibatch SGD on `self.loss` with lr, momentum and weight_decay, velocity anew."""
    return train_minibatches(self, frozen, sent, local, client, per_tensor(sgd_step(self)))


def sgd_step(self: Any) -> Stepper:
    settings = schedule(self)

    def step(value: Tensor, gradient: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        velocity = gradient + settings.weight_decay * value
        if state:
            velocity = settings.momentum * state["speed"] + velocity
        return value - settings.lr * velocity, {"speed": velocity}

    return step


@gradient_update
def adam(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
    """update: Adam on `self.loss` with lr, betas, eps and weight_decay.

    Moments start anew in every round, unless `init` puts `moments` among the local tensors.
    """
    settings = schedule(self)
    first, second = settings.betas

    def step(value: Tensor, gradient: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        direction = gradient + settings.weight_decay * value
        mean, square, count = (1 - first) * direction, (1 - second) * direction.square(), torch.ones(())
        if state:
            mean = mean + first * state["mean"]
            square = square + second * state["square"]
            count = count + state["count"]
        spread = (square / (1 - second**count)).sqrt() + settings.eps
        moved = value - settings.lr * mean / (1 - first**count) / spread
        return moved, {"mean": mean, "square": square, "count": count}

    return train_minibatches(self, frozen, sent, local, client, per_tensor(step))


def adam_moments(trained: Tensors) -> Tensors:
    """Local tensors in which `adam` keeps its moments from round to round, for `init`."""
    return {
        f"{STATE_PREFIX}{name} {key}": torch.zeros_like(value)
        for key, tensor in trained.items()
        for name, value in (("mean", tensor), ("square", tensor), ("count", torch.zeros(())))
    }


def split_state(local: Tensors) -> tuple[Tensors, States]:
    """Local tensors of the method, and what its optimiser kept of each trained one."""
    states: States = {}
    for key, value in local.items():
        if key.startswith(STATE_PREFIX):
            name, of = key.removeprefix(STATE_PREFIX).split(" ", 1)
            states.setdefault(of, {})[name] = value
    return {key: tensor for key, tensor in local.items() if not key.startswith(STATE_PREFIX)}, states


def join_state(states: States) -> Tensors:
    return {f"{STATE_PREFIX}{name} {key}": v for key, state in states.items() for name, v in state.items()}


def per_tensor(step: Stepper) -> Move:
    """One tensor after the other: a whole tower is large to hold twice."""
    none = torch.zeros(())

    def move(trained: Tensors, gradients: Tensors, states: States, turns: Tensors) -> None:
        for key, value in trained.items():
            moved, after = step(value, gradients.pop(key), states[key])
            trained[key] = where_active(turns[key], moved, value)
            for name, new in after.items():
                states[key][name] = where_active(turns[key], new, states[key].get(name, none))

    return move


def where_active(turn: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new value where it is its turn, which with a leading axis is each client's own."""
    shape = (*turn.shape, *[1] * (new.ndim - turn.ndim)) if turn.ndim else ()
    return torch.where(turn.reshape(shape) if shape else turn, new, old)


def train_minibatches(
    self: Any,
    frozen: Frozen,
    sent: Tensors,
    local: Tensors,
    client: Client,
    move: Move,
    eager: bool = False,
    batches: Callable[[Client, int], Batch] = minibatch,
) -> tuple[Tensors, Tensors]:
    """Walks the minibatches, one optimiser step each; a step without a real row changes nothing.

    `loss` returns the loss, or the loss and new values of tensors named in `memory`. `move` changes
    what is trained in its dict, and may keep states there from step to step. An `eager` walk is
    not for vmap: it takes plain gradients, and leaves out steps in which nobody has a row.
    `batches` may give minibatches with a leading axis of clients, if `loss` sums over it.
    """
    local, states = split_state(local)
    has_state = bool(states)
    everything = {**sent, **local}
    memory = self.traits.memory
    trained = {key: value for key, value in everything.items() if key not in memory}
    memory_tensors = {key: value for key, value in everything.items() if key in memory}
    states = {key: dict(states.get(key, {})) for key in trained}

    def objective(trained: Tensors, memory_tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        now = {**trained, **memory_tensors}
        shared = {key: now[key] for key in sent}
        local_values = {key: now[key] for key in local}
        result = self.loss(frozen, shared, local_values, batch, sent)
        return result if isinstance(result, tuple) else (result, {})

    plain = eager or "image tower" in self.traits.needs  # such clients go one by one
    gradient_of = autograd_gradients(objective) if plain else grad_and_value(objective, has_aux=True)
    epochs = epoch_of(self, client.order)
    for index in range(client.order.shape[-2]):
        batch = batches(client, index)
        active = batch.real.any(dim=-1)
        if eager and not active.any():
            continue
        gradients, (_, remembered) = gradient_of(trained, memory_tensors, batch)
        turns = dict.fromkeys(trained, active)
        if isinstance(self, Alternating):
            turns = {key: active & self.in_turn(key, epochs[..., index]) for key in trained}
        move(trained, gradients, states, turns)
        memory_tensors |= {
            key: where_active(active, remembered[key], memory_tensors[key])
            for key in memory_tensors.keys() & remembered.keys()
        }
    now = {**trained, **memory_tensors}
    local_values = {key: now[key] for key in local}
    if has_state:
        local_values |= join_state(states)
    return {key: now[key] for key in sent}, local_values


def epoch_of(self: Any, order: Tensor) -> Tensor:
    """(..., steps): in which pass over its rows a step is; steps without a row do not count."""
    real = (order >= 0).any(dim=-1)
    steps_per_epoch = real.sum(dim=-1, keepdim=True) // schedule(self).local_epochs
    return (real.cumsum(dim=-1) - 1).clamp(min=0) // steps_per_epoch.clamp(min=1)


def autograd_gradients(objective: Objective) -> Callable[[Tensors, Tensors, Batch], Any]:
    """`grad_and_value` by autograd alone: under vmap it would not do.

    torch.func keeps what a second derivative would need, which for a tower is gigabytes.
    """

    def gradients_of(trained: Tensors, memory_tensors: Tensors, batch: Batch) -> Any:
        with torch.enable_grad():
            inputs = {key: value.detach().requires_grad_() for key, value in trained.items()}
            loss, remembered = objective(inputs, memory_tensors, batch)
            gradients = torch.autograd.grad(loss, list(inputs.values()), materialize_grads=True)
            after = {key: value.detach() for key, value in remembered.items()}
            value = loss.detach()
        del loss, remembered
        if count_bytes(trained) > LARGE_WEIGHTS_BYTES:
            release_memory()  # what the minibatch held, before the step takes its own
        return dict(zip(inputs, gradients, strict=True)), (value, after)

    return gradients_of
