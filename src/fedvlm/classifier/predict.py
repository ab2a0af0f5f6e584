"""Predict the classes of images with a saved classifier, and score it on labelled ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedvlm.classifier.personalised import Personalised, reopen_encoder
from fedvlm.data.sources import Archive, EightBitSource, Files, Window, is_image, list_archive, list_folder
from fedvlm.data.table import Source, match_classes
from fedvlm.encoders import Encoder
from fedvlm.encoders.images import prepare
from fedvlm.encoders.store import STORE_SUFFIXES, read_unlabelled
from fedvlm.errors import DataError, SettingsError, join_names, suggest_path
from fedvlm.evaluate.metrics import compute_metrics, prediction_details
from fedvlm.runner.load import open_data, subset_dataset

BATCH_SIZE = 32
SCORE_NOTE = "the classifier does not know its training images; accuracy on those is too high, so leave them out"


@dataclass(frozen=True)
class Prediction:
    file: str
    label: str  # the likeliest class; with several findings the names of those that are present, as `edema|mass`
    probability: float
    probabilities: tuple[tuple[str, float], ...]  # every class, the likeliest first
    prediction_set: tuple[str, ...] | None = None  # the set of promised coverage, if one was asked for
    rejected: bool | None = None  # unlike anything the client has seen, if that was asked for

    @property
    def decision(self) -> str:
        """The class, if the prediction set has no other; empty where the classifier abstains or rejects."""
        if self.rejected:
            return ""
        return self.prediction_set[0] if self.prediction_set is not None and len(self.prediction_set) == 1 else ""


@dataclass(frozen=True)
class Options:
    """What a prediction has besides probabilities."""

    coverage: float | None = None  # of prediction sets
    reject: bool = False  # mark images unlike the client's

    def check(self, classifier: Personalised) -> None:
        """Refuse what the classifier has too few calibration samples for."""
        if self.coverage is not None:
            classifier.prediction_sets(torch.zeros(0, len(classifier.frozen.classes)).double(), self.coverage)
        if self.reject:
            classifier.rejection_limit()


PROBABILITIES_ONLY = Options()


@dataclass(frozen=True)
class Predictions:
    rows: list[Prediction]
    skipped: list[tuple[str, str]]  # images nothing can be said of: name and reason
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
) -> Predictions:
    """Predict every image in files, folders and archives, and every row of tables of embeddings.

    `encoder` says where the encoder is now, if it moved; another one is refused. With `coverage` each image also gets
    a prediction set, and with `reject` is marked if it is unlike the client's images.
    """
    classifier = Personalised.from_pretrained(folder, encoder)
    tables = [
        Path(image_path)
        for image_path in images
        if Path(image_path).suffix in STORE_SUFFIXES and Path(image_path).is_file()
    ]
    sources = [
        _open_source(Path(image_path), classifier.window) for image_path in images if Path(image_path) not in tables
    ]
    predictions = predict_sources(classifier, sources, encoder, access, progress, Options(coverage, reject))
    for file in tables:
        names, x = read_unlabelled(file)
        predictions.notes.append(f"the embeddings of {file} are assumed to be of {classifier.encoder}")
        fault = f"its row of {file} is NaN, infinite or zero"
        options = Options(coverage, reject)
        predictions.rows.extend(predict_embeddings(classifier, names, x.numpy(), fault, predictions.skipped, options))
    return predictions


def predict_sources(
    classifier: Personalised,
    sources: Sequence[tuple[Source, str]],
    encoder: str = "",
    access: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    options: Options = PROBABILITIES_ONLY,
) -> Predictions:
    options.check(classifier)  # refused before any image is read
    total = sum(len(source) for source, _ in sources)
    out = Predictions([], [], classifier.warnings(), classifier.frozen.classes)
    if not sources:
        return out
    box: Encoder = reopen_encoder(classifier.encoder, encoder, access)
    images = _read_images(sources, box, out.skipped)
    while batch := list(islice(images, BATCH_SIZE)):
        out.rows.extend(_predict_batch(classifier, box, batch, out.skipped, options))
        if progress is not None:
            progress(len(out.rows) + len(out.skipped), total)
    return out


def _open_source(path: Path, window: Window | None) -> tuple[Source, str]:
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


def _read_images(
    sources: Sequence[tuple[Source, str]], box: Encoder, skipped: list[tuple[str, str]]
) -> Iterator[tuple[str, Any]]:
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


def _predict_batch(
    classifier: Personalised,
    box: Encoder,
    batch: Sequence[tuple[str, Any]],
    skipped: list[tuple[str, str]],
    options: Options,
) -> list[Prediction]:
    if "image tower" in classifier.method.traits.needs:
        values = np.stack([image for _, image in batch])
    else:
        patches = "patches" in classifier.method.traits.needs
        answer = box.embed([image for _, image in batch], patches)
        values = np.asarray(answer.patches if patches else answer.pooled)
    fault = f"{box.name} answered with NaN, infinity or zeros"
    return predict_embeddings(classifier, [name for name, _ in batch], values, fault, skipped, options)


def predict_embeddings(
    classifier: Personalised,
    names: Sequence[str],
    values: NDArray[Any],
    fault: str,
    skipped: list[tuple[str, str]],
    options: Options,
) -> list[Prediction]:
    """Predict every valid embedding; NaN, infinite or zero ones are skipped with the reason."""
    valid_rows = []
    for row, name in enumerate(names):
        if np.isfinite(values[row]).all() and values[row].any():
            valid_rows.append(row)
        else:
            skipped.append((name, fault))
    if not valid_rows:
        return []
    x = torch.from_numpy(values[valid_rows]).float()
    log_probabilities = classifier.log_probabilities(classifier.logits(x))
    sets: Sequence[tuple[str, ...] | None] = [None] * len(x)
    if options.coverage is not None:
        sets = classifier.prediction_sets(log_probabilities, options.coverage)
    rejections = classifier.reject(x).tolist() if options.reject else [None] * len(x)
    ranked = log_probabilities.exp().sort(dim=1, descending=True)
    out: list[Prediction] = []
    for row, order, ranked_probabilities, prediction_set, rejected in zip(
        valid_rows, ranked.indices.tolist(), ranked.values.tolist(), sets, rejections, strict=True
    ):
        ranking = tuple(
            (classifier.frozen.classes[i], chance) for i, chance in zip(order, ranked_probabilities, strict=True)
        )
        label, chance = ranking[0]
        if classifier.frozen.multi_label:
            label = classifier.name_findings(log_probabilities[len(out)])
        out.append(Prediction(names[row], label, chance, ranking, prediction_set, rejected))
    return out


@dataclass(frozen=True)
class Score:
    rows: int
    metrics: Mapping[str, float]  # accuracy, balanced, F1, AUC, ECE, as far as the rows give them
    recall: Mapping[str, float]  # by class that has rows
    coverage: float | None  # share of sets that hold the true class, if sets were asked for
    size: float | None  # mean number of classes in a set
    decided: float | None  # share of images whose set is one class
    skipped: list[tuple[str, str]]
    notes: list[str]


def score(
    folder: str | Path,
    data: str,
    source: Mapping[str, Any] | None = None,
    encoder: str = "",
    access: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    coverage: float | None = None,
) -> Score:
    """Score a classifier on images in folders named after their class, or on a data set by name."""
    classifier = Personalised.from_pretrained(folder, encoder)
    if classifier.frozen.multi_label:
        raise SettingsError(
            f"{folder} predicts several findings per image, which `fedvlm score` does not score yet; "
            "Personalised.score takes embeddings and an array of findings"
        )
    window = {} if classifier.window is None else {"window": list(classifier.window)}
    dataset = open_data(data, {**window, **(source or {})})
    dataset = subset_dataset(dataset, np.flatnonzero(dataset.labels >= 0))
    predictions = predict_sources(classifier, [(dataset.source, "")], encoder, access, progress, Options(coverage))
    number = match_classes(dataset.classes, predictions.classes)
    if -1 in number:
        name = dataset.classes[number.index(-1)]
        raise DataError(f"{data} has the class {name!r}; the classifier has {join_names(predictions.classes)}")
    truth = {dataset.source.name(row): number[y] for row, y in enumerate(dataset.labels.tolist())}
    y = torch.tensor([truth[prediction.file] for prediction in predictions.rows])
    if not len(y):
        raise DataError(f"no image of {data} could be read; {predictions.skipped[0][1]}")
    predictions.notes.append(SCORE_NOTE)
    return _score_predictions(predictions, y, coverage)


def _score_predictions(predictions: Predictions, y: torch.Tensor, coverage: float | None) -> Score:
    place = {name: index for index, name in enumerate(predictions.classes)}
    p = torch.zeros(len(y), len(place), dtype=torch.float64)
    for row, prediction in enumerate(predictions.rows):
        for name, probability in prediction.probabilities:
            p[row, place[name]] = probability
    recalls = zip(predictions.classes, prediction_details(p, y)["recall"], strict=True)
    sets = [prediction.prediction_set or () for prediction in predictions.rows]
    is_covered = [predictions.classes[i] in prediction for i, prediction in zip(y.tolist(), sets, strict=True)]
    has_coverage = coverage is not None
    return Score(
        len(y),
        {key: prediction for key, prediction in compute_metrics(p, y).items() if key != "net benefit"},
        {name: prediction for name, prediction in recalls if prediction is not None},
        float(np.mean(is_covered)) if has_coverage else None,
        float(np.mean([len(prediction) for prediction in sets])) if has_coverage else None,
        float(np.mean([len(prediction) == 1 for prediction in sets])) if has_coverage else None,
        predictions.skipped,
        predictions.notes,
    )
