"""What a site brings to a training: a world of its own rows and no others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.data.members import Member
from fedvlm.data.table import Dataset, Embedded, matched, text
from fedvlm.deploy.kits import SiteKit
from fedvlm.deploy.policy import Policy
from fedvlm.deploy.reasons import Said
from fedvlm.engines.client import World
from fedvlm.errors import DataError, FederationError, SettingsError, listing
from fedvlm.evaluate.reference import wants_reference
from fedvlm.runner.load import embedded, encode, load, open_data, reach, skipped
from fedvlm.runner.prepare import (
    Prepared,
    check_rows,
    frozen_of,
    prepare,
    prepare_one,
    set_aside,
)
from fedvlm.runner.provenance import provenance
from fedvlm.runner.settings import Settings
from fedvlm.seeds import numbers
from fedvlm.storage.sealed import write_tensors

OWN_SEED = 0  # of the division at a site, whatever the seed of a training


@dataclass(frozen=True)
class Own:
    world: World
    labels: NDArray[np.int64]  # of the training rows
    encoder: str  # name and fingerprint
    title: str  # of the classifier that comes of it
    about: Mapping[str, Any]  # what its card tells of rows and code
    trial: bool = False  # of a race: no test row is looked at, and no classifier comes of it


def own_rows(
    kit: SiteKit,
    settings: Settings,
    spec: Mapping[str, Any],
    reference: Tensor | None,
    policy: Policy,
) -> Own:
    """The world of one training at this site; classes and method are the server's to say, how rows
    are divided only as far as the policy says so."""
    seed = int(spec["seed"])
    if not kit.plays:
        policy.divide(settings.clients)
    rows = load(settings, quiet)[0] if kit.plays else _site(kit, settings, spec["classes"])
    check_rows(settings, rows)
    if kit.plays:
        prepared = prepare(settings, rows, seed)
        _check_plays(prepared, kit.plays)
    else:
        own = not kit.encoder.startswith("store:")
        clients = set_aside(settings.clients) if own else settings.clients
        deal = seed if policy.server_divides else OWN_SEED
        mine = replace(settings, clients=clients)
        prepared = prepare_one(mine, rows, kit.name, deal, frozen_of(rows, seed))
        prepared = replace(prepared, seed=seed)
    id = kit.plays or kit.name
    prepared = _few(prepared, id, policy.max_samples)
    if trial := "race" in spec:
        prepared = _untested(prepared, id)
    world = prepared.own_world(id, kit.name, entropy=not kit.plays)
    world = with_reference(world, reference)
    labels = rows.labels[prepared.division.members[id].train]
    title = f"{settings.method.name}-{spec['training']}-{seed}"
    about = {"identity": settings.identity(), "data": rows.name, "rows": rows.fingerprint}
    return Own(world, labels, rows.encoder, title, about | provenance(), trial)


def _few(prepared: Prepared, id: str, most: int) -> Prepared:
    """The site's own budget of training rows, the same ones in every training."""
    member = prepared.division.members[id]
    if not most or len(member.train) <= most:
        return prepared
    drawn = numbers("row budget", OWN_SEED, id).permutation(member.train)[:most]
    return _with(prepared, id, replace(member, train=np.sort(drawn)))


def _untested(prepared: Prepared, id: str) -> Prepared:
    """A trial has no test rows, so that nothing can be chosen by them."""
    return _with(prepared, id, replace(prepared.division.members[id], test=np.zeros(0, np.int64)))


def _with(prepared: Prepared, id: str, member: Member) -> Prepared:
    members = {**prepared.division.members, id: member}
    return replace(prepared, division=replace(prepared.division, members=members))


def _check_plays(prepared: Prepared, plays: str) -> None:
    members = prepared.division.members
    if plays not in members:
        raise SettingsError(
            f"plays = {plays!r} is no client of this experiment; it has {listing(list(members))}"
        )


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


def _site(kit: SiteKit, settings: Settings, classes: list[str]) -> Embedded:
    """The site's own data through its own encoder, under the experiment's classes."""
    settings = replace(settings, descriptions=kit.descriptions, texts=kit.texts)
    if not kit.data and not kit.encoder.startswith("store:"):
        raise SettingsError(f"site {kit.name} has no data; name it, as --data IMAGES")
    if kit.encoder.startswith("store:"):
        alone = replace(settings, encoder=kit.encoder, source=kit.source, smoke=False)
        return stored(load(alone, quiet)[0], classes, kit.name)
    source = {**kit.source}
    if "templates" in settings.source:
        source["templates"] = settings.source["templates"]
    dataset = open_data(kit.data, source)
    encoder, _ = reach(kit.encoder, kit.access)
    dataset = replace(dataset, classes=tuple(classes), labels=_labels(dataset, classes, kit.name))
    return embedded(settings, dataset, encoder, quiet)[0]


def named(name: str) -> str:
    """A class name as data sets have it."""
    return text(name).replace("_", " ")


def _labels(dataset: Dataset | Embedded, classes: list[str], site: str) -> NDArray[np.int64]:
    """The site's labels as the experiment counts them; a site need not have every class."""
    number = np.array(matched(dataset.classes, classes), dtype=np.int64)
    if strange := [dataset.classes[i] for i in np.flatnonzero(number < 0).tolist()]:
        raise Said(
            "classes",
            f"site {site} has images of {strange[0]!r}, which is no class of this experiment; "
            f"its classes are {listing(classes)}",
            count=len(strange),
        )
    out: NDArray[np.int64] = number[dataset.labels]
    return out


def stored(rows: Embedded, classes: list[str], site: str) -> Embedded:
    """Rows of a store under the experiment's classes, with their texts in its order."""
    labels = _labels(rows, classes, site)
    held = [named(name) for name in rows.classes]
    if rows.text is not None and (missing := sorted(set(classes) - set(held))):
        raise DataError(
            f"the store of site {site} has no text of class {missing[0]!r}; "
            "embed the images with an encoder instead, or add the class to the store"
        )
    order = [] if rows.text is None else [held.index(name) for name in classes]
    return replace(
        rows,
        classes=tuple(classes),
        labels=labels,
        text=None if rows.text is None else rows.text[order],
    )


def embed_early(kit: SiteKit, progress: Callable[[str, int, int], None]) -> list[str]:
    """Embeds the site's images before the first request, and says what is wrong with them."""
    if kit.plays or kit.encoder.startswith("store:"):
        return []
    if not kit.data or not kit.encoder:
        raise SettingsError(
            f"site {kit.name} needs its images and an encoder: "
            f"fedvlm deploy site {kit.folder} --data IMAGES --encoder demo"
        )
    encoder, notes = reach(kit.encoder, kit.access)
    done = encode(open_data(kit.data, kit.source), encoder, False, "float32", progress)
    return [*notes, *skipped(done)]


def write_reference(
    folder: Path, data: str, encoder: str, patches: bool, progress: Callable[[str, int, int], None]
) -> int:
    """Public rows, without labels, for the server to send; their number."""
    from fedvlm.deploy.server import REFERENCE

    box, _ = reach(encoder, {})
    rows = encode(open_data(data, {}), box, patches, "float32", progress).embedded
    values = {"image": rows.x}
    if rows.patches is not None:
        values["patches"] = rows.patches[:]
    write_tensors(folder / REFERENCE, values, {"encoder": rows.encoder})
    return len(rows.x)
