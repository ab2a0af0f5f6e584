"""Gradient training over a client's minibatches: SGD, Adam, and closed-form gradients of linear heads."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.optim.adam import adam as fused_step

from fedvlm import tensors
from fedvlm.core import Alternating, Batch, Client, Frozen, Schedule, Tensors, gradient_update, schedule
from fedvlm.machine import release_memory
from fedvlm.parts.bodies import class_weights, minibatch
from fedvlm.tensors import Updated, count_bytes, to_float32

__all__ = [
    "Stepper",
    "adam",
    "adam_moments",
    "fused_adam",
    "head_sgd",
    "join_state",
    "map_sgd",
    "per_tensor",
    "regularised_head_sgd",
    "sgd",
    "sgd_step",
    "split_state",
    "train_minibatches",
]

LARGE_WEIGHTS_BYTES = 64 << 20  # bytes of weights
# a tensor, its gradient and its optimiser state -> the new tensor and state
Stepper = Callable[[Tensor, Tensor, Tensors], tuple[Tensor, Tensors]]
States = dict[str, Tensors]  # optimiser state of each trained tensor
# trained tensors, their gradients, the states, and by tensor whether it is trained in this step (bool)
Move = Callable[[Tensors, Tensors, States, Tensors], None]
# trained tensors, memory tensors and a minibatch -> the loss, and new memory tensors
Objective = Callable[[Tensors, Tensors, Batch], tuple[Tensor, Tensors]]
STATE_PREFIX = "state "  # starts the names of local tensors that hold an optimiser's state over the rounds


@gradient_update
def sgd(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, client: Client) -> tuple[Tensors, Tensors]:
    """update: minibatch SGD on `self.loss` with lr, momentum and weight_decay, velocity anew."""
    return train_minibatches(self, frozen, sent, local, client, per_tensor(sgd_step(self)))


def sgd_step(self: Any) -> Stepper:
    """Return a step of SGD with the momentum and weight decay of a method's settings."""
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
    """Return local tensors, for `init`, in which `adam` keeps its moments from round to round."""
    return {
        f"{STATE_PREFIX}{name} {key}": torch.zeros_like(value)
        for key, tensor in trained.items()
        for name, value in (("mean", tensor), ("square", tensor), ("count", torch.zeros(())))
    }


def split_state(local: Tensors) -> tuple[Tensors, States]:
    """Return the local tensors of the method, and the optimiser state of each trained one."""
    states: States = {}
    for key, value in local.items():
        if key.startswith(STATE_PREFIX):
            name, of = key.removeprefix(STATE_PREFIX).split(" ", 1)
            states.setdefault(of, {})[name] = value
    return {key: tensor for key, tensor in local.items() if not key.startswith(STATE_PREFIX)}, states


def join_state(states: States) -> Tensors:
    """Return the optimiser's state of all tensors as one flat dict."""
    return {f"{STATE_PREFIX}{name} {key}": v for key, state in states.items() for name, v in state.items()}


def per_tensor(step: Stepper) -> Move:
    """Step one tensor after the other: a tower is too large to hold twice."""
    none = torch.zeros(())

    def move(trained: Tensors, gradients: Tensors, states: States, turns: Tensors) -> None:
        for key, value in trained.items():
            moved, after = step(value, gradients.pop(key), states[key])
            trained[key] = where_active(turns[key], moved, value)
            for name, new in after.items():
                states[key][name] = where_active(turns[key], new, states[key].get(name, none))

    return move


def where_active(turn: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the new value where the step is active, client by client if there is a leading axis."""
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
    """Train on the minibatches, one optimiser step each; a step without a real sample changes nothing.

    `loss` returns the loss, or the loss and new values of tensors named in `memory`. `move` changes
    what is trained in its dict, and may keep states there from step to step. An `eager` walk is
    not for vmap: it takes plain gradients, and leaves out steps in which nobody has a row.
    `batches` may give minibatches with a leading axis of clients, if `loss` sums over it.
    """
    local, states = split_state(local)
    has_state = bool(states)
    everything = {**sent, **local}
    memory = self.traits.training.memory
    trained = {key: value for key, value in everything.items() if key not in memory}
    memory_tensors = {key: value for key, value in everything.items() if key in memory}
    states = {key: dict(states.get(key, {})) for key in trained}

    def objective(trained: Tensors, memory_tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        now = {**trained, **memory_tensors}
        shared = {key: now[key] for key in sent}
        local_values = {key: now[key] for key in local}
        result = self.loss(frozen, shared, local_values, batch, sent)
        return result if isinstance(result, tuple) else (result, {})

    plain = eager or "image tower" in self.traits.needs  # such clients are trained one by one
    gradient_of = autograd_gradients(objective) if plain else grad_and_value(objective, has_aux=True)
    epochs = epoch_of(self, client.order)
    weights = class_weights(self, len(frozen.classes), client)
    for index in range(client.order.shape[-2]):
        batch = batches(client, index)
        if weights is not None:
            batch = batch._replace(real=batch.real * weights.gather(-1, batch.y))
        active = batch.real.any(dim=-1)
        if eager and not active.any():
            continue
        gradients, (_, remembered) = gradient_of(trained, memory_tensors, batch)
        turns = dict.fromkeys(trained, active)
        if isinstance(self, Alternating):
            turns = {key: active & self.trains_in_epoch(key, epochs[..., index]) for key in trained}
        move(trained, gradients, states, turns)
        both = memory_tensors.keys() & remembered.keys()
        memory_tensors |= {key: where_active(active, remembered[key], memory_tensors[key]) for key in both}
    now = {**trained, **memory_tensors}
    local_values = {key: now[key] for key in local}
    if has_state:
        local_values |= join_state(states)
    return {key: now[key] for key in sent}, local_values


def epoch_of(self: Any, order: Tensor) -> Tensor:
    """Return (..., steps) the epoch of each step; steps without a sample do not count."""
    real = (order >= 0).any(dim=-1)
    steps_per_epoch = real.sum(dim=-1, keepdim=True) // schedule(self).local_epochs
    return (real.cumsum(dim=-1) - 1).clamp(min=0) // steps_per_epoch.clamp(min=1)


def autograd_gradients(objective: Objective) -> Callable[[Tensors, Tensors, Batch], Any]:
    """Return `grad_and_value` by autograd alone, which does not work under vmap.

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
            release_memory()  # of the minibatch, before the step allocates its own
        return dict(zip(inputs, gradients, strict=True)), (value, after)

    return gradients_of


def fused_adam(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
    """update_many: every client's `parts.adam`."""
    done = []
    for i in range(len(clients.y)):
        client = Client(*(value[i] for value in vars(clients).values()))
        client_sent, client_local = ({key: value[i] for key, value in stacked.items()} for stacked in (sent, local))
        done.append(train_minibatches(self, frozen, client_sent, client_local, client, fused_move(self), eager=True))
    return tensors.stack([upload for upload, _ in done]), tensors.stack([client_local for _, client_local in done])


def fused_move(self: Any) -> Move:
    """Step in place on copies that are made before the first step."""
    settings = schedule(self)
    is_started = False

    @torch.no_grad()
    def move(trained: Tensors, gradients: Tensors, states: States, turns: Tensors) -> None:
        nonlocal is_started
        if not is_started:
            trained |= tensors.copy(trained)
            initial_states = split_state(adam_moments(trained))[1]
            states |= {key: tensors.copy(states[key] or initial_states[key]) for key in trained}
            is_started = True
        names = [key for key in trained if turns[key]]
        optimizer_state = ([states[key][name] for key in names] for name in ("mean", "square", "count"))
        adam_step(settings, [trained[key] for key in names], [gradients[key] for key in names], *optimizer_state)

    return move


def adam_step(
    settings: Schedule,
    values: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    counts: list[Tensor],
) -> None:
    """Take one step of Adam on all values, in place."""
    beta1, beta2 = settings.betas
    options: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay, "eps": settings.eps}
    options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
    fused_step(values, gradients, means, squares, [], counts, fused=True, **options)


# (clients, classes, dim) heads -> what is added to their gradients
ExtraGradient = Callable[[Tensor], Tensor | float]


# (clients, batch, dim) scaled samples, (clients, batch, 1) labels and weights, (clients, 1, 1) active
LinearBatch = tuple[Tensor, Tensor, Tensor, Tensor]


def iterate_batches(scale: float, clients: Client, weights: Tensor | None) -> Iterator[LinearBatch]:
    """Yield the minibatches in which any client has a sample."""
    rows_of, labels = clients.x.flatten(0, 1), clients.y.clamp(min=0).flatten()
    first = torch.arange(len(clients.y))[:, None] * clients.y.shape[1]
    for rows in clients.order.unbind(1):
        real = rows >= 0
        count = real.sum(1)
        if not count.any():
            continue
        index = (rows.clamp(min=0) + first).flatten()
        batch = to_float32(rows_of.index_select(0, index)).reshape(*rows.shape, -1)
        batch_labels = labels.index_select(0, index).reshape(*rows.shape, 1)
        sample_weights = (real / count.clamp(min=1)[:, None])[..., None]
        if weights is not None:
            sample_weights = sample_weights * weights.gather(1, batch_labels[..., 0])[..., None]
        # scaled in autograd's order: the same rounding
        yield batch.mul_(scale), batch_labels, sample_weights, (count > 0)[:, None, None]


def head_gradient(head: Tensor, batch: Tensor, batch_labels: Tensor, sample_weights: Tensor) -> Tensor:
    """Return the gradients (clients, classes, dim) of the clients' mean cross-entropies."""
    errors = torch.bmm(batch, head.mT).log_softmax(2).exp_()
    errors.scatter_(2, batch_labels, errors.gather(2, batch_labels) - 1)
    return torch.bmm(errors.mul_(sample_weights).mT, batch)


@torch.no_grad()
def train_heads(self: Any, scale: float, head: Tensor, clients: Client, extra_gradient: ExtraGradient) -> Tensor:
    """(clients, classes, dim) after the steps of `parts.sgd` on `scale * x @ head.mT`'s loss."""
    settings = schedule(self)
    head, weights = head.clone(), class_weights(self, head.shape[1], clients)
    velocity = torch.zeros_like(head)
    for batch, batch_labels, sample_weights, is_active in iterate_batches(scale, clients, weights):
        gradient = head_gradient(head, batch, batch_labels, sample_weights)
        gradient = (gradient + extra_gradient(head)).add_(head, alpha=settings.weight_decay)
        # A client without samples in this step keeps its head and its velocity.
        moved = settings.momentum * velocity + gradient if settings.momentum else gradient
        velocity = torch.where(is_active, moved, velocity) if settings.momentum else gradient
        head.sub_(torch.where(is_active, velocity, 0.0), alpha=settings.lr)
    return head


@torch.no_grad()
def train_maps(self: Any, scale: float, first: Tensor, head: Tensor, clients: Client) -> Tensor:
    """(clients, dim, dim) after the steps of `parts.sgd` on `scale * x @ map.mT @ head.mT`'s loss.

    A gradient is headᵀ times one of the classes' rows, so that the map is a part of the first one
    and headᵀ times what was added: each step costs as much as one of a head.
    """
    settings, weights = schedule(self), class_weights(self, head.shape[1], clients)
    initial_logit_map, square = torch.bmm(head, first), torch.bmm(head, head.mT)
    part = initial_logit_map.new_ones(len(head), 1, 1)  # fraction of the initial map that is left
    added, part_speed, added_speed = torch.zeros_like(head), 0 * part, torch.zeros_like(head)
    for batch, batch_labels, sample_weights, is_active in iterate_batches(scale, clients, weights):
        current = part * initial_logit_map + torch.bmm(square, added)
        gradient = head_gradient(current, batch, batch_labels, sample_weights)
        faster = settings.momentum * part_speed + settings.weight_decay * part
        part_speed = torch.where(is_active, faster, part_speed)
        faster = settings.momentum * added_speed + gradient + settings.weight_decay * added
        added_speed = torch.where(is_active, faster, added_speed)
        step_size = settings.lr * is_active
        part, added = part - step_size * part_speed, added - step_size * added_speed
    return torch.baddbmm(part * first, head.mT, added)


def map_sgd(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
    """update_many: every client's `parts.sgd` of a local `head` over a shared `map`, alternating."""
    epochs = epoch_of(self, clients.order)

    def turn(key: str) -> Client:
        is_trained = self.trains_in_epoch(key, epochs)[..., None]
        return replace(clients, order=torch.where(is_trained, clients.order, -1))

    mapped = torch.bmm(to_float32(clients.x), sent["map"].mT)
    head = train_heads(self, frozen.scale, local["head"], replace(turn("head"), x=mapped), lambda _: 0.0)
    return {"map": train_maps(self, frozen.scale, sent["map"], head, turn("map"))}, {"head": head}


def head_sgd(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> tuple[Tensors, Tensors]:
    """update_many: every client's `parts.sgd` where a shared `head` is all that is trained."""
    return {"head": train_heads(self, frozen.scale, sent["head"], clients, lambda head: 0.0)}, local


def regularised_head_sgd(self: Any, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> Updated:
    """update_many: as `head_sgd`, where the loss has another part, whose gradient is `extra_gradient`."""

    def extra_gradient(head: Tensor) -> Tensor:
        return torch.as_tensor(self.extra_gradient(sent, local, head))

    return {"head": train_heads(self, frozen.scale, sent["head"], clients, extra_gradient)}, local
