"""Base-to-new classes: rows and classes as a training on the first half sees them, and the rest.

The base half are the first classes in the order of the labels, one more than the others if their
number is odd. Each half is dealt to clients by itself, in the same way; of the new half only the
test rows are looked at, and only when all training is over.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.core import Frozen, Method
from fedvlm.data.clients import Clients
from fedvlm.data.partition import ClientSplit, Partition, SampleList
from fedvlm.data.table import EmbeddedTable, rank_digests
from fedvlm.engines.client import World, measure
from fedvlm.errors import DataError, SettingsError
from fedvlm.evaluate.protocols.base_to_new import NEW_PREFIX
from fedvlm.record import Record

Ints = NDArray[np.int64]
MIN_CLASSES = 4  # classes: two in each half, or there is nothing to tell apart


def split_classes(rows: EmbeddedTable) -> tuple[EmbeddedTable, EmbeddedTable]:
    """The same rows twice, each with the labels of one half and -1 for rows of the other."""
    count = len(rows.classes)
    if count < MIN_CLASSES:
        raise DataError(
            f"base-to-new takes {MIN_CLASSES} classes or more, and {rows.name} has {count}; take "
            "protocol = 'own-test', or data with more classes"
        )
    middle = -(-count // 2)
    return _half(rows, 0, middle), _half(rows, middle, count)


def _half(rows: EmbeddedTable, first: int, last: int) -> EmbeddedTable:
    part = slice(first, last)
    labels = rows.labels
    return replace(
        rows,
        classes=rows.classes[part],
        labels=np.where((labels >= first) & (labels < last), labels - first, -1),
        text=None if rows.text is None else rows.text[part],
        text_tower=_tower(rows.text_tower, part),
        descriptions=None if rows.descriptions is None else rows.descriptions[part],
        texts={id: client_texts[part] for id, client_texts in rows.texts.items()},
    )


def _tower(tower: Any, part: slice) -> Any:
    """A text tower for some of its classes."""
    if tower is None:
        return None
    return replace(tower, suffixes=tower.suffixes[part], ends=tower.ends[part], known={})


def half_table(rows: EmbeddedTable) -> tuple[SampleList, Ints]:
    """The rows of a half as they are dealt, and their places in the whole table."""
    indices = np.flatnonzero(rows.labels >= 0)
    names = ("labels", "domains", "clients", "splits")
    columns = {key: getattr(rows, key)[indices] for key in names}
    groups = None if rows.groups is None else rows.groups[indices]
    content = [rows.content[row] for row in indices.tolist()]
    return SampleList(rows.classes, **columns, content=content, groups=groups), indices


def to_full_indices(division: Partition, indices: Ints) -> Partition:
    """A half's division by the numbers that its rows have in the whole table."""
    parts = ("train", "validation", "test", "calibration")
    members = {
        id: replace(member, **{part: indices[getattr(member, part)] for part in parts})
        for id, member in division.clients.items()
    }
    return Partition(members, division.dropped, indices[division.public])


def new_half_clients(clients: Clients) -> Clients:
    """How the new half is dealt: nobody trains on it, so no shots and no public share of it."""
    return replace(clients, shots=0, min_samples=1, calibration_ratio=None, public_ratio=0.0)


def new_test_members(base: EmbeddedTable, new: Partition, ids: Collection[str]) -> dict[str, ClientSplit]:
    """The new half's test rows of each client; no image of the base half is among them."""
    content = rank_digests(base.content)
    base_content = np.unique(content[base.labels >= 0])
    none = np.zeros(0, np.int64)
    members = {}
    for id, member in new.clients.items():
        if id in ids:
            test = member.test[~np.isin(content[member.test], base_content)]
            members[id] = ClientSplit(id, member.domain, none, none, test)
    return members


def check_new_classes(method: Method, frozen: Frozen) -> None:
    """Refuses a method that cannot name a class it was not trained on."""
    made = [method.init(_with_classes(frozen, classes)) for classes in (2, 3)]
    shapes = [{key: tensor.shape for part in tensor_pair for key, tensor in part.items()} for tensor_pair in made]
    held = sorted(key for key in shapes[0] if shapes[0][key] != shapes[1].get(key))
    reason = f"its {held[0]!r} has a place for each class" if held else ""
    if method.traits.fixed_classes:
        reason = "it keeps labels of its rows"
    if reason:
        raise SettingsError(
            f"protocol = 'base-to-new' tests on classes nobody trained on, and {method.name} knows "
            f"only those it was trained on ({reason}); take a method whose classes come from text "
            "alone, as zero-shot, promptfl, fedotp or fedclip"
        )


def _with_classes(frozen: Frozen, classes: int) -> Frozen:
    part = slice(classes)
    return replace(
        frozen,
        classes=frozen.classes[part],
        text=None if frozen.text is None else frozen.text[part],
        text_tower=_tower(frozen.text_tower, part),
        descriptions=None if frozen.descriptions is None else frozen.descriptions[part],
    )


def score_new_classes(world: World, record: Record, training: str) -> dict[str, dict[str, int]]:
    """Rows and hits of each client's new classes, by what a training ended with."""
    shared, local = record.outcome(training, world.seed)
    initial_local = world.method.init(world.frozen)[1]
    out = {}
    for id in world.members:
        scores = measure(world, world.method.send(shared, id), local.get(id, initial_local), id)
        out[NEW_PREFIX + id] = {key: scores[key] for key in ("test_rows", "test_hits")}
    return out
