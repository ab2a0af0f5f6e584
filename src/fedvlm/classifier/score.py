"""How a saved classifier does on labelled images it has never met."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.classifier.personalised import Personalised
from fedvlm.classifier.predict import Predictions, of_sources
from fedvlm.data.table import matched
from fedvlm.errors import DataError, listing
from fedvlm.evaluate.metrics import details, every_metric
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
    found = of_sources(classifier, [(dataset.source, "")], encoder, access, progress, coverage)
    number = matched(dataset.classes, found.classes)
    if -1 in number:
        name = dataset.classes[number.index(-1)]
        raise DataError(
            f"{data} has the class {name!r}; the classifier has {listing(found.classes)}"
        )
    truth = {dataset.source.name(row): number[y] for row, y in enumerate(dataset.labels.tolist())}
    y = torch.tensor([truth[one.file] for one in found.rows])
    if not len(y):
        raise DataError(f"no image of {data} could be read; {found.skipped[0][1]}")
    return _scored(found, y, coverage)


def _scored(found: Predictions, y: torch.Tensor, coverage: float | None) -> Score:
    place = {name: index for index, name in enumerate(found.classes)}
    p = torch.zeros(len(y), len(place), dtype=torch.float64)
    for row, one in enumerate(found.rows):
        for name, chance in one.chances:
            p[row, place[name]] = chance
    recalls = zip(found.classes, details(p, y)["recall"], strict=True)
    sets = [one.within or () for one in found.rows]
    held = [found.classes[i] in one for i, one in zip(y.tolist(), sets, strict=True)]
    asked = coverage is not None
    return Score(
        len(y),
        {key: one for key, one in every_metric(p, y).items() if key != "net benefit"},
        {name: one for name, one in recalls if one is not None},
        float(np.mean(held)) if asked else None,
        float(np.mean([len(one) for one in sets])) if asked else None,
        float(np.mean([len(one) == 1 for one in sets])) if asked else None,
        found.skipped,
        found.notes,
    )
