"""What the owner of data should know before a run: one line for each thing that is odd."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.core import Method, setting
from fedvlm.data.partition import ClientSplit, Partition
from fedvlm.data.table import EmbeddedTable
from fedvlm.errors import join_names

MIN_VALIDATION_SAMPLES = 10  # validation rows that choose badly
SIMILAR_NAME_CUTOFF = 0.85  # of two names that may be one


def data_warnings(rows: EmbeddedTable, partition: Partition) -> list[str]:
    """Sites of one class or of few validation rows, and classes that only one site has."""
    classes_of = {id: _classes(rows, member) for id, member in partition.clients.items()}
    notes = [
        f"client {id!r} has one class only, {rows.classes[min(class_ids)]!r}"
        for id, class_ids in classes_of.items()
        if len(class_ids) == 1
    ]
    n_validation = {id: len(member.validation) for id, member in partition.clients.items()}
    if short := [f"{id} ({count})" for id, count in n_validation.items() if count <= MIN_VALIDATION_SAMPLES]:
        notes.append(f"{MIN_VALIDATION_SAMPLES} or fewer validation rows to choose by at {join_names(short)}")
    return [*notes, *_single_client_classes(rows, classes_of)] if len(classes_of) > 1 else notes


def _classes(rows: EmbeddedTable, member: ClientSplit) -> set[int]:
    parts = (member.train, member.validation, member.test, member.calibration)
    return set(rows.labels[np.concatenate(parts)].tolist())


def _single_client_classes(rows: EmbeddedTable, classes_of: Mapping[str, set[int]]) -> list[str]:
    notes = []
    for label, name in enumerate(rows.classes):
        at = [id for id, class_ids in classes_of.items() if label in class_ids]
        if len(at) != 1:
            continue
        # a name that is nearly another, which this very site lacks, may be the same class
        other_names = [class_name for i, class_name in enumerate(rows.classes) if i not in classes_of[at[0]]]
        similar = get_close_matches(name, other_names, n=1, cutoff=SIMILAR_NAME_CUTOFF)
        hint = f"; is it the {similar[0]!r} of others? then give both one name" if similar else ""
        notes.append(f"class {name!r} is only at client {at[0]!r}{hint}")
    return notes


def suppressed_warnings(
    method: Method | None, members: Mapping[str, Any], labels: NDArray[np.int64], classes: int
) -> list[str]:
    """What stays at the clients because a class has too few rows there, for the run's owner."""
    min_samples = (method.traits.classes.min_class_samples if method else None) or 1
    if min_samples <= 1:
        return []
    counts = {id: np.bincount(labels[entry.train], minlength=classes) for id, entry in members.items()}
    small = {id: int(((entry > 0) & (entry < min_samples)).sum()) for id, entry in counts.items()}
    n_statistics = sum(int((entry > 0).sum()) for entry in counts.values())
    silent_clients = [id for id, entry in counts.items() if small[id] and (entry < min_samples).all()]
    if not sum(small.values()):
        return []
    message = (
        f"{sum(small.values())} of {n_statistics} class statistics are not uploaded: the client has fewer "
        f"than {min_samples} rows of the class"
    )
    if silent_clients:
        message += f"; no class statistics at all come from {join_names(silent_clients, 5)}"
    if 2 * sum(small.values()) <= n_statistics:
        return [f"{message}; --allow-small uploads them"]
    rows = sum(int(entry.sum()) for entry in counts.values())
    lost = sum(int(entry[entry < min_samples].sum()) for entry in counts.values())
    noise = (
        ", and with method.noise_multiplier = 1 besides under noise whose ε is counted"
        if method is not None and setting(method, "noise_multiplier") is not None
        else ""
    )
    return [
        f"MOST IS WITHHELD: {message}; so {lost} of {rows} training rows ({lost / rows:.0%}) are in "
        f"no class statistic that is uploaded; --allow-small uploads them as they are{noise}"
    ]
