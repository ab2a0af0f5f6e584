"""What the runs come to: which lead, which cannot be told apart, and what a reader must know."""

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.core import make
from fedvlm.evaluate import protocols, reference, scores
from fedvlm.evaluate.metrics import unpack_hits
from fedvlm.evaluate.statistics import Added, Cell, rows_of, ties

Run = Mapping[str, Any]
MEANING = {
    "G": "On domains that nobody trained on (G)",
    "P": "On the domains of the clients that trained (P)",
    "own": "On the clients' own test rows",
    "base": "On classes that were trained on",
    "clients accuracy": "On the clients that trained",
    "target accuracy": "On the unseen target",
}
ALIKE = ("clients", "seeds", "protocol", "target", "counts", "unseen", "smoke")


def judge(runs: Sequence[Run], details: Sequence[Any], main: Sequence[str]) -> dict[str, Any]:
    """By column: the best run, and of the others the difference to it with its interval.

    Only runs of the same rows, clients and seeds can be paired; those that stand alone, and runs
    whose record has no hits row by row, are left out.
    """
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        alike = {key: run["identity"].get(key) for key in ALIKE}
        groups.setdefault(dumps([run["rows"], alike], sort_keys=True), []).append(place)
    group = max(groups.values(), key=len)
    out: dict[str, Any] = {}
    for column in main:
        found = {str(place): _rows(runs[place], details[place], column) for place in group}
        there = {place: rows for place, rows in found.items() if rows}
        if len(there) < 2:
            continue
        best, differences = ties(there)
        halves = [(one.high - one.low) / 2 for one in differences.values()]
        order = sorted(differences, key=lambda place: -differences[place].mean)
        out[column] = {
            "best": int(best),
            "widths": [round(one, 5) for one in (min(halves), max(halves))],
            "differences": {
                place: [round(one.mean, 5), round(one.low, 5), round(one.high, 5)]
                for place, one in differences.items()
            },
            "level": [int(place) for place in order if not differences[place].told_apart],
        }
    return out


def _rows(run: Run, details: Mapping[int, Any], column: str) -> list[Added]:
    """A column row by row, one entry per seed; nothing if the record cannot give it."""
    generalises = run["tables"][0].get(column) is not None
    if not generalises:
        return []
    out = []
    for trainings in details.values():
        hits: dict[Cell, NDArray[np.bool_]] = {}
        who: dict[str, tuple[list[str], list[str]]] = {}
        for training, about in trainings.items():
            by_client = about["scores"]
            if any("hits" not in one for one in by_client.values() if one["test_rows"]):
                return []
            there = {id: one for id, one in by_client.items() if one["test_rows"]}
            hits |= {
                (training, id): unpack_hits(one["hits"], one["test_rows"])
                for id, one in there.items()
            }
            train, unseen = about["train"], about["unseen"]
            who[training] = (
                [id for id in train if id in there],
                [id for id in unseen if id in there],
            )
        weights = protocols.make(run["identity"]["protocol"]).weights(who, True).get(column)
        if not weights or any(cell not in hits for cell in weights):
            return []
        out.append(rows_of(weights, hits))
    return out


def number(run: Run, column: str) -> str:
    """Mean ± deviation over seeds, in per cent."""
    mean, deviation = scores.spread(run["tables"]).get(column, (None, None))
    if mean is None:
        return "-"
    return f"{100 * mean:.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}")


def sentences(runs: Sequence[Run], verdicts: Mapping[str, Any]) -> list[str]:
    """The result in words, a sentence per column that has a meaning of its own."""
    out = [
        _sentence(runs, column, verdicts[column])
        for column in verdicts
        if column in MEANING or column.startswith(("own, ", "unseen, "))
    ]
    if out:
        return out
    shown = next((key for key in runs[0]["tables"][0] if runs[0]["tables"][0][key] is not None), "")
    where = MEANING.get(shown, f"In {shown}")
    said = [f"{where} {run['name']} has {number(run, shown)}." for run in runs[:3]]
    if len(runs) > 1:
        said.append(
            "Nothing is compared: no two runs have the same rows, clients and seeds, row by row."
        )
    return said


def _sentence(runs: Sequence[Run], column: str, verdict: Mapping[str, Any]) -> str:
    where = MEANING.get(column, f"In {column}")
    best = runs[verdict["best"]]
    level = [runs[place] for place in verdict["level"]]
    behind = len(verdict["differences"]) - len(level)
    rest = f"; {behind} other{'s lie' if behind > 1 else ' lies'} below." if behind else "."
    out = f"{where} {best['name']} has the most, {number(best, column)} %"
    if not level:
        return out + rest
    listed = [f"{run['name']} ({number(run, column)})" for run in level[:3]]
    if len(level) > 3:
        listed.append(f"{len(level) - 3} more")
    said = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    out += f", but it cannot be told from {said}"
    return out + rest


def badges(runs: Sequence[Run]) -> list[list[str]]:
    """[badge, why] of what makes numbers weaker than they look."""
    said = {
        "SMOKE": ("few rows and rounds: nothing here is a result", _smoke),
        "ORACLE": ("the round was chosen by test rows", _oracle),
        "TRANSDUCTIVE": ("the method adapts to the test rows", _transductive),
        "ALLOW-SMALL": ("class statistics of few rows were uploaded", _small),
        "CHANGED TREE": ("the code had changes that are in no commit", _dirty),
    }
    out = []
    for badge, (why, holds) in said.items():
        count = sum(holds(run) for run in runs)
        if count:
            out.append(
                [badge, why if count == len(runs) else f"{why} ({count} of {len(runs)} runs)"]
            )
    return out


def _smoke(run: Run) -> bool:
    return bool(run["identity"]["smoke"])


def _oracle(run: Run) -> bool:
    return bool(run["identity"]["selection"] == "oracle")


def _transductive(run: Run) -> bool:
    method = make(**run["identity"]["method"])
    return reference.wants_reference(method) and method.traits.reference == "target"


def _small(run: Run) -> bool:
    return bool(run["identity"].get("allow_small", False))


def _dirty(run: Run) -> bool:
    return bool(run["dirty"])
