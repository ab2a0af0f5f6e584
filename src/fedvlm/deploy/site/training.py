"""Load a site's own samples for one training, and compare what comes of it with the site alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.classifier.personalised import Personalised
from fedvlm.core import MIN_CLASS_CLIENTS, Tensors, make, setting
from fedvlm.data.partition import ClientSplit
from fedvlm.data.table import Dataset, EmbeddedTable, align_labels, match_classes
from fedvlm.deploy.kits import SiteKit
from fedvlm.deploy.messages import ReportedError, normalise_class_name, training_key
from fedvlm.deploy.site.ledger import upload_cost
from fedvlm.deploy.site.policy import SCORE_STEPS, Policy
from fedvlm.deploy.site.snapshot import ChosenSamples, choose_samples
from fedvlm.engines.client import World, make_client, measure, predict
from fedvlm.errors import DataError, FederationError, SettingsError, join_names
from fedvlm.evaluate.protocols.contract import has_reference
from fedvlm.report.data_report import compare_correct, distances_to_rest, measure_images
from fedvlm.runner.load import embed_dataset, encode, load, open_data, open_encoder_with_notes, skipped_messages
from fedvlm.runner.manifest import provenance
from fedvlm.runner.prepare import (
    Prepared,
    check_samples,
    frozen_of,
    group_numbers,
    label_tensor,
    method_for,
    prepare,
    prepare_client,
    with_calibration,
)
from fedvlm.runner.settings import Settings
from fedvlm.seeds import numbers
from fedvlm.storage.files import slug

PARTITION_SEED = 0  # of the division at a site, whatever the seed of a training


@dataclass(frozen=True)
class SiteTraining:
    world: World
    labels: NDArray[np.int64]  # (samples,) or (samples, findings) of the training samples
    encoder: str  # name and fingerprint
    title: str  # of the classifier that comes of it
    origin: Mapping[str, Any]  # of the classifier, for its card: settings, data and code
    spec: Mapping[str, Any]  # as the server sent it
    is_trial: bool = False  # of a tuning search: it has no test samples and leaves no classifier
    samples: ChosenSamples | None = None  # of all splits, and how they differ from those of the last run
    groups: NDArray[np.int64] | None = None  # (samples,) number of the patient of each, if the data name them

    @property
    def n_classes(self) -> int:
        """Count the classes of the training samples, or the findings that some of them have."""
        return int((self.labels == 1).any(0).sum()) if self.labels.ndim == 2 else len(np.unique(self.labels))

    @property
    def upload_cost(self) -> float:
        return upload_cost(self.world.method, self.world.channel, len(self.labels))


def load_site_training(
    kit: SiteKit,
    settings: Settings,
    spec: Mapping[str, Any],
    reference: Tensor | None,
    policy: Policy,
    resumes: bool = True,  # a run that has begun here; else the data of today are taken, if they may be
) -> SiteTraining:
    """Load a site's samples for one training; how they are split is the site's choice, unless its policy leaves it."""
    seed = int(spec["seed"])
    if not kit.plays:
        policy.check_partition(settings.clients)
    rows = load(settings, ignore_progress)[0] if kit.plays else load_site_samples(kit, settings, spec["classes"])
    chosen = None
    if not kit.plays:
        has_noise = upload_cost(settings.method, settings.channel, len(rows.labels)) > 0
        folder = kit.folder / "state" / training_key(spec)
        chosen = choose_samples(folder, rows, resumes, has_noise, policy.min_class_samples)
        rows = chosen.rows
    check_samples(settings, rows)
    if kit.plays:
        prepared = prepare(settings, rows, seed)
        if kit.plays not in (members := prepared.partition.clients):
            names = join_names(list(members))
            raise SettingsError(f"plays = {kit.plays!r} is not a client of this experiment; it has {names}")
    else:
        embeds_images = not kit.encoder.startswith("store:")
        clients = with_calibration(settings.clients) if embeds_images else settings.clients
        partition_seed = seed if policy.server_divides else PARTITION_SEED
        site_settings = replace(settings, clients=clients)
        prepared = prepare_client(site_settings, rows, kit.name, partition_seed, frozen_of(rows, seed))
        prepared = replace(prepared, seed=seed)
    id = kit.plays or kit.name
    prepared = _limit_samples(prepared, id, policy.max_samples)
    if trial := "tuning" in spec:
        member = replace(prepared.partition.clients[id], test=np.zeros(0, np.int64))  # nothing is chosen by them
        prepared = _replace_member(prepared, id, member)
    world = prepared.own_world(id, kit.name, entropy=not kit.plays)
    world = with_reference(world, reference)
    train = prepared.partition.clients[id].train
    groups = group_numbers(rows)
    title = f"{settings.method.name}-{spec['training']}-{seed}"
    origin = {"identity": settings.identity(), "data": rows.name, "rows": rows.fingerprint, **provenance()}
    labels, of_train = label_tensor(rows).numpy()[train], None if groups is None else groups.numpy()[train]
    return SiteTraining(world, labels, rows.encoder, title, origin, spec, trial, chosen, of_train)


def _limit_samples(prepared: Prepared, id: str, limit: int) -> Prepared:
    """Limit the training samples to the site's maximum, the same ones in every training."""
    member = prepared.partition.clients[id]
    if not limit or max(len(member.train), len(member.unlabelled)) <= limit:
        return prepared
    train, unlabelled = (
        np.sort(numbers("row budget", PARTITION_SEED, id).permutation(rows)[:limit])
        for rows in (member.train, member.unlabelled)
    )
    return _replace_member(prepared, id, replace(member, train=train, unlabelled=unlabelled))


def _replace_member(prepared: Prepared, id: str, member: ClientSplit) -> Prepared:
    members = {**prepared.partition.clients, id: member}
    return replace(prepared, partition=replace(prepared.partition, clients=members))


def with_reference(world: World, reference: Tensor | None) -> World:
    """Append the public reference samples behind the site's own."""
    if not has_reference(world.method):
        return world
    if reference is None:
        raise FederationError(
            f"the method {world.method.name} needs reference samples, and the server sent none; the server's folder "
            "must hold them: fedvlm deploy reference"
        )
    if not isinstance(world.x, Tensor) or reference.shape[1:] != world.x.shape[1:]:
        raise FederationError(
            f"the server's reference samples have shape {tuple(reference.shape[1:])}, this site's "
            f"{tuple(world.x.shape[1:])}; make the reference with the same encoder"
        )
    rows, unlabelled = len(world.x), world.y.new_full((len(reference),), -1)
    x, y = torch.cat([world.x, reference.to(world.x.dtype)]), torch.cat([world.y, unlabelled])
    return replace(world, x=x, y=y, reference=np.arange(rows, rows + len(reference)))


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress: nobody watches a site's process."""


def load_site_samples(kit: SiteKit, settings: Settings, classes: list[str]) -> EmbeddedTable:
    """Embed the site's own data by its own encoder, under the experiment's classes."""
    settings = replace(settings, descriptions=kit.descriptions, texts=kit.texts)
    if not kit.data and not kit.encoder.startswith("store:"):
        raise SettingsError(f"site {kit.name} has no data; name it, e.g. --data IMAGES")
    if kit.encoder.startswith("store:"):
        alone = replace(settings, encoder=kit.encoder, source=kit.source, smoke=False)
        return align_stored_classes(load(alone, ignore_progress)[0], classes, kit.name)
    source = {**kit.source}
    source |= {key: settings.source[key] for key in ("templates", "negative_templates") if key in settings.source}
    dataset = open_data(kit.data, source)
    encoder, _ = open_encoder_with_notes(kit.encoder, kit.access)
    dataset = replace(dataset, classes=tuple(classes), **_map_labels(dataset, classes, kit.name))
    return embed_dataset(settings, dataset, encoder, ignore_progress)[0]


def _map_labels(dataset: Dataset | EmbeddedTable, classes: list[str], site: str) -> dict[str, Any]:
    """Map the site's labels to the experiment's classes; a site need not have every class."""
    number = np.array(match_classes(dataset.classes, classes), dtype=np.int64)
    if strange := [dataset.classes[i] for i in np.flatnonzero(number < 0).tolist()]:
        raise ReportedError(
            "classes",
            f"site {site} has images of {strange[0]!r}, which is not a class of this experiment; its classes are "
            f"{join_names(classes)}",
            count=len(strange),
        )
    return align_labels(dataset, number.tolist(), len(classes))


def align_stored_classes(rows: EmbeddedTable, classes: list[str], site: str) -> EmbeddedTable:
    """Return stored samples under the experiment's classes, with their texts in its order."""
    labels = _map_labels(rows, classes, site)
    held = [normalise_class_name(name) for name in rows.classes]
    if rows.text is not None and (missing := sorted(set(classes) - set(held))):
        raise DataError(
            f"the store of site {site} has no text of class {missing[0]!r}; embed the images with an encoder instead, "
            "or add the class to the store"
        )
    order = [] if rows.text is None else [held.index(name) for name in classes]
    text, negative = (None if of is None else of[order] for of in (rows.text, rows.negative_text))
    return replace(rows, classes=tuple(classes), text=text, negative_text=negative, **labels)


def embed_site_images(kit: SiteKit, progress: Callable[[str, int, int], None]) -> list[str]:
    """Embed the site's images before the first request; return warnings about them."""
    if kit.plays or kit.encoder.startswith("store:"):
        return []
    if not kit.data or not kit.encoder:
        raise SettingsError(
            f"site {kit.name} needs images and an encoder: fedvlm deploy site {kit.folder} --data IMAGES --encoder demo"
        )
    encoder, notes = open_encoder_with_notes(kit.encoder, kit.access)
    done = encode(open_data(kit.data, kit.source), encoder, False, "float32", progress)
    return [*notes, *skipped_messages(done)]


def compare_with_alone(world: World, id: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Count correct validation samples of the federated classifier and of one trained on own samples alone."""
    federated = measured["validation_hits"]
    scores = {"samples": measured["validation_rows"], "federated": federated}
    if tuple(world.x.shape[1:]) != (world.frozen.dim,):
        return {**scores, "alone": "?", "advice": "not compared"}  # its samples are patches or pixels
    alone = measure(*_train_alone(world, id), id)["validation_hits"]
    better = "use the federation's classifier" if federated > alone else "keep your own classifier"
    return {**scores, "alone": alone, "advice": better if federated != alone else "no difference"}


def describe_site(
    kit: SiteKit, site_training: SiteTraining, world: World, totals: Tensors, mean: Tensor, policy: Policy
) -> dict[str, float]:
    """Describe the site's data, as far as its policy reports scores, against the verified sums of all members.

    `totals` are the sums of class counts, and `mean` is the mean embedding of all that was summed. Counts leave only
    in plain mode; a site that answers verified sums only tells rounded distances and its rounded gain.
    """
    if world.frozen.multi_label:
        raise ReportedError("findings")
    if policy.score_detail == "none":
        return {}
    name, min_count = kit.name, int(setting(world.method, "min_class_samples") or 1)
    train = world.members[name].train
    x, y = world.read(train).double(), world.y[torch.from_numpy(train)]
    n_classes = len(world.frozen.classes)
    counts, total = torch.bincount(y, minlength=n_classes).numpy(), totals["counts"][:n_classes].numpy()
    total = np.where(totals["members"][:n_classes].numpy() >= MIN_CLASS_CLIENTS, total, 0)
    visible = np.where((counts >= min_count) & (total > 0), counts, 0)
    own = x[torch.from_numpy(visible)[y] > 0].sum(0)
    sums = {name: own, "": mean.double() * int(total.sum()) - own}
    members, sizes = {name: visible, "": total - visible}, {name: int(visible.sum()), "": int((total - visible).sum())}
    facts: dict[str, float] = {}
    if min(sizes.values()):
        facts |= distances_to_rest(name, members, sums, sizes)._asdict()
    rows = world.members[name].validation
    if len(rows) and (total[counts > 0] > 0).all():  # else the sum lacks a class of this site
        truth = world.y[torch.from_numpy(rows)]
        classifier = Personalised.from_pretrained(kit.folder / "classifiers" / slug(site_training.title))
        logits = classifier.logits(world.read(rows)), predict(*_train_alone(world, name), rows)
        facts |= compare_correct(*((part.argmax(1) == truth).numpy() for part in logits))
    if not policy.plain or policy.score_detail != "exact":
        exact = ("samples", "difference", "half_width")
        rounding = {"embeddings": floor, "by_chance": ceil}  # so that no site is called different by rounding
        facts = {key: value for key, value in facts.items() if key not in exact}
        return {key: rounding.get(key, round)(value * SCORE_STEPS) / SCORE_STEPS for key, value in facts.items()}
    shown = {f"count {i}": count for i, count in enumerate(counts.tolist()) if not 0 < count < min_count}
    if site_training.samples is None:  # a rehearsal's
        return {key: value for key, value in facts.items() if key != "samples"}
    table = site_training.samples.rows
    further = {"duplicates": len(table.content) - len(set(table.content))}
    if table.groups is not None:
        further["groups"] = len(set(table.groups.tolist()) - {""})
    if kit.data:
        everything = {name: np.arange(len(table.labels))}
        facts |= measure_images(open_data(kit.data, kit.source), table, everything, ignore_progress).get(name, {})
    facts |= shown | {key: count for key, count in further.items() if not 0 < count < min_count}
    hidden = ("samples", "measured") if len(shown) < n_classes else ()  # they would reveal a suppressed count
    return {"min_count": min_count} | {key: value for key, value in facts.items() if key not in hidden}


def _train_alone(world: World, id: str) -> tuple[World, Tensors, Tensors]:
    """Train a classifier on the site's own samples alone; return it as `measure` and `predict` take it."""
    probe = replace(world, method=method_for(make("alone"), world.frozen))
    nothing, initial_local = probe.method.init(probe.frozen)
    return probe, nothing, probe.method.adapt(probe.frozen, nothing, initial_local, make_client(probe, id, 0))
