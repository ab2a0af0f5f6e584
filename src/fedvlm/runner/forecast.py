"""What runs need before they begin: data, where to get them, an encoder, and roughly how long."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

import torch

from fedvlm.core import schedule
from fedvlm.data.catalogue import Entry, catalogue
from fedvlm.evaluate.protocols import Training
from fedvlm.evaluate.protocols.base_to_new import BaseToNew
from fedvlm.evaluate.protocols.source_target import EVERY_DOMAIN as EVERY_TARGET
from fedvlm.runner.load import SMOKE_CLIENTS, SMOKE_ROUNDS, SMOKE_SAMPLES, SMOKE_SAMPLES_PER_CLASS
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.settings import Settings

# Of CLIP's image towers: tokens, width, layers.
TOWER_SHAPES = {
    "demo": (37, 128, 3),
    "clip-vit-base-patch32": (50, 768, 12),
    "clip-vit-base-patch16": (197, 768, 12),
    "clip-vit-large-patch14": (257, 1024, 24),
    "clip-vit-large-patch14-336": (577, 1024, 24),
}
RESNET_FLOPS = {"RN50": 1.22e10, "RN101": 1.95e10, "RN50x4": 4.26e10}  # operations of an image, counted
TEXT_TOWER_SHAPE, DEMO_TEXT_SHAPE = (20, 512, 12), (10, 128, 2)  # tokens of a usual prompt with its class name
BACKWARD_FACTOR = 3  # a step forward and back, against one forward
# Seconds beside the operations of towers; docs/papers/results-speed.md says how they were measured.
RUN_SECONDS = 1.0  # of opening data and encoder, and of writing a record
ROUND_SECONDS = 0.015
STEP_SECONDS = 0.0006  # of a minibatch
REFERENCE_FACTOR = 8  # times that, of one that adapts to a reference set
PROMPT_STEP_SECONDS = 0.002  # more of it, if it goes through a text tower: many small products
# Of a training on cached embeddings: seconds of a client in a round and of a step beside its
# products, operations of a step for each row and number that is trained, and a core's operations.
CLIENT_SECONDS, BARE_STEP_SECONDS, FLOPS_PER_PARAMETER, CORE_FLOPS_PER_SECOND = 1e-3, 2e-4, 10, 5e10
MATRIX_SIDE, SPEED_TRIALS = 1024, 5  # of the matrices that this machine's speed is taken from


def describe_requirements(settings: Sequence[Settings]) -> list[str]:
    """A line for each data set and encoder, and one for the time that all of it takes."""
    lines = []
    entries = catalogue()
    for name, root in dict.fromkeys(
        (run_settings.data, str(run_settings.source.get("root", ""))) for run_settings in settings
    ):
        if name in entries:
            lines.append(_describe_data(entries[name], root))
    for encoder in dict.fromkeys(run_settings.encoder for run_settings in settings):
        kind, _, place = encoder.partition(":")
        if kind == "openai" and not Path(place).exists():
            lines.append(
                f"encoder {encoder}: {place} is NOT there; put OpenAI's weights there as "
                ".safetensors, with tokenizer.json (docs/how-to/data.md)"
            )
        if kind == "hf" and not Path(place).is_dir():
            lines.append(f"encoder {encoder}: from the Hub, or a copy on disk by --encoder hf:DIR")
    trainings = sum(
        len(run_settings.seeds) * _n_trainings(run_settings, entries.get(run_settings.data))
        for run_settings in settings
    )
    lines.append(f"{len(settings)} runs, {trainings} trainings: {_describe_time(settings, entries)}")
    return lines


def _describe_data(entry: Entry, root: str) -> str:
    if root.startswith("hub:"):
        return f"data {entry.name}: {root} is downloaded"
    if not root:
        return f"data {entry.name}: " + ("comes with fedvlm" if entry.place else entry.home)
    if Path(root).exists():
        return f"data {entry.name}: {root} is there"
    return f"data {entry.name}: {root} is NOT there; put {entry.shape} (from {entry.home})"


def _n_trainings(settings: Settings, entry: Entry | None) -> int:
    if settings.protocol == "leave-one-domain-out" or settings.target == (EVERY_TARGET,):
        return max(1, len(entry.domains)) if entry else 1
    return max(1, len(settings.counts))


def _describe_time(settings: Sequence[Settings], entries: dict[str, Entry]) -> str:
    able = [
        run_settings
        for run_settings in settings
        if _flops_per_image(run_settings) and (e := entries.get(run_settings.data)) and e.total
    ]
    if not able:
        return "how long is not known for these data and this encoder"
    seconds = estimate_seconds(able, entries, _measure_speed())
    unknown_data = sorted(
        {run_settings.data for run_settings in settings} - {run_settings.data for run_settings in able}
    )
    suffix = f", and more for {', '.join(unknown_data)}" if unknown_data else ""
    return f"roughly {format_duration(seconds)}{suffix} (operations counted, at this machine's speed; not measured)"


def estimate_seconds(settings: Sequence[Settings], entries: Mapping[str, Entry], speed: float) -> float:
    """Seconds that runs take together; speed is in operations a second."""
    encoded: set[tuple[str, str]] = set()
    seconds = 0.0
    for run_settings in settings:
        entry = entries[run_settings.data]
        seconds += RUN_SECONDS
        if (run_settings.data, run_settings.encoder) not in encoded:
            encoded.add((run_settings.data, run_settings.encoder))
            seconds += _n_samples(run_settings, entry) * _flops_per_image(run_settings) / speed
        times = min(run_settings.method.rounds, SMOKE_ROUNDS) if run_settings.smoke else run_settings.method.rounds
        n_trainings = len(run_settings.seeds) * _n_trainings(run_settings, entry)
        seconds += n_trainings * times * _round_seconds(run_settings, entry, speed)
    return seconds


def _flops_per_image(settings: Settings) -> float:
    """Operations of an image's way through the encoder; 0 if they are not known."""
    name = settings.encoder.partition(":")[2].rstrip("/").rpartition("/")[2] or settings.encoder
    name = name.removesuffix(".safetensors")
    return RESNET_FLOPS.get(name) or (_forward_flops(TOWER_SHAPES[name]) if name in TOWER_SHAPES else 0.0)


def _n_samples(settings: Settings, entry: Entry) -> int:
    smoke_size = max(SMOKE_SAMPLES, SMOKE_SAMPLES_PER_CLASS * len(entry.classes))
    return min(smoke_size, entry.total) if settings.smoke else entry.total


def _round_seconds(settings: Settings, entry: Entry, speed: float) -> float:
    """Seconds of a round: its steps, and passes through towers."""
    divisor = 2 if settings.protocol == BaseToNew.name else 1  # of the classes
    classes = max(1, len(entry.classes) // divisor)
    train = settings.clients.ratios[0] * _n_samples(settings, entry) / divisor
    if settings.clients.shots:
        n_domains = 1 if settings.clients.partition == "pathological" else max(1, len(entry.domains))
        train = min(train, settings.clients.shots * classes * n_domains)
    plan = schedule(settings.method)
    visits = settings.fraction * plan.local_epochs * train
    # a client of few rows has steps of few rows
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
    """Seconds that a training takes on one core, roughly: to know long from short needs no more."""
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
    """Operations of one pass through a transformer."""
    tokens, width, layers = tower
    return 2.0 * layers * (12 * tokens * width**2 + 2 * tokens**2 * width)


def _measure_speed() -> float:
    """Operations a second of a matrix product, the best of a few."""
    matrix = torch.ones(MATRIX_SIDE, MATRIX_SIDE)
    best = float("inf")
    for _ in range(SPEED_TRIALS):
        started = perf_counter()
        matrix @ matrix
        best = min(best, perf_counter() - started)
    return 2 * MATRIX_SIDE**3 / best


def format_duration(seconds: float) -> str:
    """A time in its largest unit."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} seconds"
