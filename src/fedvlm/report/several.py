"""Numbers of several runs: lines over rounds or over a setting, and bars."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedvlm.errors import DataError, SettingsError, unknown
from fedvlm.evaluate import scores
from fedvlm.record import Record
from fedvlm.report.columns import COLUMNS, on_demand
from fedvlm.report.panels import (
    COLOURS,
    Asked,
    band,
    differing,
    finish,
    middle_of,
    panels_of,
    titles,
    unit,
)
from fedvlm.report.pictures import INK
from fedvlm.report.tables import MAIN
from fedvlm.report.units import plain
from fedvlm.storage.files import slug
from fedvlm.storage.toml import flat

WIDE = 8  # times the smallest value: the axis of a swept setting is logarithmic
SAID = {"data": "data", "encoder": "encoder"}  # settings that bars are grouped by, if they differ
PLAIN = ("loss", "difference", "epsilon")  # of a round's line, beside what tables have
ROUNDS = {"P": "accuracy", "own": "accuracy", "G": "unseen", "global": "unseen"}


def value(result: Record, column: str) -> tuple[float | None, float | None]:
    """Mean and deviation over seeds of a column of its table, or of one on demand."""
    found = scores.spread(result.tables)
    if column not in found and column in COLUMNS:
        found = scores.spread(on_demand(result, [column]))
        return next(iter(found.values()), (None, None))
    if column not in found:
        raise unknown("column", column, {*found, *COLUMNS})
    return found[column]


def usual(result: Record) -> str:
    """The column a picture is of if none is named: the last of the main ones, as C."""
    table = result.tables[0]
    main = [key for key in ("C", "own", "target accuracy") if key in table]
    return next(iter([*main, *(key for key in table if key in MAIN), *table]))


def rounds(results: Sequence[Record], asked: Asked) -> Any:
    """Lines over the rounds, the mean over trainings; a band is the deviation over seeds."""
    default = "C" if "C" in results[0].tables[0] else "accuracy"
    columns = asked.columns or (default,)
    figure, panels = panels_of(columns)
    for column, panel in zip(columns, panels, strict=True):
        for number, (result, name) in enumerate(zip(results, titles(results), strict=True)):
            each = _over_rounds(result, column)
            places = sorted({place for one in each for place in one})
            many = [[one[place] for one in each if place in one] for place in places]
            middle, wide = middle_of(many)
            band(panel, places, middle, wide, number, name, mark="")
        said = "per cent" if _share(column) else column
        panel.set(xlabel="round", ylabel=said, title=column)
    return finish(figure, panels)


def _over_rounds(result: Record, column: str) -> list[dict[int, float]]:
    """By seed, the mean over its trainings of a column in every round; shares in per cent."""
    out, scale = [], 100 if _share(column) else 1
    lines = result.lines()
    for seed in result.manifest["identity"]["seeds"]:
        mine = {f"{seed}-{slug(name)}" for name in result.manifest["trainings"]}
        many: dict[int, list[float]] = {}
        for line in lines:
            if line["training"] in mine:
                found = _at(line, column)
                if found is not None:
                    many.setdefault(line["round"], []).append(scale * found)
        out.append({place: fmean(each) for place, each in many.items()})
    if not any(out):
        known = {key for line in lines for key in line if isinstance(line[key], float)}
        raise unknown("curve over the rounds", column, known | {"C"})
    return out


def _share(column: str) -> bool:
    """Whether a number of a round's line is a share of hits, or made of such."""
    return not plain(column) and not column.startswith(PLAIN)


def _at(line: Mapping[str, Any], column: str) -> float | None:
    if column == "C":  # everyone counts the same, seen and unseen
        return scores.accuracy(line["clients"], line["clients"])
    found = line.get(ROUNDS.get(column, column))
    return found if isinstance(found, float) else None


def sweep(results: Sequence[Record], asked: Asked) -> Any:
    """Lines over a setting, a line for each method; a band is the deviation over seeds."""
    columns = asked.columns or (usual(results[0]),)
    if results[0].manifest["identity"]["protocol"] == "cross-device" and not asked.over:
        return _counts(results, asked.columns or ("unseen",))
    over = asked.over or _only(results)
    figure, panels = panels_of(columns)
    for column, panel in zip(columns, panels, strict=True):
        lines: dict[str, list[tuple[Any, float, float]]] = {}
        for result, name in zip(results, titles(results, (over,)), strict=True):
            at = flat(result.manifest["identity"]).get(over)
            mean, deviation = value(result, column)
            if at is not None and mean is not None:
                scale = 1 if plain(column) else 100
                lines.setdefault(name, []).append((at, scale * mean, scale * (deviation or 0)))
        if not lines:
            raise DataError(f"no run has both {over} and {column}; name others")
        _lines(panel, lines, over)
        panel.set(ylabel=unit(column), title=column)
    return finish(figure, panels)


def _counts(results: Sequence[Record], columns: Sequence[str]) -> Any:
    """Of a cross-device run: lines over the number of clients that train."""
    figure, panels = panels_of(columns)
    for column, panel in zip(columns, panels, strict=True):
        lines = {}
        for result, name in zip(results, titles(results), strict=True):
            points = []
            for key, (mean, deviation) in scores.spread(result.tables).items():
                if key.startswith(f"{column}, n=") and mean is not None:
                    points.append((int(key.partition("=")[2]), 100 * mean, 100 * (deviation or 0)))
            if points:
                lines[name] = points
        if not lines:
            raise unknown("column", column, ("unseen", "own"))
        _lines(panel, lines, "clients that train")
        panel.set(ylabel=unit(column), title=column)
    return finish(figure, panels)


def _lines(panel: Any, lines: Mapping[str, list[tuple[Any, float, float]]], over: str) -> None:
    places = sorted({at for points in lines.values() for at, *_ in points}, key=_order)
    words = any(not isinstance(at, int | float) or isinstance(at, bool) for at in places)
    for number, (name, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda one: _order(one[0]))
        x = [places.index(at) if words else at for at, *_ in points]
        band(panel, x, [one[1] for one in points], [one[2] for one in points], number, name)
    if words:
        panel.set_xticks(range(len(places)), [_short(at) for at in places])
    elif places[0] > 0 and places[-1] / places[0] >= WIDE:
        panel.set_xscale("log", base=2)
        panel.set_xticks(places, [f"{at:g}" for at in places])
    panel.set_xlabel(over.removeprefix("method."))


def _order(at: Any) -> tuple[bool, Any]:
    number = isinstance(at, int | float)
    return (not number, at if number else str(at))


def _short(at: Any) -> str:
    return str(at).rpartition("/")[2]


def _only(results: Sequence[Record]) -> str:
    """The one setting in which runs of the same method differ."""
    every = [flat(one.manifest["identity"]) for one in results]
    found: dict[str, None] = {}
    for name in {one["method.name"] for one in every}:
        found |= dict.fromkeys(differing([one for one in every if one["method.name"] == name]))
    if len(found) != 1:
        which = f"differ in {', '.join(sorted(found))}" if found else "differ in no setting"
        raise SettingsError(f"the runs of a method {which}; name one by --over")
    return next(iter(found))


def bars(results: Sequence[Record], asked: Asked) -> Any:
    """A bar for each run, grouped by data or by a setting; a whisker is the deviation."""
    columns = asked.columns or (usual(results[0]),)
    every = [flat(one.manifest["identity"]) for one in results]
    apart = [key for key in SAID if key in differing(every)]
    over = asked.over or (apart[0] if apart else "")
    names = titles(results, (over,))
    groups = list(dict.fromkeys(_short(one.get(over, "")) for one in every))
    kinds = list(dict.fromkeys(names))
    wide = 0.8 / len(kinds)
    figure, panels = panels_of(columns, max(3.6, 0.6 + 0.28 * len(kinds) * len(groups) + 1.2))
    for column, panel in zip(columns, panels, strict=True):
        scale = 1 if plain(column) else 100
        for number, kind in enumerate(kinds):
            x, heights, off = [], [], []
            for result, one, name in zip(results, every, names, strict=True):
                mean, deviation = value(result, column)
                if name == kind and mean is not None:
                    left = (number - (len(kinds) - 1) / 2) * wide
                    x.append(groups.index(_short(one.get(over, ""))) + left)
                    heights.append(scale * mean)
                    off.append(scale * (deviation or 0))
            colour = COLOURS[number % len(COLOURS)]
            panel.bar(x, heights, 0.92 * wide, color=colour, label=kind)
            if any(off):
                panel.errorbar(x, heights, off, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        panel.set_xticks(range(len(groups)), groups)
        panel.set(ylabel=unit(column), title=column)
    return finish(figure, panels)
