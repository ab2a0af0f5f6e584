"""Describe the data of a federation before training: per site and in all, on one offline HTML page.

Distances need only each site's count, class counts and sum of embeddings. No count below the minimum is shown.
"""

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedvlm.classifier.personalised import client_classifier
from fedvlm.core import MIN_CLASS_CLIENTS, make
from fedvlm.data.table import Dataset, EmbeddedTable, count_classes
from fedvlm.encoders.images import decode
from fedvlm.errors import DataError, FedVLMError
from fedvlm.evaluate.statistics import Z_95
from fedvlm.report.page.render import open_template, page_shell
from fedvlm.runner.load import Progress, load, open_data
from fedvlm.runner.prepare import Prepared, check_samples, prepare
from fedvlm.runner.run import execute
from fedvlm.runner.settings import Settings
from fedvlm.storage.files import write_file

MAX_IMAGES_PER_SITE = 500  # whose size and intensity are measured
FAR_RATIO = 3  # times the distance by chance, from which a site is called different
VERDICTS = {1.0: "likely", -1.0: "unlikely", 0.0: "unclear"}  # whether federating helps
SPLIT_NAMES = ("train", "validation", "calibration", "test")


class Distances(NamedTuple):
    """How far a site is from all others."""

    embeddings: float  # between mean embeddings of the site and of the others
    by_chance: float  # what equal distributions would show by their sample sizes
    classes: float  # total variation of the class frequencies, 0 to 1


@dataclass(frozen=True)
class SiteReport:
    """What is known of one site; None marks a suppressed or unknown number."""

    site: str
    samples: int | None
    counts: list[int | None]  # samples by class or finding
    has_groups: bool
    groups: int | None  # patients, lesions
    duplicates: int | None  # images whose bytes another image of the site has
    distances: "Distances | None"
    images: Mapping[str, Any] | None  # sizes and intensities
    gain: Mapping[str, Any] | None  # accuracy on validation samples: federated, alone, and the difference


@dataclass(frozen=True)
class DataReport:
    data: str
    encoder: str
    classes: list[str]
    min_count: int
    total: list[int | None]  # by class; None where a site's count is suppressed
    sites: list[SiteReport]
    notes: list[str]

    @property
    def n_suppressed(self) -> int:
        return sum(count is None for site in self.sites for count in site.counts)


def data_report(settings: Settings, min_count: int, progress: Progress) -> DataReport:
    """Describe the data of a run's settings; counts from 1 to below `min_count` are suppressed."""
    rows, notes = load(settings, progress)
    check_samples(settings, rows)
    prepared = prepare(settings, rows, settings.seeds[0])
    dataset = None if settings.encoder.startswith("store:") else open_data(settings.data, settings.source)
    members = site_rows(prepared)
    if len(members) < 2:
        raise DataError(f"{rows.name} has one site, {next(iter(members))!r}; a federation needs at least two")
    gains = {} if rows.findings is not None else federation_gains(prepared)
    image_statistics = {} if dataset is None else measure_images(dataset, rows, members, progress)
    counts = {id: count_classes(rows, indices) for id, indices in members.items()}
    visible = {id: np.where(values < min_count, 0, values) for id, values in counts.items()}
    sums = {id: rows.x[torch.from_numpy(indices)].double().sum(0) for id, indices in members.items()}
    sizes = {id: len(indices) for id, indices in members.items()}
    reports = []
    for id, indices in members.items():
        groups = None if rows.groups is None else len(set(rows.groups[indices].tolist()) - {""})
        digests = Counter(rows.content[index] for index in indices.tolist())
        is_hidden = sizes[id] < min_count
        shown = [_suppress(count, min_count) for count in counts[id].tolist()]
        has_suppressed = None in shown  # then numbers that would reveal it by subtraction are suppressed, too
        reports.append(
            SiteReport(
                id,
                None if has_suppressed else _suppress(sizes[id], min_count),
                shown,
                groups is not None,
                None if groups is None else _suppress(groups, min_count),
                _suppress(sum(count - 1 for count in digests.values()), min_count),
                None if is_hidden else distances_to_rest(id, visible, sums, sizes),
                None if is_hidden else _without(image_statistics.get(id), "measured", has_suppressed),
                None if is_hidden else _without(gains.get(id), "samples", has_suppressed),
            )
        )
    hidden = [any(report.counts[place] is None for report in reports) for place in range(len(rows.classes))]
    # A total beside a single suppressed count would reveal it.
    sums = np.sum(list(counts.values()), axis=0).tolist()
    total = [None if is_hidden else count for count, is_hidden in zip(sums, hidden, strict=True)]
    return DataReport(rows.name, rows.encoder, list(rows.classes), min_count, total, reports, list(notes))


def _suppress(count: int, min_count: int) -> int | None:
    return None if 0 < count < min_count else count


def _without(values: dict[str, Any] | None, key: str, is_suppressed: bool) -> dict[str, Any] | None:
    return {**values, key: None} if values is not None and is_suppressed else values


def site_rows(prepared: Prepared) -> dict[str, NDArray[np.int64]]:
    """Return all samples of each site; also duplicates, which a training drops, where the data name the sites."""
    partition, rows = prepared.settings.clients.partition, prepared.rows
    if partition in ("own", "domain"):
        column = rows.clients if partition == "own" else rows.domains
        return {id: np.flatnonzero(column == id) for id in prepared.partition.clients}
    members = prepared.partition.clients.items()
    return {id: np.sort(np.concatenate([getattr(client, split) for split in SPLIT_NAMES])) for id, client in members}


def distances_to_rest(
    id: str, counts: Mapping[str, NDArray[np.int64]], sums: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> Distances:
    """Return the distance of mean embeddings, the same by chance, and the total variation of class frequencies.

    Embeddings have unit norm, so the trace of their covariance is 1 - |mean|²: counts and sums suffice.
    """
    others = [other for other in counts if other != id]
    n_own, n_rest = sizes[id], sum(sizes[other] for other in others)
    own = sums[id] / n_own
    rest = torch.stack([sums[other] for other in others]).sum(0) / n_rest
    by_chance = ((1 - own.square().sum()) / n_own + (1 - rest.square().sum()) / n_rest).clamp(min=0).sqrt()
    own_counts, rest_counts = counts[id], np.sum([counts[other] for other in others], axis=0)
    own_frequencies, rest_frequencies = (values / max(1, values.sum()) for values in (own_counts, rest_counts))
    variation = float(np.abs(own_frequencies - rest_frequencies).sum() / 2)
    return Distances(float((own - rest).norm()), float(by_chance), variation)


def federation_gains(prepared: Prepared) -> dict[str, dict[str, Any]]:
    """Compare federated ridge regression with a classifier of the site alone, on the site's validation samples."""
    rows, out = prepared.rows, {}
    settings = replace(prepared.settings, seeds=(prepared.seed,))
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: replace(settings, method=make(name)) for name in ("ridge", "alone")}
        records = [execute(run, f"{folder}/{name}", embedded=rows) for name, run in runs.items()]
        for id, client in prepared.partition.clients.items():
            index = torch.from_numpy(client.validation)
            if not len(index):
                continue
            logits = [client_classifier(record, id).logits(rows.x[index]) for record in records]
            correct = [values.argmax(1).numpy() == rows.labels[client.validation] for values in logits]
            gain = compare_correct(*correct)
            out[id] = gain | {"helps": VERDICTS[gain["helps"]]}
    return out


def compare_correct(federated: NDArray[np.bool_], alone: NDArray[np.bool_]) -> dict[str, float]:
    """Compare which samples two classifiers predict correctly, with the half width of a 95 % interval."""
    difference = federated.astype(np.float64) - alone
    n = len(difference)
    mean, half_width = float(difference.mean()), Z_95 * float(difference.std()) / n**0.5
    verdict = 1.0 if mean - half_width > 0 else -1.0 if mean + half_width < 0 else 0.0
    gain = {"samples": n, "federated": float(federated.mean()), "alone": float(alone.mean()), "helps": verdict}
    return {**gain, "difference": mean, "half_width": half_width}


def measure_images(
    dataset: Dataset, rows: EmbeddedTable, members: Mapping[str, NDArray[np.int64]], progress: Progress
) -> dict[str, dict[str, Any]]:
    """Measure size and intensity of some images of every site; an image that cannot be read is left out."""
    out: dict[str, dict[str, Any]] = {}
    if len(dataset.labels) != len(rows.labels):  # some images were skipped, so row numbers differ
        return out
    for number, (id, indices) in enumerate(members.items()):
        sizes, means, stds = [], [], []
        for index in indices[:: max(1, -(-len(indices) // MAX_IMAGES_PER_SITE))].tolist():
            try:
                image = decode(dataset.source.read(index))
            except FedVLMError:
                continue
            pixels = np.asarray(image.convert("L"), np.float64) / 255
            sizes.append(image.size)
            means.append(pixels.mean())
            stds.append(pixels.std())
        progress("reading images", number + 1, len(members))
        if sizes:
            width, height = np.median(np.array(sizes), axis=0).astype(int).tolist()
            out[id] = {"measured": len(sizes), "width": width, "height": height, "n_sizes": len(set(sizes))}
            out[id] |= {"mean": float(np.mean(means)), "contrast": float(np.mean(stds))}
    return out


def report_of_sites(described: Mapping[str, Any], encoder: str, classes: list[str]) -> DataReport:
    """Return the report of deployed sites: sums over all, and of each site the numbers that it tells."""
    reports = []
    for name, numbers in described["sites"].items():
        facts = {key: int(value) if value == int(value) else value for key, value in numbers.items()}
        counts, gain = [facts.get(f"count {place}") for place in range(len(classes))], None
        if "federated" in facts:
            gain = {"samples": None, "difference": None, **facts, "helps": VERDICTS[facts["helps"]]}
        distances = Distances(*(facts[key] for key in Distances._fields)) if "embeddings" in facts else None
        images = {"measured": None, **facts} if "n_sizes" in facts else None
        known = [count for count in counts if count is not None]
        total = sum(known) if len(known) == len(classes) else None
        groups, duplicates = facts.get("groups"), facts.get("duplicates")
        has_groups = groups is not None
        reports.append(
            SiteReport(name, total, counts if known else [], has_groups, groups, duplicates, distances, images, gain)
        )
    min_count = int(max([numbers.get("min_count", 1) for numbers in described["sites"].values()]))
    sums = zip(described["counts"], described["members"], strict=True)
    total_counts = [count if members >= MIN_CLASS_CLIENTS else None for count, members in sums]
    note = f"The sums are of training samples, of classes that at least {MIN_CLASS_CLIENTS} sites contribute to."
    return DataReport(f"{len(reports)} sites", encoder, classes, min_count, total_counts, reports, [note])


def write_report(report: DataReport, path: Path) -> Path:
    """Write the report as one HTML page that works without a network."""
    facts = headline(report)
    html = open_template("data_report.html").render(**page_shell(), report=report, facts=facts, verdicts=VERDICTS)
    write_file(path, html.encode())
    return path


def headline(report: DataReport) -> list[tuple[str, str]]:
    """Return what deserves attention before training."""
    measured = [(site.site, site.distances) for site in report.sites if site.distances is not None]
    far = [name for name, distances in measured if distances.embeddings > FAR_RATIO * distances.by_chance]
    out = [("Sites that differ from the others", ", ".join(far) or "none")]
    titles = {"likely": "Federating likely helps", "unlikely": "Federating likely harms", "unclear": "Not clear"}
    for word, title in titles.items():
        names = [site.site for site in report.sites if site.gain is not None and site.gain["helps"] == word]
        out.append((title, ", ".join(names) or "none"))
    return [*out, ("Suppressed counts", str(report.n_suppressed))]
