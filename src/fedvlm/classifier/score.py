"""How a saved classifier does on labelled images it has never met."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.classifier.personalised import Personalised
from fedvlm.classifier.predict import Predictions, predict_sources
from fedvlm.data.table import match_classes
from fedvlm.errors import DataError, join_names
from fedvlm.evaluate.metrics import compute_metrics, prediction_details
from fedvlm.runner.load import open_data


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
    """Of images in folders named after their class, or any data set by name."""
    classifier = Personalised.from_pretrained(folder, encoder)
    window = {} if classifier.window is None else {"window": list(classifier.window)}
    dataset = open_data(data, {**window, **(source or {})})
    predictions = predict_sources(classifier, [(dataset.source, "")], encoder, access, progress, coverage)
    number = match_classes(dataset.classes, predictions.classes)
    if -1 in number:
        name = dataset.classes[number.index(-1)]
        raise DataError(f"{data} has the class {name!r}; the classifier has {join_names(predictions.classes)}")
    truth = {dataset.source.name(row): number[y] for row, y in enumerate(dataset.labels.tolist())}
    y = torch.tensor([truth[prediction.file] for prediction in predictions.rows])
    if not len(y):
        raise DataError(f"no image of {data} could be read; {predictions.skipped[0][1]}")
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
