"""Metrics by subgroup (sex, age band, scanner), with intervals over patients; small subgroups are suppressed.

Test samples of all clients that trained are pooled. The numbers come from the record of a simulation: a deployed site
records no single samples, so that nothing about subgroups leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm import seeds
from fedvlm.errors import DataError, unknown_name
from fedvlm.record import Record
from fedvlm.report.charts import Chart, Series
from fedvlm.report.runs import identities_of, read_trainings, run_names
from fedvlm.report.tables import render_table

MIN_SUBGROUP_UNITS = 10  # patients (or images without groups); smaller subgroups are suppressed
BOOTSTRAP_DRAWS = 500
ERROR_RATE = 0.05  # of a confidence interval
UNKNOWN = "unknown"  # an empty cell
METRICS = ("AUC", "balanced", "accuracy")
Floats = NDArray[np.float64]
SubgroupTables = Mapping[str, Sequence[Mapping[str, Any]]]  # rows of subgroups by column


def subgroup_rows(record: Record, column: str, metric: str = "", seed: int | None = None) -> list[dict[str, Any]]:
    """Return a row per subgroup: counts, value, interval, and the difference to the largest subgroup.

    A suppressed subgroup has no numbers. Others are suppressed with it until the total reveals no small one.
    """
    metric = metric or METRICS[0]
    if metric not in METRICS:
        raise unknown_name("metric of subgroups", metric, METRICS)
    p, y, units, values = _read_samples(record, column, seed)
    names = sorted(set(values.tolist()))
    n_units = {name: len(np.unique(units[values == name])) for name in names}
    suppressed = suppress_small(n_units)
    shown = [name for name in names if name not in suppressed]
    draws: dict[str, Floats] = {}
    out: list[dict[str, Any]] = []
    for name in names:
        if name in suppressed:
            out.append({"subgroup": name, "suppressed": True})
            continue
        part = values == name
        draws[name] = bootstrap_values(p[part], y[part], units[part], metric)
        low, high = _interval(draws[name])
        value = compute_value(p[part], y[part], metric)
        row = {"subgroup": name, "suppressed": False, "samples": int(part.sum()), "units": n_units[name]}
        out.append(row | {"value": value, "low": low, "high": high})
    defined = [row for row in out if not row["suppressed"] and isfinite(row["value"])]
    if not defined:
        return out
    worst, best = (choose(row["value"] for row in defined) for choose in (min, max))
    largest = max((row for row in defined), key=lambda row: row["units"])
    for row in out:
        if row["subgroup"] in shown:
            low, high = _interval(draws[row["subgroup"]] - draws[largest["subgroup"]])
            row["worst"] = row["value"] == worst < best
            if row is not largest:
                row["difference"] = {"to": largest["subgroup"], "value": row["value"] - largest["value"]}
                row["difference"] |= {"low": low, "high": high}
    return out


def subgroup_charts(runs: Sequence[tuple[str, SubgroupTables]]) -> list[Chart]:
    """Return a chart for each column: a dot for each subgroup and run with its interval; suppressed ones are absent."""
    charts = []
    for column in dict.fromkeys(column for _, tables in runs for column in tables):
        listed = [row for _, tables in runs for row in tables.get(column, ())]
        names, shown = (
            sorted({row["subgroup"] for row in listed}),
            {r["subgroup"] for r in listed if not r["suppressed"]},
        )
        step, series = min(0.12, 0.8 / len(runs)), []
        for position, (run, tables) in enumerate(runs):
            rows = [row for row in tables.get(column, ()) if row.get("value") is not None]
            places = [names.index(row["subgroup"]) + step * (position - (len(runs) - 1) / 2) for row in rows]
            points = [(x, row["value"]) for x, row in zip(places, rows, strict=True)]
            band = [(x, row["low"], row["high"]) for x, row in zip(places, rows, strict=True) if row["low"] is not None]
            series.append(Series(run, points, position, band))
        labels = [name if name in shown else f"{name} (suppressed)" for name in names]
        charts.append(Chart(f"AUC by {column}", "", "AUC (%)", series, kind="dots", categories=labels))
    return charts


def subgroup_tables(record: Record, columns: Sequence[str] = (), metric: str = "") -> SubgroupTables:
    """Return the rows of each column that the run reports, or of these; a number that is not defined is None."""

    def defined(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: defined(part) for key, part in value.items()}
        return None if isinstance(value, float) and not isfinite(value) else value

    known = record.manifest["identity"].get("subgroups", [])
    return {column: [defined(row) for row in subgroup_rows(record, column, metric)] for column in columns or known}


def subgroup_cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row as text: subgroup, patients, samples, value, interval and difference, in per cent and points."""
    if row["suppressed"]:
        return [row["subgroup"], *["-"] * 2, "suppressed", *["-"] * 2]

    def percent(value: float | None, form: str) -> str:
        return "-" if value is None else format(100 * value, form)

    interval = f"[{percent(row['low'], '.1f')}, {percent(row['high'], '.1f')}]"
    difference, gap = "", row.get("difference")
    if gap:
        bounds = f"[{percent(gap['low'], '+.1f')}, {percent(gap['high'], '+.1f')}]"
        difference = f"{percent(gap['value'], '+.1f')} {bounds} to {gap['to']}"
    value = percent(row["value"], ".1f") + (" (worst)" if row.get("worst") else "")
    return [row["subgroup"], str(row["units"]), str(row["samples"]), value, interval, difference or "-"]


def suppress_small(units: dict[str, int], minimum: int = MIN_SUBGROUP_UNITS) -> set[str]:
    """Return the subgroups to suppress: small ones, and further ones until the total does not reveal a small one."""
    ordered = sorted(units, key=lambda name: (units[name], name))
    suppressed = {name for name in ordered if units[name] < minimum}
    for name in ordered:
        if not suppressed or (len(suppressed) > 1 and sum(units[other] for other in suppressed) >= minimum):
            break
        suppressed.add(name)
    return suppressed


def bootstrap_values(p: Floats, y: NDArray[np.int64], units: NDArray[np.int64], metric: str) -> Floats:
    """(draws,) resample patients with all their samples."""
    order = np.argsort(units, kind="stable")
    _, starts, counts = np.unique(units[order], return_index=True, return_counts=True)
    members = [order[start : start + count] for start, count in zip(starts, counts, strict=True)]
    generator = seeds.numbers("subgroups", BOOTSTRAP_DRAWS)
    out = np.empty(BOOTSTRAP_DRAWS)
    for draw in range(BOOTSTRAP_DRAWS):
        rows = np.concatenate([members[unit] for unit in generator.integers(len(members), size=len(members))])
        out[draw] = compute_value(p[rows], y[rows], metric)
    return out


def compute_value(p: Floats, y: NDArray[np.int64], metric: str) -> float:
    """Return the metric of samples with one class or several findings each; NaN where it is not defined.

    With several findings it is the mean over findings, of their known labels; predictions are cut at 0.5.
    """
    if y.ndim == 2:
        known = [(p[y[:, k] >= 0, k], y[y[:, k] >= 0, k] == 1) for k in range(y.shape[1])]
        called = [scores >= 0.5 for scores, _ in known]
    else:
        known = [(p[:, k], y == k) for k in range(p.shape[1])]
        called = [p.argmax(1) == k for k in range(p.shape[1])]
    if metric == "accuracy" and y.ndim == 1:
        return float((p.argmax(1) == y).mean())
    numbers = []
    for (scores, positive), predicted in zip(known, called, strict=True):
        if metric == "accuracy":
            numbers.append((predicted == positive).mean() if len(positive) else nan)
        elif not positive.any():
            numbers.append(nan)
        elif metric == "balanced" and y.ndim == 1:
            numbers.append(predicted[positive].mean())
        elif positive.all():
            numbers.append(nan)
        elif metric == "balanced":
            numbers.append((predicted[positive].mean() + (~predicted[~positive]).mean()) / 2)
        else:
            numbers.append(_roc_area(scores, positive))
    defined = [number for number in numbers if isfinite(number)]
    return float(np.mean(defined)) if defined else nan


def _roc_area(scores: Floats, positive: NDArray[np.bool_]) -> float:
    ordered = np.sort(scores)
    ranks = (np.searchsorted(ordered, scores) + np.searchsorted(ordered, scores, side="right") + 1) / 2
    n = int(positive.sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * (len(positive) - n)))


def _interval(draws: Floats) -> tuple[float, float]:
    defined = draws[np.isfinite(draws)]
    if not len(defined):
        return nan, nan
    low, high = np.quantile(defined, [ERROR_RATE / 2, 1 - ERROR_RATE / 2])
    return float(low), float(high)


def _read_samples(
    record: Record, column: str, seed: int | None
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64], NDArray[np.str_]]:
    """Return probabilities, labels, units and subgroups of the test samples of all clients that trained."""
    names = record.manifest["identity"].get("subgroups", [])
    if column not in names:
        if not names:
            raise DataError(f"{record.folder} has no subgroups; run it with subgroups = [{column!r}]")
        raise unknown_name("column of subgroups", column, names)
    seed = record.manifest["identity"]["seeds"][0] if seed is None else seed
    p, y, units, values = [], [], [], []
    n_units = 0
    for training in read_trainings(record, seed).values():
        for id in training["train"]:
            samples = training["scores"].get(id, {}).get("samples")
            if not samples or not samples["y"]:
                continue
            p.append(np.array(samples["p"]))
            y.append(np.array(samples["y"]))
            units.append(np.array(samples["groups"]) + n_units)
            n_units = int(units[-1].max()) + 1
            values.append(np.array([value or UNKNOWN for value in samples["subgroups"][column]]))
    if not p:
        raise DataError(f"{record.folder} has no test samples of clients that trained; subgroups need some")
    return np.concatenate(p), np.concatenate(y), np.concatenate(units), np.concatenate(values)


def compare_subgroups(records: Sequence[Record], column: str, metrics: Sequence[str], form: str) -> str:
    """Render a row for each run, metric and subgroup of a column."""
    head = ["method", "metric", column, "patients", "samples", "per cent", "95 % interval", "difference"]
    body = [
        [name, metric, *subgroup_cells(row)]
        for record, name in zip(records, run_names(identities_of(records), unique=True), strict=True)
        for metric in metrics or METRICS[:1]
        for row in subgroup_tables(record, [column], metric)[column]
    ]
    return render_table(head, body, form)
