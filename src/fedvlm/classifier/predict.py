"""Predict the classes of images with a saved classifier, and score it on labelled ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from math import nan
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.classifier.personalised import UNSURE, Personalised, reopen_encoder
from fedvlm.data.manifests import NO_FINDING
from fedvlm.data.sources import Archive, EightBitSource, Files, Window, is_image, list_archive, list_folder
from fedvlm.data.table import Dataset, EmbeddedTable, Source, align_labels, check_same_kind, match_classes
from fedvlm.encoders import Encoder
from fedvlm.encoders.images import prepare
from fedvlm.encoders.store import STORE_SUFFIXES, open_store, read_unlabelled
from fedvlm.engines.client import GroupRule, pool_groups
from fedvlm.errors import DataError, SettingsError, join_names, suggest_path
from fedvlm.evaluate.findings import DEFAULT_THRESHOLD, finding_scores, summarise
from fedvlm.evaluate.metrics import compute_metrics, prediction_details
from fedvlm.runner.load import open_data, subset_dataset
from fedvlm.runner.prepare import label_tensor

Named = tuple[Source, str]  # images, and the prefix of their names
Skipped = list[tuple[str, str]]  # images nothing can be said of: name and reason
BATCH_SIZE = 32
SCORE_NOTE = "the classifier does not know its training images; accuracy on those is too high, so leave them out"


@dataclass(frozen=True)
class Prediction:
    file: str  # or the name of a group of images
    label: str  # the likeliest class; with several findings the names of those that are present, as `edema|mass`
    probability: float
    probabilities: tuple[tuple[str, float], ...]  # every class, the likeliest first
    prediction_set: tuple[str, ...] | None = None  # the set of promised coverage, if one was asked for
    rejected: bool | None = None  # unlike anything the client has seen, if that was asked for
    findings: tuple[str, ...] | None = None  # that are more probable than not, of a classifier of findings

    @property
    def names(self) -> tuple[str, ...]:
        """The predicted class, or every predicted finding."""
        return self.findings or (self.label,)

    @property
    def decision(self) -> str:
        """The class or findings, if the set leaves no other; empty where the classifier abstains or rejects."""
        if self.rejected or self.prediction_set is None:
            return ""
        if self.findings is not None:
            in_doubt = any(name.endswith(UNSURE) for name in self.prediction_set)
            return "" if in_doubt else "|".join(self.prediction_set) or NO_FINDING
        return self.prediction_set[0] if len(self.prediction_set) == 1 else ""


@dataclass(frozen=True)
class Options:
    """What a prediction has besides probabilities."""

    coverage: float | None = None  # of prediction sets
    reject: bool = False  # mark images unlike the client's
    group: GroupRule = "image"  # predict each group of images by the mean or maximum of their logits

    def check(self, classifier: Personalised) -> None:
        """Refuse what the classifier has too few calibration samples for, and what groups have not."""
        if self.group != "image" and (self.reject or self.coverage is not None):
            problem = f"the classifier is calibrated by image, so --group {self.group} has neither sets nor rejections"
            raise SettingsError(f"{problem}; leave --coverage and --reject out")
        if self.coverage is not None:
            classifier.prediction_sets(torch.zeros(0, len(classifier.frozen.classes)).double(), self.coverage)
        if self.reject:
            classifier.rejection_limit()


PROBABILITIES_ONLY = Options()


@dataclass(frozen=True)
class Predictions:
    rows: list[Prediction]
    skipped: Skipped
    notes: list[str]  # what a reader of the probabilities must know
    classes: tuple[str, ...] = ()


def predict(
    folder: str | Path,
    images: Sequence[str | Path],
    encoder: str = "",
    access: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    coverage: float | None = None,
    reject: bool = False,
    group: GroupRule = "image",
) -> Predictions:
    """Predict every image in files, folders and archives, and every row of tables of embeddings.

    `encoder` says where the encoder is now, if it moved; another one is refused. With `coverage` each image also gets
    a prediction set, and with `reject` is marked if it is unlike the client's images. With `group` there is one
    prediction per group: the column group of a table, or the folder of an image.
    """
    classifier = Personalised.from_pretrained(folder, encoder)
    paths = [Path(path) for path in images]
    tables = [path for path in paths if path.suffix in STORE_SUFFIXES and path.is_file()]
    sources = [_open_source(path, classifier.window) for path in paths if path not in tables]
    return predict_sources(classifier, sources, encoder, access, progress, Options(coverage, reject, group), tables)


def predict_sources(
    classifier: Personalised,
    sources: Sequence[Named],
    encoder: str = "",
    access: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    options: Options = PROBABILITIES_ONLY,
    tables: Sequence[Path] = (),
    group_of: Callable[[str], str] = lambda name: str(PurePosixPath(name).parent),
) -> Predictions:
    options.check(classifier)  # refused before any image is read
    total = sum(len(source) for source, _ in sources)
    out = Predictions([], [], classifier.warnings(), classifier.frozen.classes)
    pooled: list[tuple[Sequence[str], Tensor]] = []  # groups and logits

    def add(names: Sequence[str], groups: Sequence[str], values: NDArray[Any], fault: str) -> None:
        rows = valid_embeddings(names, values, fault, out.skipped)
        if rows and options.group == "image":
            out.rows.extend(_predict_rows(classifier, [names[row] for row in rows], values[rows], options))
        elif rows:
            pooled.append(([groups[row] for row in rows], classifier.logits(torch.from_numpy(values[rows]).float())))

    if sources:
        box: Encoder = reopen_encoder(classifier.encoder, encoder, access)
        images, n_done = _read_images(sources, box, out.skipped), 0
        while batch := list(islice(images, BATCH_SIZE)):
            names = [name for name, _ in batch]
            fault = f"{box.name} answered with NaN, infinity or zeros"
            add(names, [group_of(name) for name in names], _embed_batch(classifier, box, batch), fault)
            n_done += len(batch)
            if progress is not None:
                progress(min(total, n_done + len(out.skipped)), total)
    for file in tables:
        names, groups, x = read_unlabelled(file)
        if options.group != "image" and groups is None:
            raise DataError(f"{file} has no column group; add one, or leave --group out")
        out.notes.append(f"the embeddings of {file} are assumed to be of {classifier.encoder}")
        add(names, groups or names, x.numpy(), f"its row of {file} is NaN, infinite or zero")
    if pooled:
        groups = [name for names, _ in pooled for name in names]
        names, logits = pool_logits(groups, [part for _, part in pooled], options)
        out.rows.extend(_describe_logits(classifier, names, logits, options))
    return out


def pool_logits(groups: Sequence[str], logits: Sequence[Tensor], options: Options) -> tuple[list[str], Tensor]:
    """Return the groups in the order of their first image, and one row of logits for each."""
    number = {name: index for index, name in enumerate(dict.fromkeys(groups))}
    values, index = torch.cat([*logits]), torch.tensor([number[name] for name in groups])
    return list(number), pool_groups(values, index, index, options.group)[0]


def _open_source(path: Path, window: Window | None) -> Named:
    """Open the images of a path; return them and the prefix of their names."""
    if path.is_dir():
        names = list_folder(path)[0]
        if not names:
            raise DataError(f"{path} has no images; name images, or a folder that has some")
        return EightBitSource(Files(path, names), window), f"{path}/"
    if not path.exists():
        raise DataError(f"there is no {path}; {suggest_path(path)}name images, folders or .zip archives")
    if path.suffix.lower() == ".zip":
        return EightBitSource(Archive(path, list_archive(path)[0]), window), f"{path}/"
    if not is_image(path.name):
        raise DataError(f"{path} does not end as an image does (.png, .jpg, …); rename it")
    image_source = EightBitSource(Files(path.parent, [path.name]), window)
    return image_source, f"{path.parent}/" if path.parent.name else ""


def _read_images(sources: Sequence[Named], box: Encoder, skipped: Skipped) -> Iterator[tuple[str, Any]]:
    """Yield name and preprocessed image; images that cannot be read are skipped with the reason."""
    for source, prefix in sources:
        for row in range(len(source)):
            name = prefix + source.name(row)
            try:
                data = source.read(row)
            except DataError as error:
                skipped.append((name, str(error)))
                continue
            prepared = prepare(box.preprocess, sha256(data).digest(), data)
            if isinstance(prepared, str):
                skipped.append((name, prepared))
            else:
                yield name, data if prepared is None else prepared


def _embed_batch(classifier: Personalised, box: Encoder, batch: Sequence[tuple[str, Any]]) -> NDArray[Any]:
    if "image tower" in classifier.method.traits.needs:
        return np.stack([image for _, image in batch])
    patches = "patches" in classifier.method.traits.needs
    answer = box.embed([image for _, image in batch], patches)
    return np.asarray(answer.patches if patches else answer.pooled)


def valid_embeddings(names: Sequence[str], values: NDArray[Any], fault: str, skipped: Skipped) -> list[int]:
    """Return the rows of valid embeddings; NaN, infinite or zero ones are skipped with the reason."""
    valid_rows = []
    for row, name in enumerate(names):
        if np.isfinite(values[row]).all() and values[row].any():
            valid_rows.append(row)
        else:
            skipped.append((name, fault))
    return valid_rows


def predict_embeddings(
    classifier: Personalised,
    names: Sequence[str],
    values: NDArray[Any],
    fault: str,
    skipped: list[tuple[str, str]],
    options: Options,
) -> list[Prediction]:
    """Predict every valid embedding."""
    rows = valid_embeddings(names, values, fault, skipped)
    return _predict_rows(classifier, [names[row] for row in rows], values[rows], options) if rows else []


def _predict_rows(
    classifier: Personalised, names: Sequence[str], values: NDArray[Any], options: Options
) -> list[Prediction]:
    x = torch.from_numpy(values).float()
    rejections = classifier.reject(x).tolist() if options.reject else None
    return _describe_logits(classifier, names, classifier.logits(x), options, rejections)


def _describe_logits(
    classifier: Personalised,
    names: Sequence[str],
    logits: Tensor,
    options: Options,
    rejections: Sequence[bool] | None = None,
) -> list[Prediction]:
    log_probabilities = classifier.log_probabilities(logits)
    sets: Sequence[tuple[str, ...] | None] = [None] * len(logits)
    if options.coverage is not None:
        sets = classifier.prediction_sets(log_probabilities, options.coverage)
    ranked = log_probabilities.exp().sort(dim=1, descending=True)
    rows = zip(names, ranked.indices.tolist(), ranked.values.tolist(), sets, strict=True)
    out: list[Prediction] = []
    for name, order, ranked_probabilities, prediction_set in rows:
        pairs = zip(order, ranked_probabilities, strict=True)
        ranking = tuple((classifier.frozen.classes[i], chance) for i, chance in pairs)
        label, chance = ranking[0]
        findings = None
        if classifier.frozen.multi_label:
            findings = classifier.present_findings(log_probabilities[len(out)])
            label = "|".join(findings) or NO_FINDING
        rejected = None if rejections is None else rejections[len(out)]
        out.append(Prediction(name, label, chance, ranking, prediction_set, rejected, findings))
    return out


@dataclass(frozen=True)
class Score:
    rows: int
    metrics: Mapping[str, float]  # accuracy, balanced, F1, AUC, ECE, as far as the rows give them
    recall: Mapping[str, float]  # by class that has rows
    coverage: float | None  # share of sets that hold the true class, if sets were asked for
    size: float | None  # mean number of classes in a set
    decided: float | None  # share of images whose set is one class, or leaves no finding in doubt
    skipped: list[tuple[str, str]]
    notes: list[str]
    findings: Mapping[str, Mapping[str, float]]  # metrics of each, at a probability of 0.5


def score(
    folder: str | Path,
    data: str,
    source: Mapping[str, Any] | None = None,
    encoder: str = "",
    access: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    coverage: float | None = None,
    group: GroupRule = "image",
) -> Score:
    """Score a classifier on images in folders named after their class, a data set by name, or store:TABLE."""
    classifier = Personalised.from_pretrained(folder, encoder)
    options = Options(coverage, group=group)
    dataset: Dataset | EmbeddedTable
    if data.startswith("store:"):
        dataset = open_store(data.removeprefix("store:"), **(source or {}))
        names = [str(row) for row in range(len(dataset.labels))]
    else:
        window = {} if classifier.window is None else {"window": list(classifier.window)}
        dataset = open_data(data, {**window, **(source or {})})
        names = [dataset.source.name(row) for row in range(len(dataset.labels))]
    check_same_kind(data, dataset.findings, classifier.frozen.multi_label)
    number = match_classes(dataset.classes, classifier.frozen.classes)
    if -1 in number:
        name = dataset.classes[number.index(-1)]
        raise DataError(f"{data} has the class {name!r}; the classifier has {join_names(classifier.frozen.classes)}")
    if group != "image" and dataset.groups is None:
        raise DataError(f"{data} has no column group; add one, or leave --group out")
    columns = dataset.groups if group != "image" else None
    groups = names if columns is None else [column or name for column, name in zip(columns, names, strict=True)]
    labelled = np.flatnonzero(dataset.labels >= 0).tolist()
    if isinstance(dataset, EmbeddedTable):
        predictions = Predictions([], [], classifier.warnings(), classifier.frozen.classes)
        logits = [classifier.logits(dataset.x[labelled])]
        chosen, pooled = pool_logits([groups[row] for row in labelled], logits, options)
        predictions.rows.extend(_describe_logits(classifier, chosen, pooled, options))
    else:
        images = subset_dataset(dataset, np.array(labelled))
        group_of = dict(zip(names, groups, strict=True)).__getitem__
        parts = [(images.source, "")]
        predictions = predict_sources(classifier, parts, encoder, access, progress, options, (), group_of)
    aligned = replace(dataset, **align_labels(dataset, number, len(predictions.classes)))
    index = {prediction.file: place for place, prediction in enumerate(predictions.rows)}
    pairs = [(index[groups[row]], row) for row in labelled if groups[row] in index]
    if not pairs:
        raise DataError(f"no image of {data} could be read; {predictions.skipped[0][1]}")
    places, rows = (torch.tensor(column) for column in zip(*pairs, strict=True))
    y = label_tensor(aligned)[rows]
    truth = pool_groups(y, y, places, "max")[1]
    if y.ndim == 1 and not torch.equal(truth[places], y):
        raise DataError(f"a group of {data} has images of several classes; correct its labels, or leave --group out")
    predictions.notes.append(SCORE_NOTE)
    return _score(predictions, truth, coverage)


def _probability_matrix(predictions: Predictions) -> Tensor:
    """Return (samples, classes) in the order of the classes."""
    by_name = [dict(prediction.probabilities) for prediction in predictions.rows]
    return torch.tensor([[row[name] for name in predictions.classes] for row in by_name], dtype=torch.float64)


def _score(predictions: Predictions, y: Tensor, coverage: float | None) -> Score:
    """Score predictions; findings by their known labels."""
    p, names = _probability_matrix(predictions), predictions.classes
    sets = [prediction.prediction_set or () for prediction in predictions.rows]
    by_finding: list[dict[str, float]] = []
    if y.ndim == 1:
        metrics = {key: value for key, value in compute_metrics(p, y).items() if key != "net benefit"}
        recalls = zip(names, prediction_details(p, y)["recall"], strict=True)
        recall = {name: value for name, value in recalls if value is not None}
        is_covered = [names[label] in held for label, held in zip(y.tolist(), sets, strict=True)]
        sizes = [len(held) for held in sets]
    else:
        known, is_present = y >= 0, p >= DEFAULT_THRESHOLD
        by_finding = finding_scores(p.logit(), y, [DEFAULT_THRESHOLD] * y.shape[1])
        accuracy = float((is_present == (y == 1))[known].double().mean()) if known.any() else nan
        metrics = {"accuracy": accuracy, **summarise(p.logit(), y, by_finding)}
        present = {name: (y[:, k] == 1, is_present[:, k]) for k, name in enumerate(names)}
        recall = {name: float(called[true].double().mean()) for name, (true, called) in present.items() if true.any()}
        allowed = [[(name in held or name + UNSURE in held, name not in held) for name in names] for held in sets]
        may_be_present, may_be_absent = torch.tensor(allowed).unbind(2)
        is_covered = torch.where(y == 1, may_be_present, may_be_absent)[known].tolist()
        sizes = may_be_present.sum(1).tolist()
    of_sets = (is_covered, sizes, [bool(prediction.decision) for prediction in predictions.rows])
    covered, size, decided = (None if coverage is None else float(np.mean(values)) for values in of_sets)
    rest = predictions.skipped, predictions.notes, dict(zip(names, by_finding, strict=False))
    return Score(len(y), metrics, recall, covered, size, decided, *rest)
