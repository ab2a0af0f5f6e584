"""What the owner of data should know before a run: one line for each thing that is odd."""

from collections.abc import Mapping
from difflib import get_close_matches

import numpy as np

from fedvlm.data.federation import Division
from fedvlm.data.members import Member
from fedvlm.data.table import Embedded
from fedvlm.errors import listing

FEW = 10  # validation rows that choose badly
ALIKE = 0.85  # of two names that may be one


def look(rows: Embedded, division: Division) -> list[str]:
    """Sites of one class or of few validation rows, and classes that only one site has."""
    held = {id: _classes(rows, one) for id, one in division.members.items()}
    notes = [
        f"client {id!r} has one class only, {rows.classes[min(own)]!r}"
        for id, own in held.items()
        if len(own) == 1
    ]
    few = {id: len(one.validation) for id, one in division.members.items()}
    if short := [f"{id} ({count})" for id, count in few.items() if count <= FEW]:
        notes.append(f"{FEW} or fewer validation rows to choose by at {listing(short)}")
    return [*notes, *_rare(rows, held)] if len(held) > 1 else notes


def _classes(rows: Embedded, one: Member) -> set[int]:
    parts = (one.train, one.validation, one.test, one.calibration)
    return set(rows.labels[np.concatenate(parts)].tolist())


def _rare(rows: Embedded, held: Mapping[str, set[int]]) -> list[str]:
    notes = []
    for label, name in enumerate(rows.classes):
        at = [id for id, own in held.items() if label in own]
        if len(at) != 1:
            continue
        # a name that is nearly another, which this very site lacks, may be the same class
        others = [one for i, one in enumerate(rows.classes) if i not in held[at[0]]]
        near = get_close_matches(name, others, n=1, cutoff=ALIKE)
        ask = f"; is it the {near[0]!r} of others? then give both one name" if near else ""
        notes.append(f"class {name!r} is only at client {at[0]!r}{ask}")
    return notes
