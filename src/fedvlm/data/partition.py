"""Who has how many rows of which class."""

from collections.abc import Sequence

import numpy as np

from fedvlm.data.federation import Partition, SampleTable
from fedvlm.data.splits import SPLITS, Ints


def count_table(partition: Partition, table: SampleTable, parts: Sequence[str] = SPLITS) -> Ints:
    """Rows of each class at each client (clients, classes), over the parts asked for."""
    counts = np.zeros((len(partition.clients), len(table.classes)), dtype=np.int64)
    for index, member in enumerate(partition.clients.values()):
        for part in parts:
            rows = getattr(member, part)
            counts[index] += np.bincount(table.labels[rows], minlength=len(table.classes))
    return counts
