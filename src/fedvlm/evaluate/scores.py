"""What the hits of clients add up to."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

Results = Mapping[str, Mapping[str, Any]]  # scores by client
Table = dict[str, float | None]  # column -> share of hits, None where it is not defined


def mean_metric(scores: Results, ids: Iterable[str], name: str) -> float | None:
    """Mean over clients of one of METRICS; None where no client has it."""
    if name == "accuracy":
        return mean_accuracy(scores, ids)
    parts = [scores[id][name] for id in sorted(ids) if name in scores.get(id, {})]
    return fmean(parts) if parts else None


def mean_accuracy(scores: Results, ids: Iterable[str], split: str = "test") -> float | None:
    """Mean over clients of each one's share of hits; None where no client has rows."""
    parts = [
        scores[id][f"{split}_hits"] / scores[id][f"{split}_rows"]
        for id in sorted(ids)
        if id in scores and scores[id][f"{split}_rows"]
    ]
    return fmean(parts) if parts else None


def mean_and_std(tables: Sequence[Table]) -> dict[str, tuple[float | None, float | None]]:
    """Mean and sample deviation over seeds, column by column; no deviation for one seed."""
    out: dict[str, tuple[float | None, float | None]] = {}
    for key in tables[0]:
        values = [value for table in tables if (value := table.get(key)) is not None]
        mean = fmean(values) if values else None
        out[key] = (mean, stdev(values) if len(values) > 1 else None)
    return out
