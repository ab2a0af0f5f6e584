"""What runs need before they begin: data, where to get them, an encoder, and roughly how long."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

import torch

from fedvlm.core import schedule
from fedvlm.data.catalogue import Entry, catalogue
from fedvlm.evaluate.protocols import Training
from fedvlm.evaluate.protocols.base_to_new import BaseToNew
from fedvlm.evaluate.protocols.source_target import EACH as EVERY_TARGET
from fedvlm.runner.load import FEW_CLIENTS, FEW_OF_CLASS, FEW_ROUNDS, FEW_ROWS
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.settings import Settings

# Of CLIP's image towers: tokens, width, layers.
TOWERS = {
    "demo": (37, 128, 3),
    "clip-vit-base-patch32": (50, 768, 12),
    "clip-vit-base-patch16": (197, 768, 12),
    "clip-vit-large-patch14": (257, 1024, 24),
    "clip-vit-large-patch14-336": (577, 1024, 24),
}
RESNETS = {"RN50": 1.22e10, "RN101": 1.95e10, "RN50x4": 4.26e10}  # operations of an image, counted
TEXT, DEMO_TEXT = (20, 512, 12), (10, 128, 2)  # tokens of a usual prompt with its class name
BACK = 3  # a step forward and back, against one forward
# Seconds beside the operations of towers; docs/papers/results-speed.md says how they were measured.
RUN = 1.0  # of opening data and encoder, and of writing a record
ROUND = 0.015
STEP = 0.0006  # of a minibatch
REFERENCE = 8  # times that, of one that adapts to a reference set
PROMPT = 0.002  # more of it, if it goes through a text tower: many small products
# Of a training on cached embeddings: seconds of a client in a round and of a step beside its
# products, operations of a step for each row and number that is trained, and a core's operations.
CLIENT, BARE, EACH, SPEED = 1e-3, 2e-4, 10, 5e10
SIDE, TRIES = 1024, 5  # of the matrices that this machine's speed is taken from


def needs(settings: Sequence[Settings]) -> list[str]:
    """A line for each data set and encoder, and one for the time that all of it takes."""
    lines = []
    known = catalogue()
    for name, root in dict.fromkeys(
        (one.data, str(one.source.get("root", ""))) for one in settings
    ):
        if name in known:
            lines.append(_data(known[name], root))
    for encoder in dict.fromkeys(one.encoder for one in settings):
        kind, _, place = encoder.partition(":")
        if kind == "openai" and not Path(place).exists():
            lines.append(
                f"encoder {encoder}: {place} is NOT there; put OpenAI's weights there as "
                ".safetensors, with tokenizer.json (docs/how-to/data.md)"
            )
        if kind == "hf" and not Path(place).is_dir():
            lines.append(f"encoder {encoder}: from the Hub, or a copy on disk by --encoder hf:DIR")
    trainings = sum(len(one.seeds) * _trainings(one, known.get(one.data)) for one in settings)
    lines.append(f"{len(settings)} runs, {trainings} trainings: {_time(settings, known)}")
    return lines


def _data(entry: Entry, root: str) -> str:
    if root.startswith("hub:"):
        return f"data {entry.name}: {root} is downloaded"
    if not root:
        return f"data {entry.name}: " + ("comes with fedvlm" if entry.place else entry.home)
    if Path(root).exists():
        return f"data {entry.name}: {root} is there"
    return f"data {entry.name}: {root} is NOT there; put {entry.shape} (from {entry.home})"


def _trainings(one: Settings, entry: Entry | None) -> int:
    if one.protocol == "leave-one-domain-out" or one.target == (EVERY_TARGET,):
        return max(1, len(entry.domains)) if entry else 1
    return max(1, len(one.counts))


def _time(settings: Sequence[Settings], known: dict[str, Entry]) -> str:
    able = [one for one in settings if _image(one) and (e := known.get(one.data)) and e.total]
    if not able:
        return "how long is not known for these data and this encoder"
    seconds = foreseen(able, known, _speed())
    left = sorted({one.data for one in settings} - {one.data for one in able})
    more = f", and more for {', '.join(left)}" if left else ""
    return (
        f"roughly {span(seconds)}{more} (operations counted, at this machine's speed; not measured)"
    )


def foreseen(settings: Sequence[Settings], known: Mapping[str, Entry], speed: float) -> float:
    """Seconds that runs take together; speed is in operations a second."""
    encoded: set[tuple[str, str]] = set()
    seconds = 0.0
    for one in settings:
        entry = known[one.data]
        seconds += RUN
        if (one.data, one.encoder) not in encoded:
            encoded.add((one.data, one.encoder))
            seconds += _rows(one, entry) * _image(one) / speed
        times = min(one.method.rounds, FEW_ROUNDS) if one.smoke else one.method.rounds
        every = len(one.seeds) * _trainings(one, entry)
        seconds += every * times * _round(one, entry, speed)
    return seconds


def _image(one: Settings) -> float:
    """Operations of an image's way through the encoder; 0 if they are not known."""
    name = one.encoder.partition(":")[2].rstrip("/").rpartition("/")[2] or one.encoder
    name = name.removesuffix(".safetensors")
    return RESNETS.get(name) or (_forward(TOWERS[name]) if name in TOWERS else 0.0)


def _rows(one: Settings, entry: Entry) -> int:
    few = max(FEW_ROWS, FEW_OF_CLASS * len(entry.classes))
    return min(few, entry.total) if one.smoke else entry.total


def _round(one: Settings, entry: Entry, speed: float) -> float:
    """Seconds of a round: its steps, and passes through towers."""
    half = 2 if one.protocol == BaseToNew.name else 1  # of the classes
    classes = max(1, len(entry.classes) // half)
    train = one.clients.ratios[0] * _rows(one, entry) / half
    if one.clients.shots:
        each = 1 if one.clients.partition == "pathological" else max(1, len(entry.domains))
        train = min(train, one.clients.shots * classes * each)
    plan = schedule(one.method)
    visits = one.fraction * plan.local_epochs * train
    # a client of few rows has steps of few rows
    steps = max(visits / plan.batch_size, one.fraction * plan.local_epochs * _clients(one, entry))
    step = STEP * (REFERENCE if one.method.traits.reference else 1)
    seconds, needs = ROUND + step * steps, one.method.traits.needs
    if "image tower" in needs:
        seconds += BACK * visits * _image(one) / speed
    if "text tower" in needs:
        text = _forward(DEMO_TEXT if one.encoder == "demo" else TEXT)
        seconds += steps * (PROMPT + BACK * classes * text / speed)
    return seconds


def _clients(one: Settings, entry: Entry) -> int:
    if one.clients.partition == "domain":
        return max(1, len(entry.domains))
    return min(one.clients.count, FEW_CLIENTS) if one.smoke else one.clients.count


def training_time(prepared: Prepared, training: Training) -> float:
    """Seconds that a training takes on one core, roughly: to know long from short needs no more."""
    settings, method = prepared.settings, prepared.settings.method
    pace = schedule(method)
    rows = [len(prepared.division.members[id].train) for id in training.train]
    steps = sum(pace.local_epochs * -(-count // pace.batch_size) for count in rows)
    shared, local = method.init(prepared.frozen)
    numbers = sum(one.numel() for one in (*shared.values(), *local.values()))
    work = float(EACH * pace.batch_size * numbers)
    if "text tower" in method.traits.needs:
        work += BACK * len(prepared.frozen.classes) * _forward(TEXT)
    each = len(rows) * CLIENT + steps * (BARE + work / SPEED)
    return CLIENT + max(1, method.rounds) * settings.fraction * each


def _forward(tower: tuple[int, int, int]) -> float:
    """Operations of one pass through a transformer."""
    tokens, width, layers = tower
    return 2.0 * layers * (12 * tokens * width**2 + 2 * tokens**2 * width)


def _speed() -> float:
    """Operations a second of a matrix product, the best of a few."""
    one = torch.ones(SIDE, SIDE)
    best = float("inf")
    for _ in range(TRIES):
        begin = perf_counter()
        one @ one
        best = min(best, perf_counter() - begin)
    return 2 * SIDE**3 / best


def span(seconds: float) -> str:
    """A time in its largest unit."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} seconds"
