"""What the runs come to: which lead, which cannot be told apart, and what a reader must know."""

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.core import make
from fedvlm.evaluate import metrics, protocols
from fedvlm.evaluate.metrics import unpack_correct
from fedvlm.evaluate.protocols import contract
from fedvlm.evaluate.statistics import Cell, Contributions, compare_with_best, weighted_correct

Run = Mapping[str, Any]
COLUMN_MEANINGS = {
    "G": "On domains that nobody trained on (G)",
    "P": "On the domains of the clients that trained (P)",
    "own": "On the clients' own test rows",
    "base": "On classes that were trained on",
    "clients accuracy": "On the clients that trained",
    "target accuracy": "On the unseen target",
}
PAIRING_SETTINGS = ("clients", "seeds", "protocol", "target", "counts", "unseen", "smoke")


def compare_runs(runs: Sequence[Run], details: Sequence[Any], main: Sequence[str]) -> dict[str, Any]:
    """By column: the best run, and of the others the difference to it with its interval.

    Only runs of the same rows, clients and seeds can be paired; those that stand alone, and runs
    whose record has no hits row by row, are left out.
    """
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        alike = {key: run["identity"].get(key) for key in PAIRING_SETTINGS}
        groups.setdefault(dumps([run["rows"], alike], sort_keys=True), []).append(place)
    group = max(groups.values(), key=len)
    out: dict[str, Any] = {}
    for column in main:
        samples_by_run = {str(place): _sample_scores(runs[place], details[place], column) for place in group}
        comparable = {place: rows for place, rows in samples_by_run.items() if rows}
        if len(comparable) < 2:
            continue
        best, differences = compare_with_best(comparable)
        half_widths = [(interval.high - interval.low) / 2 for interval in differences.values()]
        order = sorted(differences, key=lambda place: -differences[place].mean)
        out[column] = {
            "best": int(best),
            "widths": [round(interval, 5) for interval in (min(half_widths), max(half_widths))],
            "differences": {
                place: [round(interval.mean, 5), round(interval.low, 5), round(interval.high, 5)]
                for place, interval in differences.items()
            },
            "level": [int(place) for place in order if not differences[place].is_significant],
        }
    return out


def _sample_scores(run: Run, details: Mapping[int, Any], column: str) -> list[Contributions]:
    """A column row by row, one entry per seed; nothing if the record cannot give it."""
    generalises = run["tables"][0].get(column) is not None
    if not generalises:
        return []
    out = []
    for trainings in details.values():
        correct: dict[Cell, NDArray[np.bool_]] = {}
        members: dict[str, tuple[list[str], list[str]]] = {}
        for training, about in trainings.items():
            by_client = about["scores"]
            if any("hits" not in client_scores for client_scores in by_client.values() if client_scores["test_rows"]):
                return []
            tested = {id: client_scores for id, client_scores in by_client.items() if client_scores["test_rows"]}
            correct |= {
                (training, id): unpack_correct(client_scores["hits"], client_scores["test_rows"])
                for id, client_scores in tested.items()
            }
            train, unseen = about["train"], about["unseen"]
            members[training] = (
                [id for id in train if id in tested],
                [id for id in unseen if id in tested],
            )
        weights = protocols.make_protocol(run["identity"]["protocol"]).weights(members, True).get(column)
        if not weights or any(cell not in correct for cell in weights):
            return []
        out.append(weighted_correct(weights, correct))
    return out


def format_mean(run: Run, column: str) -> str:
    """Mean ± deviation over seeds, in per cent."""
    mean, deviation = metrics.mean_and_std(run["tables"]).get(column, (None, None))
    if mean is None:
        return "-"
    return f"{100 * mean:.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}")


def result_sentences(runs: Sequence[Run], verdicts: Mapping[str, Any]) -> list[str]:
    """The result in words, a sentence per column that has a meaning of its own."""
    out = [
        _column_sentence(runs, column, verdicts[column])
        for column in verdicts
        if column in COLUMN_MEANINGS or column.startswith(("own, ", "unseen, "))
    ]
    if out:
        return out
    column = next((key for key in runs[0]["tables"][0] if runs[0]["tables"][0][key] is not None), "")
    meaning = COLUMN_MEANINGS.get(column, f"In {column}")
    lines = [f"{meaning} {run['name']} has {format_mean(run, column)}." for run in runs[:3]]
    if len(runs) > 1:
        lines.append("Nothing is compared: no two runs have the same rows, clients and seeds, row by row.")
    return lines


def _column_sentence(runs: Sequence[Run], column: str, verdict: Mapping[str, Any]) -> str:
    meaning = COLUMN_MEANINGS.get(column, f"In {column}")
    best = runs[verdict["best"]]
    level = [runs[place] for place in verdict["level"]]
    behind = len(verdict["differences"]) - len(level)
    rest = f"; {behind} other{'s lie' if behind > 1 else ' lies'} below." if behind else "."
    out = f"{meaning} {best['name']} has the most, {format_mean(best, column)} %"
    if not level:
        return out + rest
    listed = [f"{run['name']} ({format_mean(run, column)})" for run in level[:3]]
    if len(level) > 3:
        listed.append(f"{len(level) - 3} more")
    names = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    out += f", but it cannot be told from {names}"
    return out + rest


def run_badges(runs: Sequence[Run]) -> list[list[str]]:
    """[badge, why] of what makes numbers weaker than they look."""
    checks = {
        "SMOKE": ("few rows and rounds: nothing here is a result", _is_smoke),
        "ORACLE": ("the round was chosen by test rows", _is_oracle),
        "TRANSDUCTIVE": ("the method adapts to the test rows", _is_transductive),
        "ALLOW-SMALL": ("class statistics of few rows were uploaded", _allows_small),
        "CHANGED TREE": ("the code had changes that are in no commit", _has_uncommitted_changes),
    }
    out = []
    for badge, (reason, holds) in checks.items():
        count = sum(holds(run) for run in runs)
        if count:
            out.append([badge, reason if count == len(runs) else f"{reason} ({count} of {len(runs)} runs)"])
    return out


def _is_smoke(run: Run) -> bool:
    return bool(run["identity"]["smoke"])


def _is_oracle(run: Run) -> bool:
    return bool(run["identity"]["selection"] == "oracle")


def _is_transductive(run: Run) -> bool:
    method = make(**run["identity"]["method"])
    return contract.has_reference(method) and method.traits.reference == "target"


def _allows_small(run: Run) -> bool:
    return bool(run["identity"].get("allow_small", False))


def _has_uncommitted_changes(run: Run) -> bool:
    return bool(run["dirty"])
