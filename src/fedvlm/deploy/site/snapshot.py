"""Choose the samples of a training at a site whose data have changed since it last opened it.

A resumed run goes on with the samples that it began with. A new run takes the data as they are now, unless a class has
changed by so few samples that the difference of two uploads would show them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedvlm.data.table import EmbeddedTable
from fedvlm.deploy.messages import ReportedError
from fedvlm.errors import join_names
from fedvlm.storage.files import read_tensors, write_tensors

SAMPLES_FILE = "samples.safetensors"  # in the folder of a training: the samples of its last run
COLUMNS = ("domains", "clients", "splits")
DataStatus = Literal["first", "unchanged", "changed", "kept"]


@dataclass(frozen=True)
class ChosenSamples:
    """Hold the samples of a training, and how they differ from those of its last run."""

    rows: EmbeddedTable
    status: DataStatus = "first"
    note: str = ""  # for the people at the site
    n_removed_classes: int = 0


def choose_samples(
    folder: Path, rows: EmbeddedTable, resumes: bool, has_noise: bool, min_changed: int
) -> ChosenSamples:
    """Return today's samples, or those of the last run where a change would show single samples."""
    path = folder / SAMPLES_FILE
    if not path.exists():
        return ChosenSamples(rows)
    stored, about = read_tensors(path)
    before = _by_class(rows.classes, about["content"], stored["labels"], stored.get("findings"))
    now = _by_class(rows.classes, rows.content, *_labels_of(rows).values())
    changed = {name: len(before[name] ^ now[name]) for name in now if before[name] != now[name]}
    if not changed:
        return ChosenSamples(rows, "unchanged")
    added = sum(len(now[name] - before[name]) for name in changed)
    difference = f"{added} samples added and {sum(changed.values()) - added} removed since the last run"
    removed = [name for name in changed if before[name] and not now[name]]
    gone = f"; no samples are left of {join_names(removed)}" if removed else ""
    if resumes:
        return ChosenSamples(_restore(rows, stored, about), "kept", f"the run goes on with its samples ({difference})")
    small = [name for name, count in changed.items() if count < min_changed]
    if has_noise or not small:
        return ChosenSamples(rows, "changed", f"the data have changed: {difference}{gone}", len(removed))
    note = (
        f"the samples of the last run are used again, because {join_names(small)} changed by fewer than {min_changed} "
        f"samples ({difference}): the server could compare both runs; add noise, or wait for more samples"
    )
    return ChosenSamples(_restore(rows, stored, about), "kept", note)


def _by_class(
    classes: Sequence[str], content: Sequence[str], labels: torch.Tensor, findings: torch.Tensor | None = None
) -> dict[str, set[str]]:
    """Return the samples of each class, or those with and without each finding."""
    if findings is None:
        members = {name: labels == number for number, name in enumerate(classes)}
    else:
        values = findings[labels].unbind(1)
        members = {name: column == 1 for name, column in zip(classes, values, strict=True)}
        members |= {f"no {name}": column == 0 for name, column in zip(classes, values, strict=True)}
    digests = np.array(content)
    return {name: set(digests[flags.numpy()].tolist()) for name, flags in members.items()}


def _labels_of(rows: EmbeddedTable) -> dict[str, torch.Tensor]:
    """Return the labels as tensors, and what they mean if an image may have several findings."""
    columns = {"labels": rows.labels} | ({} if rows.findings is None else {"findings": rows.findings})
    return {key: torch.from_numpy(column) for key, column in columns.items()}


def _restore(rows: EmbeddedTable, stored: Mapping[str, Any], about: Mapping[str, Any]) -> EmbeddedTable:
    """Return the stored samples; embeddings of removed images come from the file."""
    place = {digest: row for row, digest in enumerate(rows.content)}
    labels = {key: stored[key].numpy() for key in ("labels", "findings") if key in stored}
    columns: dict[str, Any] = {name: np.array(about[name], dtype=object).astype(str) for name in COLUMNS}
    if all(digest in place for digest in about["content"]):
        index = np.array([place[digest] for digest in about["content"]], dtype=np.int64)
        return rows.select(index, **labels, fingerprint=about["fingerprint"], **columns)
    if rows.patches is not None or rows.images is not None:
        raise ReportedError("data", "images of the last run were removed, and this method needs them; restore them")
    columns["groups"] = None if about["groups"] is None else np.array(about["groups"], dtype=object).astype(str)
    columns |= {name: about[name] for name in ("content", "fingerprint")}
    return replace(rows, x=stored["x"], subgroups={}, **labels, **columns)


def keep_samples(folder: Path, rows: EmbeddedTable) -> None:
    """Keep the samples of a run that begins, for the next one to be compared with."""
    about = {name: np.asarray(getattr(rows, name)).tolist() for name in COLUMNS}
    about |= {"content": list(rows.content), "fingerprint": rows.fingerprint}
    about["groups"] = None if rows.groups is None else np.asarray(rows.groups).tolist()
    write_tensors(folder / SAMPLES_FILE, {"x": rows.x, **_labels_of(rows)}, about)
