"""Settings to embedded rows: open the data, open the encoder, take what the cache has."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedvlm.core import Method
from fedvlm.data import open_dataset
from fedvlm.data.arrays import MEMORY
from fedvlm.data.sources import Chosen
from fedvlm.data.table import Dataset, Embedded
from fedvlm.encoders import encoders, fingerprint, open_encoder
from fedvlm.encoders.cache.embed import Outcome, Precision, embed
from fedvlm.encoders.cache.stream import stream
from fedvlm.encoders.descriptions import describe_rows
from fedvlm.encoders.interface import Encoder
from fedvlm.encoders.store import Store
from fedvlm.errors import SettingsError
from fedvlm.runner.settings import Settings

if TYPE_CHECKING:
    from fedvlm.maths.prompts import TextTower
    from fedvlm.maths.towers import ImageTower

Progress = Callable[[str, int, int], None]  # what is going on, done, total
FEW_ROWS = 600  # of a smoke run
FEW_OF_CLASS = 12  # at least, on average: so that every class has some to train on
FEW_ROUNDS = 3
FEW_CLIENTS = 10
FEWEST = 1  # training rows a Dirichlet client has at least: few rows cannot give it more


def load(settings: Settings, progress: Progress) -> tuple[Embedded, list[str]]:
    """The rows of a run, and what its owner should know of them; a store has them already."""
    said = (settings.descriptions, settings.texts)
    if settings.encoder.startswith("store:"):
        store = open_encoder(settings.encoder, **settings.source)
        assert isinstance(store, Store)
        return describe_rows(store.embedded, store, *said), []
    dataset = open_data(settings.data, settings.source)
    if settings.smoke:
        dataset = sample(dataset)
    encoder, notes = reach(settings.encoder, settings.access)
    rows, more = embedded(settings, dataset, encoder, progress)
    return rows, [*dataset.notes, *notes, *more]


class Loader:
    """Reads the rows of several runs, once for all that have the same."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Embedded, list[str]]] = {}

    def __call__(self, settings: Settings, progress: Progress) -> tuple[Embedded, list[str]]:
        names = ("data", "source", "encoder", "access", "precision", "descriptions", "texts")
        asked = [getattr(settings, name) for name in names]
        key = repr([*asked, settings.smoke, sorted(settings.method.traits.needs)])
        if key not in self.known:
            self.known[key] = load(settings, progress)
        return self.known[key]


def embedded(
    settings: Settings, dataset: Dataset, encoder: Encoder, progress: Progress
) -> tuple[Embedded, list[str]]:
    """A data set through an encoder, with all that a method needs of it."""
    method = settings.method
    meet(method, encoder.name, encoder.offers)
    done = encode(dataset, encoder, "patches" in method.traits.needs, settings.precision, progress)
    text, image = towers(encoder, dataset.classes, dataset.templates[0], method.traits.needs)
    images = None
    if image is not None:
        content = done.embedded.content
        images = stream(dataset.source, done.rows, content, encoder.preprocess)
    rows = replace(done.embedded, text_tower=text, image_tower=image, images=images)
    rows = describe_rows(rows, encoder, settings.descriptions, settings.texts)
    return rows, skipped(done)


def towers(
    encoder: Encoder, classes: Sequence[str], template: str, needs: Collection[str]
) -> "tuple[TextTower | None, ImageTower | None]":
    """What a method needs of an open encoder beyond embeddings."""
    box: Any = encoder  # has them if it offers them, which `meet` has seen to
    return (
        box.text_tower(classes, template) if "text tower" in needs else None,
        box.image_tower() if "image tower" in needs else None,
    )


def meet(method: Method, encoder: str, offered: Collection[str]) -> None:
    """Refuses a method that asks more of an encoder than it offers."""
    if missing := sorted(method.traits.needs - set(offered)):
        able = ", ".join(
            kind.form
            for name, kind in encoders().items()
            if missing[0] in kind.offers and not encoder.startswith(name)
        )
        use = f"use one of {able}"
        if missing[0] == "text" and encoder == MEMORY:
            use = "give text=, (classes, dim) of the class names"
        headed = missing[0] == "text" and "head" in {one.name for one in fields(method)}
        raise SettingsError(
            f"{method.name} needs {missing[0]} of the encoder, which {encoder} does not offer; "
            f"{use}" + (", or set head = 'random'" if headed else "")
        )


def open_data(data: str, source: Mapping[str, Any]) -> Dataset:
    """A data set by name; `templates` in `source` replace its own sentences around a class name."""
    options = dict(source)
    templates = options.pop("templates", None)
    dataset = open_dataset(data, **options)
    if templates is None:
        return dataset
    many = [templates] if isinstance(templates, str) else templates
    if not isinstance(many, list | tuple) or not many or any("{}" not in str(one) for one in many):
        raise SettingsError(
            f"source.templates = {templates!r} does not fit; it takes sentences with {{}} in the "
            "place of the class name, as ['a photo of a {}.']"
        )
    return replace(dataset, templates=tuple(map(str, many)))


def reach(encoder: str, access: Mapping[str, Any]) -> tuple[Encoder, list[str]]:
    """An encoder by name, and a list that it adds to when it drifts."""
    notes: list[str] = []
    box = {"warn": notes.append} if encoder.startswith("http") else {}
    return open_encoder(encoder, **access, **box), notes


def encode(
    dataset: Dataset, encoder: Encoder, patches: bool, precision: Precision, progress: Progress
) -> Outcome:
    return embed(
        dataset,
        encoder,
        fingerprint=fingerprint(encoder),
        patches=patches,
        precision=precision,
        progress=lambda done, total: progress("embedding", done, total),
    )


def skipped(done: Outcome) -> list[str]:
    return [f"skipped {name}: {reason}" for name, reason in done.skipped]


def columns(rows: Any, keep: np.ndarray[Any, Any]) -> dict[str, Any]:
    names = ("labels", "domains", "clients", "splits", "groups")
    return {key: getattr(rows, key)[keep] for key in names if getattr(rows, key) is not None}


def few(rows: Dataset | Embedded) -> np.ndarray[Any, Any]:
    """Row numbers of a small sample that keeps every class, domain and client in proportion."""
    count = len(rows.labels)
    order = np.lexsort((rows.labels, rows.clients, rows.domains))
    most = max(FEW_ROWS, FEW_OF_CLASS * len(rows.classes))
    step = max(1, -(-count // most))
    kept = order[::step]
    # Where classes take turns, a step may always miss some.
    left = order[~np.isin(rows.labels[order], rows.labels[kept])]
    return np.sort(np.concatenate([kept, left[::step]]))


def sample(dataset: Dataset) -> Dataset:
    keep = few(dataset)
    return replace(dataset, source=Chosen(dataset.source, keep), **columns(dataset, keep))


def thin(settings: Settings, rows: Embedded) -> tuple[Settings, Embedded]:
    """A smoke run's settings and rows: everything is exercised, nothing takes long."""
    keep = few(rows)
    small = replace(
        rows,
        x=rows.x[keep],
        content=[rows.content[i] for i in keep],
        patches=None if rows.patches is None else rows.patches[keep],
        images=None if rows.images is None else rows.images.take(torch.from_numpy(keep)),
        **columns(rows, keep),
    )
    method = settings.method
    if "rounds" in {one.name for one in fields(method)}:
        method = replace(method, rounds=min(method.rounds, FEW_ROUNDS))
    few_of = settings.clients
    clients = replace(
        few_of, count=min(few_of.count, FEW_CLIENTS), min_samples=min(few_of.min_samples, FEWEST)
    )
    return replace(settings, method=method, clients=clients), small
