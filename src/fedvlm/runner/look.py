"""What the owner of data should know before a run: one line for each thing that is odd."""

from collections.abc import Mapping
from difflib import get_close_matches

import numpy as np

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
