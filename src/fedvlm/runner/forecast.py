"""Forecast what runs need before they begin: data, encoder, time and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from fedvlm import tensors
from fedvlm.core import Batch, Factored, Frozen, Method, Tensors, Trained, schedule
from fedvlm.data.catalogue import Entry, catalogue
from fedvlm.devices import choose_device, free_device_memory, is_cpu
from fedvlm.errors import SettingsError
from fedvlm.evaluate.protocols import Training
from fedvlm.evaluate.protocols.base_to_new import BaseToNew
from fedvlm.evaluate.protocols.source_target import EVERY_DOMAIN as EVERY_TARGET
from fedvlm.machine import count_cores, free_memory
from fedvlm.runner.load import SMOKE_CLIENTS, SMOKE_ROUNDS, SMOKE_SAMPLES, SMOKE_SAMPLES_PER_CLASS
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.settings import Settings

# Tokens, width and layers of CLIP's image towers.
TOWER_SHAPES = {
    "demo": (37, 128, 3),
    "clip-vit-base-patch32": (50, 768, 12),
    "clip-vit-base-patch16": (197, 768, 12),
    "clip-vit-large-patch14": (257, 1024, 24),
    "clip-vit-large-patch14-336": (577, 1024, 24),
}
RESNET_FLOPS = {"RN50": 1.22e10, "RN101": 1.95e10, "RN50x4": 4.26e10}  # floating-point operations per image
TEXT_TOWER_SHAPE, DEMO_TEXT_SHAPE = (20, 512, 12), (10, 128, 2)  # with the tokens of a typical prompt
BACKWARD_FACTOR = 3  # cost of forward and backward, relative to forward
# Seconds besides the operations of towers; docs/papers/appendix.md tells how they were measured.
RUN_SECONDS = 1.0  # to open data and encoder, and to write a record
ROUND_SECONDS = 0.015
STEP_SECONDS = 0.0006  # per minibatch
REFERENCE_FACTOR = 8  # factor for methods that adapt to a reference set
PROMPT_STEP_SECONDS = 0.002  # in addition, through a text tower: many small products
# Of a training on cached embeddings: seconds of a client in a round and of a step beside its
# products, operations of a step for each row and number that is trained, and a core's operations.
CLIENT_SECONDS, BARE_STEP_SECONDS, FLOPS_PER_PARAMETER, CORE_FLOPS_PER_SECOND = 1e-3, 2e-4, 10, 5e10
MATRIX_SIDE, SPEED_TRIALS = 1024, 5  # of the matrices that this machine's speed is taken from


def describe_requirements(settings: Sequence[Settings]) -> list[str]:
    """Return a line for each data set and encoder, and one for the total time."""
    entries, places = catalogue(), dict.fromkeys((run.data, str(run.source.get("root", ""))) for run in settings)
    lines = [_describe_data(entries[name], root) for name, root in places if name in entries]
    for encoder in dict.fromkeys(run.encoder for run in settings):
        kind, _, place = encoder.partition(":")
        if kind == "openai" and not Path(place).exists():
            remedy = "put OpenAI's weights there as .safetensors, with tokenizer.json (docs/how-to/data.md)"
            lines.append(f"encoder {encoder}: {place} is missing; {remedy}")
        if kind == "hf" and not Path(place).is_dir():
            lines.append(f"encoder {encoder}: from the Hub, or a copy on disk by --encoder hf:DIR")
    trainings = sum(len(run.seeds) * _n_trainings(run, entries.get(run.data)) for run in settings)
    lines.append(f"{len(settings)} runs, {trainings} trainings: {_describe_time(settings, entries)}")
    return lines


def _describe_data(entry: Entry, root: str) -> str:
    if root.startswith("hub:"):
        return f"data {entry.name}: {root} is downloaded"
    if not root:
        return f"data {entry.name}: " + ("comes with fedvlm" if entry.place else entry.home)
    if Path(root).exists():
        return f"data {entry.name}: {root} exists"
    return f"data {entry.name}: {root} is missing; put {entry.shape} (from {entry.home})"


def _n_trainings(settings: Settings, entry: Entry | None) -> int:
    if settings.protocol == "leave-one-domain-out" or settings.target == (EVERY_TARGET,):
        return max(1, len(entry.domains)) if entry else 1
    return max(1, len(settings.counts))


def _describe_time(settings: Sequence[Settings], entries: dict[str, Entry]) -> str:
    known = {name for name, entry in entries.items() if entry.total}
    able = [run for run in settings if run.data in known and _flops_per_image(run)]
    if not able:
        return "the time is unknown for these data and this encoder"
    seconds = estimate_seconds(able, entries, _measure_speed())
    unknown_data = sorted({run.data for run in settings} - {run.data for run in able})
    suffix = f", and more for {', '.join(unknown_data)}" if unknown_data else ""
    return f"roughly {format_duration(seconds)}{suffix} (from operation counts and this machine's speed, not measured)"


def estimate_seconds(settings: Sequence[Settings], entries: Mapping[str, Entry], speed: float) -> float:
    """Return the seconds that all runs take; speed is in operations per second."""
    encoded: set[tuple[str, str]] = set()
    seconds = 0.0
    for run in settings:
        entry = entries[run.data]
        seconds += RUN_SECONDS
        if (run.data, run.encoder) not in encoded:
            encoded.add((run.data, run.encoder))
            seconds += _n_samples(run, entry) * _flops_per_image(run) / speed
        rounds = min(run.method.rounds, SMOKE_ROUNDS) if run.smoke else run.method.rounds
        seconds += len(run.seeds) * _n_trainings(run, entry) * rounds * _round_seconds(run, entry, speed)
    return seconds


def _flops_per_image(settings: Settings) -> float:
    """Return the operations to encode an image; 0 if unknown."""
    name = settings.encoder.partition(":")[2].rstrip("/").rpartition("/")[2] or settings.encoder
    name = name.removesuffix(".safetensors")
    return RESNET_FLOPS.get(name) or (_forward_flops(TOWER_SHAPES[name]) if name in TOWER_SHAPES else 0.0)


def _n_samples(settings: Settings, entry: Entry) -> int:
    smoke_size = max(SMOKE_SAMPLES, SMOKE_SAMPLES_PER_CLASS * len(entry.classes))
    return min(smoke_size, entry.total) if settings.smoke else entry.total


def _round_seconds(settings: Settings, entry: Entry, speed: float) -> float:
    """Return the seconds of a round: its steps, and passes through towers."""
    divisor = 2 if settings.protocol == BaseToNew.name else 1  # of the classes
    classes = max(1, len(entry.classes) // divisor)
    train = settings.clients.ratios[0] * _n_samples(settings, entry) / divisor
    if settings.clients.shots:
        n_domains = 1 if settings.clients.partition == "pathological" else max(1, len(entry.domains))
        train = min(train, settings.clients.shots * classes * n_domains)
    plan = schedule(settings.method)
    visits = settings.fraction * plan.local_epochs * train
    # each client takes at least one step per epoch
    steps = max(visits / plan.batch_size, settings.fraction * plan.local_epochs * _n_clients(settings, entry))
    step = STEP_SECONDS * (REFERENCE_FACTOR if settings.method.traits.training.reference else 1)
    seconds, needs = ROUND_SECONDS + step * steps, settings.method.traits.needs
    if "image tower" in needs:
        seconds += BACKWARD_FACTOR * visits * _flops_per_image(settings) / speed
    if "text tower" in needs:
        text = _forward_flops(DEMO_TEXT_SHAPE if settings.encoder == "demo" else TEXT_TOWER_SHAPE)
        seconds += steps * (PROMPT_STEP_SECONDS + BACKWARD_FACTOR * classes * text / speed)
    return seconds


def _n_clients(settings: Settings, entry: Entry) -> int:
    if settings.clients.partition == "domain":
        return max(1, len(entry.domains))
    return min(settings.clients.count, SMOKE_CLIENTS) if settings.smoke else settings.clients.count


def training_time(prepared: Prepared, training: Training) -> float:
    """Return roughly the seconds of a training on one core, enough to order jobs by length."""
    settings, method = prepared.settings, prepared.settings.method
    plan = schedule(method)
    rows = [len(prepared.partition.clients[id].train) for id in training.train]
    steps = sum(plan.local_epochs * -(-count // plan.batch_size) for count in rows)
    shared, local = method.init(prepared.frozen)
    numbers = sum(tensor.numel() for tensor in (*shared.values(), *local.values()))
    work = float(FLOPS_PER_PARAMETER * plan.batch_size * numbers)
    if "text tower" in method.traits.needs:
        work += BACKWARD_FACTOR * len(prepared.frozen.classes) * _forward_flops(TEXT_TOWER_SHAPE)
    round_seconds = len(rows) * CLIENT_SECONDS + steps * (BARE_STEP_SECONDS + work / CORE_FLOPS_PER_SECOND)
    return CLIENT_SECONDS + max(1, method.rounds) * settings.fraction * round_seconds


def _forward_flops(tower: tuple[int, int, int]) -> float:
    """Return the operations of one pass through a transformer."""
    tokens, width, layers = tower
    return 2.0 * layers * (12 * tokens * width**2 + 2 * tokens**2 * width)


def _measure_speed() -> float:
    """Measure the operations per second of a matrix product: the best of a few."""
    matrix = torch.ones(MATRIX_SIDE, MATRIX_SIDE)
    best = float("inf")
    for _ in range(SPEED_TRIALS):
        started = perf_counter()
        matrix @ matrix
        best = min(best, perf_counter() - started)
    return 2 * MATRIX_SIDE**3 / best


def format_duration(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} seconds"


# Of what one client trains: the weights, their gradient, two moments, what a loss holds for a
# moment (MOON's older model, LoRA's sums), and what the C library does not give back at once.
WEIGHT_COPIES = 6


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a round takes besides the encoder."""

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
        """Return the bytes of all clients, which are always in main memory."""
        n_bytes = 2 * self.shared + self.participants * (self.upload + self.local)
        return n_bytes + self.clients * self.local

    @property
    def concurrent(self) -> int:
        """Return the bytes of clients that train at the same time, possibly on a GPU."""
        piped = 2 * (self.shared + self.upload) if self.processes > 1 else 0
        return self.processes * (WEIGHT_COPIES * self.trained + self.graph + piped)

    @property
    def total(self) -> int:
        return self.all_clients + self.concurrent


def check_memory(settings: Settings, frozen: Frozen, image: Sequence[int], clients: int) -> str:
    """Describe the memory of a training, or refuse it if it does not fit; an image is (3, h, w)."""
    room = estimate(settings, frozen, image, clients)
    device, method = choose_device(settings.device), settings.method
    demands = [(room.total, free_memory(), "")]
    if device.type != "cpu":
        on_device = (room.concurrent, free_device_memory(device), f" on {device}")
        demands = [(room.all_clients, free_memory(), ""), on_device]
    short = [(size, free, at) for size, free, at in demands if free is not None and size > free]
    if not short:
        size = _gb(room.total)
        return f"{method.name} trains {room.trained // 4:,} parameters and takes about {size} besides the encoder"
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
    method: Method, frozen: Frozen, image: Sequence[int], all_tensors: Tensors, local: Tensors, rows: int
) -> int:
    """Return the bytes that autograd saves for a gradient over `rows` samples, besides the weights."""
    if not all_tensors or not isinstance(method, Trained):
        return 0
    memory = method.traits.training.memory
    graph_leaves = {key: value.detach().requires_grad_(key not in memory) for key, value in all_tensors.items()}
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
