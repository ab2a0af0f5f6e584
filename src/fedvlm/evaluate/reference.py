"""The unlabelled rows that some methods adapt to, and what may not be among them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedvlm.core import Method
from fedvlm.data.federation import Partition
from fedvlm.data.table import EmbeddedTable
from fedvlm.errors import DataError, SettingsError
from fedvlm.evaluate.protocols import Training


def has_reference(method: Method) -> bool:
    return method.traits.reference is not None


def reference_samples(method: Method, partition: Partition, training: Training) -> NDArray[np.int64]:
    """The unlabelled rows a method with a `reference` adapts to; none for other methods.

    "public": the unseen clients' rows that nobody is tested on, and rows set aside; "target": test
    rows, which makes the method transductive.
    """
    if not has_reference(method):
        return np.zeros(0, np.int64)
    members = partition.clients
    unseen = [id for id in training.unseen if id in members]  # and not the test rows of all
    if method.traits.reference == "target":
        rows = [members[id].test for id in unseen or training.train]
    else:
        rows = [part for id in unseen for part in (members[id].train, members[id].validation)]
        rows.append(partition.public)
    return np.sort(np.concatenate(rows))


def check_training_data(method: Method, table: EmbeddedTable, partition: Partition, training: Training) -> None:
    """Refuses clients and reference rows a method cannot work with, before any work."""
    min_samples = method.traits.min_samples
    for id in training.train:
        if (count := len(partition.clients[id].train)) < min_samples:
            raise DataError(
                f"client {id} has {count} training rows, but {method.name} needs at least {min_samples} "
                "at every client; give it more rows, or leave it out"
            )
    if not has_reference(method):
        return
    rows = reference_samples(method, partition, training)
    if not len(rows):
        raise SettingsError(
            f"{method.name} adapts to an unlabelled reference set, and there is none: no client is "
            "unseen and no rows are set aside; set clients.public_ratio to a share of the rows, "
            "as 0.1, or method.reference = 'target' (transductive)"
        )
    if method.traits.reference == "public":
        everyone = {*training.train, *training.unseen} & partition.clients.keys()
        tests = [partition.clients[id].test for id in sorted(everyone)]
        check_disjoint(table.content, rows, np.concatenate(tests))


def check_disjoint(content: Sequence[str], rows: NDArray[np.int64], test: NDArray[np.int64]) -> None:
    """No image of a public reference set may be one that someone is tested on."""
    tested = {content[i]: i for i in test.tolist()}
    for row in rows.tolist():
        if content[row] in tested:
            raise DataError(
                f"row {row} of the reference set is the same image as the test row "
                f"{tested[content[row]]}; take it out of either, or set reference = 'target', "
                "which says that the method adapts to test rows"
            )
