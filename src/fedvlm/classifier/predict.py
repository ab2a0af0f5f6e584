"""Pictures to classes with a saved classifier and the encoder it was trained on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.classifier.personalised import Personalised, reopen
from fedvlm.data.sources import Archive, Files, is_picture, list_archive, list_folder
from fedvlm.data.table import Source
from fedvlm.encoders.cache.workers import prepare
from fedvlm.encoders.interface import Encoder
from fedvlm.errors import DataError

BATCH = 32


@dataclass(frozen=True)
class Prediction:
    file: str
    label: str  # the likeliest class
    probability: float


@dataclass(frozen=True)
class Predictions:
    rows: list[Prediction]
    skipped: list[tuple[str, str]]  # pictures nothing can be said of: name and reason


def predict(
    folder: str | Path,
    images: Sequence[str | Path],
    encoder: str = "",
    access: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Predictions:
    """The likeliest class of every picture in files, folders and archives.

    `encoder` says where the encoder is now, if not where it was; another one is refused.
    """
    classifier = Personalised.from_pretrained(folder, encoder)
    sources = [_source(Path(one)) for one in images]
    box: Encoder = reopen(classifier.encoder, encoder, access)
    total, done = sum(len(one) for one, _ in sources), 0
    out = Predictions([], [])
    pictures = _pictures(sources, box, out.skipped)
    while batch := list(islice(pictures, BATCH)):
        out.rows.extend(_batch(classifier, box, batch, out.skipped))
        done += len(batch)
        if progress is not None:
            progress(done + len(out.skipped), total)
    return out


def _source(path: Path) -> tuple[Source, str]:
    """Where the pictures of a path are, and what their names are below."""
    if path.is_dir():
        names = list_folder(path)[0]
        if not names:
            raise DataError(f"{path} has no pictures; name pictures, or a folder that has some")
        return Files(path, names), f"{path}/"
    if not path.exists():
        raise DataError(f"there is no {path}; name pictures, folders or .zip archives")
    if path.suffix.lower() == ".zip":
        return Archive(path, list_archive(path)[0]), f"{path}/"
    if not is_picture(path.name):
        raise DataError(f"{path} does not end as a picture does (.png, .jpg, …); rename it")
    return Files(path.parent, [path.name]), f"{path.parent}/" if path.parent.name else ""


def _pictures(
    sources: Sequence[tuple[Source, str]], box: Encoder, skipped: list[tuple[str, str]]
) -> Iterator[tuple[str, Any]]:
    """Name and picture as the encoder takes it; what cannot be read is noted and passed over."""
    for source, above in sources:
        for row in range(len(source)):
            name = above + source.name(row)
            try:
                data = source.read(row)
            except DataError as error:
                skipped.append((name, str(error)))
                continue
            made = prepare(box.preprocess, sha256(data).digest(), data)
            if isinstance(made, str):
                skipped.append((name, made))
            else:
                yield name, data if made is None else made


def _batch(
    classifier: Personalised,
    box: Encoder,
    batch: Sequence[tuple[str, Any]],
    skipped: list[tuple[str, str]],
) -> list[Prediction]:
    if "image tower" in classifier.method.traits.needs:
        values = np.stack([picture for _, picture in batch])
    else:
        patches = "patches" in classifier.method.traits.needs
        answer = box.embed([picture for _, picture in batch], patches)
        values = np.asarray(answer.patches if patches else answer.pooled)
    sound = []
    for row, (name, _) in enumerate(batch):
        if np.isfinite(values[row]).all() and values[row].any():
            sound.append(row)
        else:
            skipped.append((name, f"{box.name} answered with NaN, infinity or zeros"))
    if not sound:
        return []
    chances = classifier.logits(torch.from_numpy(values[sound]).float()).softmax(dim=1)
    best = chances.max(dim=1)
    return [
        Prediction(batch[row][0], classifier.frozen.classes[label], chance)
        for row, label, chance in zip(
            sound, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
