"""Whether the training of an image tower fits into memory, asked before it begins."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import tensors
from fedvlm.core import Batch, Factored, Frozen, Method, Tensors, Trained, schedule
from fedvlm.devices import choose, free, on_cpu
from fedvlm.errors import SettingsError
from fedvlm.machine import cores, free_memory
from fedvlm.runner.settings import Settings

# Of what one client trains: the weights, their gradient, two moments, what a loss holds for a
# moment (MOON's older model, LoRA's sums), and what the C library does not give back at once.
COPIES = 6


@dataclass(frozen=True)
class Room:
    """Bytes a round takes beyond the encoder itself."""

    shared: int  # what the server holds and sends
    upload: int  # of one client
    local: int  # of one client
    trained: int  # weights that one client trains
    graph: int  # what a minibatch keeps for its gradient
    clients: int  # that know this model
    takers: int  # of them that take part in a round
    processes: int  # that train at once

    @property
    def kept(self) -> int:
        """Of all clients, which is always in the machine's own memory."""
        kept = 2 * self.shared + self.takers * (self.upload + self.local)
        return kept + self.clients * self.local

    @property
    def busy(self) -> int:
        """Of those that train at once, which may be on a GPU."""
        piped = 2 * (self.shared + self.upload) if self.processes > 1 else 0
        return self.processes * (COPIES * self.trained + self.graph + piped)

    @property
    def total(self) -> int:
        return self.kept + self.busy


def check(settings: Settings, frozen: Frozen, image: Sequence[int], clients: int) -> str:
    """Says what a training takes, or refuses it if it would not fit; an image is (3, h, w)."""
    room = estimate(settings, frozen, image, clients)
    device, method = choose(settings.device), settings.method
    asked = [(room.total, free_memory(), "")]
    if device.type != "cpu":
        asked = [(room.kept, free_memory(), ""), (room.busy, free(device), f" on {device}")]
    short = [
        (bytes, there, at) for bytes, there, at in asked if there is not None and bytes > there
    ]
    if not short:
        return (
            f"{method.name} trains {room.trained // 4:,} parameters and takes about "
            f"{_gb(room.total)} beside the encoder"
        )
    wanted, there, at = short[0]
    raise SettingsError(
        f"{method.name} would take about {_gb(wanted)}{at} and {_gb(there)} are free: "
        f"{room.takers} clients send {_gb(room.upload)} each, {room.processes} train at once on "
        f"{_gb(COPIES * room.trained)} of weights and {_gb(room.graph)} for batch_size = "
        f"{schedule(method).batch_size}; train fewer blocks (blocks = 2), use lora or vpt, a "
        "smaller batch_size, workers = 1, or a smaller fraction"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def estimate(settings: Settings, frozen: Frozen, image: Sequence[int], clients: int) -> Room:
    method = settings.method
    shared, local = method.init(frozen)
    # LoRA uploads its factors, whatever the server keeps.
    uploaded = method.factors(frozen) if isinstance(method, Factored) and shared else shared
    every = {**shared, **uploaded, **local}
    trained = {key: value for key, value in every.items() if key not in method.traits.memory}
    takers = max(1, round(settings.fraction * clients))
    alone = settings.engine != "batched" or not on_cpu(settings.device)
    each = [graph_bytes(method, frozen, image, every, local, rows) for rows in (1, 2)]
    batch = schedule(method).batch_size
    return Room(
        shared=tensors.count_bytes(shared),
        upload=tensors.count_bytes(uploaded),
        local=tensors.count_bytes(local),
        trained=tensors.count_bytes(trained),
        # what does not grow with the rows is as large as weights, and held as often (LoRA's sums)
        graph=COPIES * max(0, 2 * each[0] - each[1]) + batch * (each[1] - each[0]),
        clients=clients,
        takers=takers,
        processes=1 if alone else min(settings.workers or cores(), takers),
    )


def graph_bytes(
    method: Method,
    frozen: Frozen,
    image: Sequence[int],
    every: Tensors,
    local: Tensors,
    rows: int,
) -> int:
    """What a gradient over so many rows keeps on the way forward, beside weights that are there."""
    if not every or not isinstance(method, Trained):
        return 0
    leaves = {
        key: value.detach().requires_grad_(key not in method.traits.memory)
        for key, value in every.items()
    }
    tower = frozen.image_tower
    assert tower is not None
    known = {
        value.untyped_storage().data_ptr() for value in (*every.values(), *tower.weights.values())
    }
    found: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return value

    x, y = torch.zeros(rows, *image), torch.zeros(rows, dtype=torch.int64)
    batch = Batch(x, y, torch.ones(rows, dtype=torch.bool), x[:0])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        shared = {key: value for key, value in leaves.items() if key not in local}
        own = {key: leaves[key] for key in local}
        kept = method.loss(frozen, shared, own, batch, {key: every[key] for key in shared})
    del kept
    return sum(found.values())
