"""Whether the training of an image tower fits into memory, asked before it begins."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm import tensors
from fedvlm.core import Batch, Factored, Frozen, Method, Tensors, Trained, schedule
from fedvlm.devices import choose_device, free_device_memory, is_cpu
from fedvlm.errors import SettingsError
from fedvlm.machine import count_cores, free_memory
from fedvlm.runner.settings import Settings

# Of what one client trains: the weights, their gradient, two moments, what a loss holds for a
# moment (MOON's older model, LoRA's sums), and what the C library does not give back at once.
WEIGHT_COPIES = 6


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes a round takes beyond the encoder itself."""

    shared: int  # what the server holds and sends
    upload: int  # of one client
    local: int  # of one client
    trained: int  # weights that one client trains
    graph: int  # what a minibatch keeps for its gradient
    clients: int  # that know this model
    participants: int  # of them that take part in a round
    processes: int  # that train at once

    @property
    def all_clients(self) -> int:
        """Of all clients, which is always in the machine's own memory."""
        n_bytes = 2 * self.shared + self.participants * (self.upload + self.local)
        return n_bytes + self.clients * self.local

    @property
    def concurrent(self) -> int:
        """Of those that train at once, which may be on a GPU."""
        piped = 2 * (self.shared + self.upload) if self.processes > 1 else 0
        return self.processes * (WEIGHT_COPIES * self.trained + self.graph + piped)

    @property
    def total(self) -> int:
        return self.all_clients + self.concurrent


def check_memory(settings: Settings, frozen: Frozen, image: Sequence[int], clients: int) -> str:
    """Says what a training takes, or refuses it if it would not fit; an image is (3, h, w)."""
    room = estimate(settings, frozen, image, clients)
    device, method = choose_device(settings.device), settings.method
    demands = [(room.total, free_memory(), "")]
    if device.type != "cpu":
        demands = [
            (room.all_clients, free_memory(), ""),
            (room.concurrent, free_device_memory(device), f" on {device}"),
        ]
    short = [
        (bytes, free_bytes, at) for bytes, free_bytes, at in demands if free_bytes is not None and bytes > free_bytes
    ]
    if not short:
        return (
            f"{method.name} trains {room.trained // 4:,} parameters and takes about "
            f"{_gb(room.total)} beside the encoder"
        )
    demand, free_bytes, at = short[0]
    raise SettingsError(
        f"{method.name} would take about {_gb(demand)}{at} and {_gb(free_bytes)} are free: "
        f"{room.participants} clients send {_gb(room.upload)} each, {room.processes} train at once on "
        f"{_gb(WEIGHT_COPIES * room.trained)} of weights and {_gb(room.graph)} for batch_size = "
        f"{schedule(method).batch_size}; train fewer blocks (blocks = 2), use lora or vpt, a "
        "smaller batch_size, workers = 1, or a smaller fraction"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def estimate(settings: Settings, frozen: Frozen, image: Sequence[int], clients: int) -> MemoryEstimate:
    method = settings.method
    shared, local = method.init(frozen)
    # LoRA uploads its factors, whatever the server keeps.
    uploaded = method.factors(frozen) if isinstance(method, Factored) and shared else shared
    all_tensors = {**shared, **uploaded, **local}
    trained = {key: value for key, value in all_tensors.items() if key not in method.traits.training.memory}
    takers = max(1, round(settings.fraction * clients))
    alone = settings.engine != "batched" or not is_cpu(settings.device)
    graph_sizes = [graph_bytes(method, frozen, image, all_tensors, local, rows) for rows in (1, 2)]
    batch = schedule(method).batch_size
    return MemoryEstimate(
        shared=tensors.count_bytes(shared),
        upload=tensors.count_bytes(uploaded),
        local=tensors.count_bytes(local),
        trained=tensors.count_bytes(trained),
        # what does not grow with the rows is as large as weights, and held as often (LoRA's sums)
        graph=WEIGHT_COPIES * max(0, 2 * graph_sizes[0] - graph_sizes[1]) + batch * (graph_sizes[1] - graph_sizes[0]),
        clients=clients,
        participants=takers,
        processes=1 if alone else min(settings.workers or count_cores(), takers),
    )


def graph_bytes(
    method: Method,
    frozen: Frozen,
    image: Sequence[int],
    all_tensors: Tensors,
    local: Tensors,
    rows: int,
) -> int:
    """What a gradient over so many rows keeps on the way forward, beside weights that are there."""
    if not all_tensors or not isinstance(method, Trained):
        return 0
    graph_leaves = {
        key: value.detach().requires_grad_(key not in method.traits.training.memory)
        for key, value in all_tensors.items()
    }
    tower = frozen.image_tower
    assert tower is not None
    weight_pointers = {value.untyped_storage().data_ptr() for value in (*all_tensors.values(), *tower.weights.values())}
    saved_bytes: dict[int, int] = {}

    def record_saved(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weight_pointers:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return value

    x, y = torch.zeros(rows, *image), torch.zeros(rows, dtype=torch.int64)
    batch = Batch(x, y, torch.ones(rows, dtype=torch.bool), x[:0])
    with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda value: value):
        shared = {key: value for key, value in graph_leaves.items() if key not in local}
        local_leaves = {key: graph_leaves[key] for key in local}
        loss = method.loss(frozen, shared, local_leaves, batch, {key: all_tensors[key] for key in shared})
    del loss
    return sum(saved_bytes.values())
