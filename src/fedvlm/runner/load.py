"""Load the samples of a run: open data and encoder, and embed what the cache lacks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvlm.core import Method
from fedvlm.data import open_dataset
from fedvlm.data.arrays import IN_MEMORY
from fedvlm.data.sources import SourceSubset
from fedvlm.data.table import Dataset, EmbeddedTable, select_columns, with_test_data
from fedvlm.encoders import Encoder, WarningEncoder, encoders, open_encoder
from fedvlm.encoders.cache.embed import EmbedResult, Precision, embed
from fedvlm.encoders.lazy_rows import stream_images
from fedvlm.encoders.store import Store
from fedvlm.encoders.text import add_descriptions
from fedvlm.errors import SettingsError
from fedvlm.runner.settings import Settings

if TYPE_CHECKING:
    from fedvlm.maths.image_tower import ImageTower
    from fedvlm.maths.text_tower import TextTower

Progress = Callable[[str, int, int], None]  # what is going on, done, total
SMOKE_SAMPLES = 600
SMOKE_SAMPLES_PER_CLASS = 12  # at least, on average, so that every class has training samples
SMOKE_ROUNDS = 3
SMOKE_CLIENTS = 10
SMOKE_MIN_SAMPLES = 1  # of a Dirichlet client: a small subset does not suffice for more


def load(settings: Settings, progress: Progress) -> tuple[EmbeddedTable, list[str]]:
    """Return the embedded samples of a run, and warnings about them."""
    rows, notes = _load_data(settings, progress)
    others = {}
    for name in settings.protocol_settings.get("test_data", ()):
        if settings.encoder.startswith("store:") and not name.startswith("store:"):
            problem = f"test_data = {name!r} cannot be embedded, because the training data are {settings.encoder}"
            raise SettingsError(f"{problem}; name a store with embeddings of the same encoder, as store:FILE")
        place = {"encoder" if name.startswith("store:") else "data": name}
        other = replace(settings, **place, source={}, descriptions="", texts="", protocol_settings={})
        others[name], more_notes = _load_data(other, progress)
        notes = [*notes, *(f"{name}: {note}" for note in more_notes)]
    return (with_test_data(rows, others) if others else rows), notes


def _load_data(settings: Settings, progress: Progress) -> tuple[EmbeddedTable, list[str]]:
    """Return one embedded data set, and warnings about it; a store holds it already."""
    text_files = (settings.descriptions, settings.texts)
    if settings.encoder.startswith("store:"):
        store = open_encoder(settings.encoder, **settings.source)
        assert isinstance(store, Store)
        return add_descriptions(store.embedded, store, *text_files), []
    dataset = open_data(settings.data, settings.source)
    if settings.smoke:
        dataset = smoke_dataset(dataset)
    encoder, notes = open_encoder_with_notes(settings.encoder, settings.access)
    rows, extra_notes = embed_dataset(settings, dataset, encoder, progress)
    return rows, [*dataset.notes, *notes, *extra_notes]


class Loader:
    """Load samples for several runs, once for all runs with the same data."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[EmbeddedTable, list[str]]] = {}

    def __call__(self, settings: Settings, progress: Progress) -> tuple[EmbeddedTable, list[str]]:
        names = ("data", "source", "encoder", "access", "precision", "descriptions", "texts", "protocol_settings")
        key_values = [getattr(settings, name) for name in names]
        key = repr([*key_values, settings.smoke, sorted(settings.method.traits.needs)])
        if key not in self.known:
            self.known[key] = load(settings, progress)
        return self.known[key]


def embed_dataset(
    settings: Settings, dataset: Dataset, encoder: Encoder, progress: Progress
) -> tuple[EmbeddedTable, list[str]]:
    """Embed a data set, with all that a method needs of the encoder."""
    method = settings.method
    check_needs(method, encoder.name, encoder.offers)
    done = encode(dataset, encoder, "patches" in method.traits.needs, settings.precision, progress)
    names = tower_classes(dataset.classes, dataset.findings is not None)
    text, image = open_towers(encoder, names, dataset.templates[0], method.traits.needs)
    images = None
    if image is not None:
        content = done.embedded.content
        images = stream_images(dataset.source, done.rows, content, encoder.preprocess)
    rows = replace(done.embedded, text_tower=text, image_tower=image, images=images)
    rows = add_descriptions(rows, encoder, settings.descriptions, settings.texts)
    return rows, skipped_messages(done)


def tower_classes(classes: Sequence[str], multi_label: bool) -> Sequence[str]:
    """Return the classes of a text tower; with several findings per image "no FINDING" and "FINDING" in turn."""
    return [name for finding in classes for name in (f"no {finding}", finding)] if multi_label else classes


def open_towers(
    encoder: Encoder, classes: Sequence[str], template: str, needs: Collection[str]
) -> "tuple[TextTower | None, ImageTower | None]":
    """Return the text and image towers that a method needs of an encoder."""
    box: Any = encoder  # has them if it offers them, which `meet` has seen to
    text = box.text_tower(classes, template) if "text tower" in needs else None
    return text, box.image_tower() if "image tower" in needs else None


def check_needs(method: Method, encoder: str, offered: Collection[str]) -> None:
    """Refuse a method that needs more of an encoder than it offers."""
    if missing := sorted(method.traits.needs - set(offered)):
        others = [kind for name, kind in encoders().items() if not encoder.startswith(name)]
        able = ", ".join(kind.form for kind in others if missing[0] in kind.offers)
        use = f"use one of {able}"
        if missing[0] == "text" and encoder == IN_MEMORY:
            use = "give text=, (classes, dim) of the class names"
        headed = missing[0] == "text" and "head" in {field.name for field in fields(method)}
        use += ", or set head = 'random'" if headed else ""
        raise SettingsError(f"{method.name} needs {missing[0]} of the encoder, which {encoder} does not offer; {use}")


def open_data(data: str, source: Mapping[str, Any]) -> Dataset:
    """Open a data set; `templates` and `negative_templates` in `source` replace its prompt templates."""
    names = ("templates", "negative_templates")
    options = {key: value for key, value in source.items() if key not in names}
    given: dict[str, Any] = {key: _check_templates(key, source[key]) for key in names if key in source}
    dataset = open_dataset(data, **options)
    if "negative_templates" in given and dataset.findings is None:
        raise SettingsError("source.negative_templates is for data with several findings per image; leave it out")
    return replace(dataset, **given)


def _check_templates(key: str, value: Any) -> tuple[str, ...]:
    sentences = [value] if isinstance(value, str) else value
    if (
        not isinstance(sentences, list | tuple)
        or not sentences
        or any("{}" not in str(sentence) for sentence in sentences)
    ):
        example = "['a photo of a {}.']"
        raise SettingsError(f"source.{key} must be sentences with {{}} for the class name, as {example}; got {value!r}")
    return tuple(map(str, sentences))


def open_encoder_with_notes(encoder: str, access: Mapping[str, Any]) -> tuple[Encoder, list[str]]:
    """Open an encoder; also return a list that collects its warnings, as of a changed remote encoder."""
    notes: list[str] = []
    opened = open_encoder(encoder, **access)
    if isinstance(opened, WarningEncoder):
        opened.warn = notes.append
    return opened, notes


def encode(dataset: Dataset, encoder: Encoder, patches: bool, precision: Precision, progress: Progress) -> EmbedResult:
    report = partial(progress, "embedding")
    return embed(dataset, encoder, patches=patches, precision=precision, progress=report)


def skipped_messages(done: EmbedResult) -> list[str]:
    return [f"skipped {name}: {reason}" for name, reason in done.skipped]


def smoke_subset(rows: Dataset | EmbeddedTable) -> np.ndarray[Any, Any]:
    """Return the indices of a small subset that keeps every class, domain and client in proportion."""
    count = len(rows.labels)  # a label may stand for a pattern of findings
    order = np.lexsort((rows.labels, rows.clients, rows.domains))
    max_samples = max(SMOKE_SAMPLES, SMOKE_SAMPLES_PER_CLASS * len(rows.classes))
    step = max(1, -(-count // max_samples))
    chosen = order[::step]
    # A fixed step may miss classes that alternate.
    missed = order[~np.isin(rows.labels[order], rows.labels[chosen])]
    return np.sort(np.concatenate([chosen, missed[::step]]))


def smoke_dataset(dataset: Dataset) -> Dataset:
    return subset_dataset(dataset, smoke_subset(dataset))


def subset_dataset(dataset: Dataset, keep: np.ndarray[Any, Any]) -> Dataset:
    return replace(dataset, source=SourceSubset(dataset.source, keep), **select_columns(dataset, keep))


def shrink_for_smoke(settings: Settings, rows: EmbeddedTable) -> tuple[Settings, EmbeddedTable]:
    """Return settings and samples of a smoke run: everything is exercised, nothing takes long."""
    small = rows.select(smoke_subset(rows))
    method = settings.method
    if "rounds" in {field.name for field in fields(method)}:
        method = replace(method, rounds=min(method.rounds, SMOKE_ROUNDS))
    limits = {"count": SMOKE_CLIENTS, "min_samples": SMOKE_MIN_SAMPLES}
    smaller = {name: min(getattr(settings.clients, name), limit) for name, limit in limits.items()}
    clients = replace(settings.clients, **smaller)
    return replace(settings, method=method, clients=clients), small
