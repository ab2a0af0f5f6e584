"""What a site brings to a training: a world of its own rows and no others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.data.descriptions import dealt
from fedvlm.data.federation import Member, Rows, divide
from fedvlm.data.table import Dataset, Embedded, text
from fedvlm.deploy.kits import SiteKit
from fedvlm.engines.client import World
from fedvlm.engines.flower.client import own_training
from fedvlm.errors import DataError, FederationError, SettingsError, listing
from fedvlm.evaluate.reference import wants_reference
from fedvlm.runner.load import embedded, encode, load, opened, reach, skipped
from fedvlm.runner.run import check, frozen
from fedvlm.runner.settings import Settings
from fedvlm.storage.sealed import write_tensors

Say = Callable[[str], None]


@dataclass(frozen=True)
class Own:
    world: World
    labels: NDArray[np.int64]  # of the training rows
    encoder: str  # name and fingerprint
    title: str  # of the classifier that comes of it


def own_rows(
    kit: SiteKit, settings: Settings, spec: Mapping[str, Any], reference: Tensor | None, say: Say
) -> Own:
    """The world of one training at this site; classes and method are the server's to say."""
    seed = int(spec["seed"])
    if kit.plays:
        rows, _ = load(settings, quiet)
        members = divide(rows, settings.clients, seed, settings.target).members
        member = _member(members, kit.plays)
        texts = dealt(rows.texts, members)
    else:
        rows, table = _site(kit, settings, spec["classes"])
        alone = replace(settings.clients, by="own")
        member = divide(table, alone, seed).members[kit.name]
        texts = dealt(rows.texts, [kit.name])
    check(settings, rows)
    world = World(
        settings.method,
        frozen(rows, seed),
        rows.view(settings.method.traits.needs),
        torch.from_numpy(rows.labels),
        {kit.name: member},
        seed,
        texts={kit.name: texts[member.id]} if texts else {},
        channel=settings.channel,
        entropy=not kit.plays,
        metrics=settings.protocol == "source-target",
    )
    world = with_reference(own_training(world, kit.name).world, reference)
    labels = rows.labels[member.train]
    title = f"{settings.method.name}-{spec['job']}-{seed}"
    return Own(world, labels, rows.encoder, title)


def _member(members: Mapping[str, Member], plays: str) -> Member:
    if plays not in members:
        raise SettingsError(
            f"plays = {plays!r} is no client of this experiment; it has {listing(list(members))}"
        )
    return members[plays]


def with_reference(world: World, reference: Tensor | None) -> World:
    """The rows everyone may see, behind the site's own."""
    if not wants_reference(world.method):
        return world
    if reference is None:
        raise FederationError(
            f"the method {world.method.name} needs reference rows, and the server sent none; "
            "the server's folder must hold them: fedvlm deploy reference"
        )
    if not isinstance(world.x, Tensor) or reference.shape[1:] != world.x.shape[1:]:
        raise FederationError(
            f"the server's reference rows are of shape {tuple(reference.shape[1:])}, this site's "
            f"of {tuple(world.x.shape[1:])}; make the reference with the same encoder"
        )
    rows = len(world.x)
    return replace(
        world,
        x=torch.cat([world.x, reference.to(world.x.dtype)]),
        y=torch.cat([world.y, world.y.new_full((len(reference),), -1)]),
        reference=np.arange(rows, rows + len(reference)),
    )


def quiet(what: str, done: int, total: int) -> None:
    """A site's process has nobody who watches a bar."""


def _site(kit: SiteKit, settings: Settings, classes: list[str]) -> tuple[Embedded, Rows]:
    """The site's own data through its own encoder, under the experiment's classes."""
    settings = replace(settings, descriptions=kit.descriptions, texts=kit.texts)
    if not kit.data and not kit.encoder.startswith("store:"):
        raise SettingsError(f"site {kit.name} has no data; name it, as --data IMAGES")
    if kit.encoder.startswith("store:"):
        alone = replace(settings, encoder=kit.encoder, source=kit.source, smoke=False)
        rows, _ = load(alone, quiet)
        table = _table(rows, kit.name)
        return stored(rows, classes, kit.name), table
    source = {**kit.source}
    if "templates" in settings.source:
        source["templates"] = settings.source["templates"]
    dataset = opened(kit.data, source)
    encoder, _ = reach(kit.encoder, kit.access)
    own = dataset.classes
    dataset = replace(dataset, classes=tuple(classes), labels=_labels(dataset, classes, kit.name))
    rows, _ = embedded(settings, dataset, encoder, quiet)
    back = {classes.index(named(name)): place for place, name in enumerate(own)}
    labels = np.array([back[label] for label in rows.labels.tolist()], dtype=np.int64)
    return rows, _table(replace(rows, classes=own, labels=labels), kit.name)


def named(name: str) -> str:
    """A class name as data sets have it."""
    return text(name).replace("_", " ")


def _labels(dataset: Dataset | Embedded, classes: list[str], site: str) -> NDArray[np.int64]:
    """The site's labels as the experiment counts them; a site need not have every class."""
    for name in dataset.classes:
        if named(name) not in classes:
            raise DataError(
                f"site {site} has pictures of {name!r}, which is no class of this experiment; its "
                f"classes are {listing(classes)}"
            )
    number = np.array([classes.index(named(name)) for name in dataset.classes], dtype=np.int64)
    out: NDArray[np.int64] = number[dataset.labels]
    return out


def stored(rows: Embedded, classes: list[str], site: str) -> Embedded:
    """Rows of a store under the experiment's classes, with their texts in its order."""
    labels = _labels(rows, classes, site)
    held = [named(name) for name in rows.classes]
    if rows.text is not None and (missing := sorted(set(classes) - set(held))):
        raise DataError(
            f"the store of site {site} has no text of class {missing[0]!r}; "
            "embed the pictures with an encoder instead, or add the class to the store"
        )
    order = [] if rows.text is None else [held.index(name) for name in classes]
    return replace(
        rows,
        classes=tuple(classes),
        labels=labels,
        text=None if rows.text is None else rows.text[order],
    )


def _table(rows: Embedded, site: str) -> Rows:
    """As `divide` wants it, with the site as the only client."""
    alone = np.full(len(rows.labels), site)
    return Rows(rows.classes, rows.labels, rows.domains, alone, rows.splits, rows.content)


def prepare(kit: SiteKit, told: Callable[[str, int, int], None]) -> list[str]:
    """Embeds the site's pictures before the first request, and says what is wrong with them."""
    if kit.plays or kit.encoder.startswith("store:"):
        return []
    if not kit.data or not kit.encoder:
        raise SettingsError(
            f"site {kit.name} needs its pictures and an encoder: "
            f"fedvlm deploy site {kit.folder} --data IMAGES --encoder demo"
        )
    encoder, notes = reach(kit.encoder, kit.access)
    done = encode(opened(kit.data, kit.source), encoder, False, "float32", told)
    return [*notes, *skipped(done)]


def write_reference(
    folder: Path, data: str, encoder: str, patches: bool, told: Callable[[str, int, int], None]
) -> int:
    """Public rows, without labels, for the server to send; their number."""
    from fedvlm.deploy.server import REFERENCE

    box, _ = reach(encoder, {})
    rows = encode(opened(data, {}), box, patches, "float32", told).embedded
    values = {"image": rows.x}
    if rows.patches is not None:
        values["patches"] = rows.patches[:]
    write_tensors(folder / REFERENCE, values, {"encoder": rows.encoder})
    return len(rows.x)
