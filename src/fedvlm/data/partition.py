"""Who has how many rows of which class."""

from collections.abc import Sequence

import numpy as np

from fedvlm.data.federation import Division, Table
from fedvlm.data.splits import PARTS, Ints


def count_table(division: Division, table: Table, parts: Sequence[str] = PARTS) -> Ints:
    """Rows of each class at each client (clients, classes), over the parts asked for."""
    counts = np.zeros((len(division.members), len(table.classes)), dtype=np.int64)
    for index, member in enumerate(division.members.values()):
        for part in parts:
            rows = getattr(member, part)
            counts[index] += np.bincount(table.labels[rows], minlength=len(table.classes))
    return counts
