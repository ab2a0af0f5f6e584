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
from fedvlm.data.federation import Division, Listing
from fedvlm.data.members import Member
from fedvlm.data.table import Embedded, ranks
from fedvlm.engines.client import World, measure
from fedvlm.errors import DataError, SettingsError
from fedvlm.evaluate.protocols.base_to_new import NEW
from fedvlm.record import Record

Ints = NDArray[np.int64]
FEWEST = 4  # classes: two in each half, or there is nothing to tell apart


def halves(rows: Embedded) -> tuple[Embedded, Embedded]:
    """The same rows twice, each with the labels of one half and -1 for rows of the other."""
    count = len(rows.classes)
    if count < FEWEST:
        raise DataError(
            f"base-to-new takes {FEWEST} classes or more, and {rows.name} has {count}; take "
            "protocol = 'own-test', or data with more classes"
        )
    middle = -(-count // 2)
    return _of(rows, 0, middle), _of(rows, middle, count)


def _of(rows: Embedded, first: int, last: int) -> Embedded:
    part = slice(first, last)
    labels = rows.labels
    return replace(
        rows,
        classes=rows.classes[part],
        labels=np.where((labels >= first) & (labels < last), labels - first, -1),
        text=None if rows.text is None else rows.text[part],
        text_tower=_tower(rows.text_tower, part),
        descriptions=None if rows.descriptions is None else rows.descriptions[part],
        texts={id: one[part] for id, one in rows.texts.items()},
    )


def _tower(tower: Any, part: slice) -> Any:
    """A text tower for some of its classes."""
    if tower is None:
        return None
    return replace(tower, suffixes=tower.suffixes[part], ends=tower.ends[part], known={})


def listing(rows: Embedded) -> tuple[Listing, Ints]:
    """The rows of a half as they are dealt, and their places in the whole table."""
    mine = np.flatnonzero(rows.labels >= 0)
    names = ("labels", "domains", "clients", "splits")
    columns = {key: getattr(rows, key)[mine] for key in names}
    groups = None if rows.groups is None else rows.groups[mine]
    content = [rows.content[row] for row in mine.tolist()]
    return Listing(rows.classes, **columns, content=content, groups=groups), mine


def placed(found: Division, mine: Ints) -> Division:
    """A half's division by the numbers that its rows have in the whole table."""
    parts = ("train", "validation", "test", "calibration")
    members = {
        id: replace(one, **{part: mine[getattr(one, part)] for part in parts})
        for id, one in found.members.items()
    }
    return Division(members, found.dropped, mine[found.public])


def plain(clients: Clients) -> Clients:
    """How the new half is dealt: nobody trains on it, so no shots and no public share of it."""
    return replace(clients, shots=0, min_samples=1, calibration_ratio=None, public_ratio=0.0)


def tested(base: Embedded, new: Division, ids: Collection[str]) -> dict[str, Member]:
    """The new half's test rows of each client; no image of the base half is among them."""
    content = ranks(base.content)
    known = np.unique(content[base.labels >= 0])
    none = np.zeros(0, np.int64)
    found = {}
    for id, one in new.members.items():
        if id in ids:
            test = one.test[~np.isin(content[one.test], known)]
            found[id] = Member(id, one.domain, none, none, test)
    return found


def check(method: Method, frozen: Frozen) -> None:
    """Refuses a method that cannot name a class it was not trained on."""
    made = [method.init(_less(frozen, classes)) for classes in (2, 3)]
    shapes = [{key: one.shape for part in both for key, one in part.items()} for both in made]
    held = sorted(key for key in shapes[0] if shapes[0][key] != shapes[1].get(key))
    why = f"its {held[0]!r} has a place for each class" if held else ""
    if method.traits.closed:
        why = "it keeps labels of its rows"
    if why:
        raise SettingsError(
            f"protocol = 'base-to-new' tests on classes nobody trained on, and {method.name} knows "
            f"only those it was trained on ({why}); take a method whose classes come from text "
            "alone, as zero-shot, promptfl, fedotp or fedclip"
        )


def _less(frozen: Frozen, classes: int) -> Frozen:
    part = slice(classes)
    return replace(
        frozen,
        classes=frozen.classes[part],
        text=None if frozen.text is None else frozen.text[part],
        text_tower=_tower(frozen.text_tower, part),
        descriptions=None if frozen.descriptions is None else frozen.descriptions[part],
    )


def scored(world: World, record: Record, training: str) -> dict[str, dict[str, int]]:
    """Rows and hits of each client's new classes, by what a training ended with."""
    shared, local = record.outcome(training, world.seed)
    fresh = world.method.init(world.frozen)[1]
    out = {}
    for id in world.members:
        found = measure(world, world.method.send(shared, id), local.get(id, fresh), id)
        out[NEW + id] = {key: found[key] for key in ("test_rows", "test_hits")}
    return out
