"""Numbers of several runs: lines over rounds or over a setting, and bars."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedvlm.errors import DataError, SettingsError, unknown_name
from fedvlm.evaluate import metrics
from fedvlm.record import Record
from fedvlm.report.columns import COLUMNS, compute_columns
from fedvlm.report.panels import (
    COLOURS,
    PlotOptions,
    add_legend,
    axis_unit,
    differing_settings,
    mean_and_std,
    panels_of,
    plot_with_band,
    run_names,
)
from fedvlm.report.pictures import TEXT_COLOUR
from fedvlm.report.tables import MAIN_COLUMNS
from fedvlm.report.units import is_unscaled
from fedvlm.storage.files import slug
from fedvlm.storage.toml import flatten

MIN_LOG_RATIO = 8  # times the smallest value: the axis of a swept setting is logarithmic
GROUPING_SETTINGS = {"data": "data", "encoder": "encoder"}  # settings that bars are grouped by, if they differ
UNSCALED_PREFIXES = ("loss", "difference", "epsilon")  # of a round's line, beside what tables have
ROUND_COLUMNS = {"P": "accuracy", "own": "accuracy", "G": "unseen", "global": "unseen"}


def column_value(result: Record, column: str) -> tuple[float | None, float | None]:
    """Mean and deviation over seeds of a column of its table, or of one on demand."""
    column_statistics = metrics.mean_and_std(result.tables)
    if column not in column_statistics and column in COLUMNS:
        column_statistics = metrics.mean_and_std(compute_columns(result, [column]))
        return next(iter(column_statistics.values()), (None, None))
    if column not in column_statistics:
        raise unknown_name("column", column, {*column_statistics, *COLUMNS})
    return column_statistics[column]


def default_column(result: Record) -> str:
    """The column a picture is of if none is named: the last of the main ones, as C."""
    table = result.tables[0]
    main = [key for key in ("C", "own", "target accuracy") if key in table]
    return next(iter([*main, *(key for key in table if key in MAIN_COLUMNS), *table]))


def rounds(results: Sequence[Record], options: PlotOptions) -> Any:
    """Lines over the rounds, the mean over trainings; a band is the deviation over seeds."""
    default = "C" if "C" in results[0].tables[0] else "accuracy"
    columns = options.columns or (default,)
    figure, panels = panels_of(columns)
    for column, panel in zip(columns, panels, strict=True):
        for number, (result, name) in enumerate(zip(results, run_names(results), strict=True)):
            curves = _over_rounds(result, column)
            places = sorted({place for curve in curves for place in curve})
            values_by_round = [[curve[place] for curve in curves if place in curve] for place in places]
            middle, wide = mean_and_std(values_by_round)
            plot_with_band(panel, places, middle, wide, number, name, mark="")
        unit_label = "per cent" if _is_fraction(column) else column
        panel.set(xlabel="round", ylabel=unit_label, title=column)
    return add_legend(figure, panels)


def _over_rounds(result: Record, column: str) -> list[dict[int, float]]:
    """By seed, the mean over its trainings of a column in every round; shares in per cent."""
    curves, scale = [], 100 if _is_fraction(column) else 1
    lines = result.lines()
    for seed in result.manifest["identity"]["seeds"]:
        training_names = {f"{seed}-{slug(name)}" for name in result.manifest["trainings"]}
        values_by_round: dict[int, list[float]] = {}
        for line in lines:
            if line["training"] in training_names:
                number = _round_value(line, column)
                if number is not None:
                    values_by_round.setdefault(line["round"], []).append(scale * number)
        curves.append({place: fmean(values) for place, values in values_by_round.items()})
    if not any(curves):
        known_columns = {key for line in lines for key in line if isinstance(line[key], float)}
        raise unknown_name("curve over the rounds", column, known_columns | {"C"})
    return curves


def _is_fraction(column: str) -> bool:
    """Whether a number of a round's line is a share of hits, or made of such."""
    return not is_unscaled(column) and not column.startswith(UNSCALED_PREFIXES)


def _round_value(line: Mapping[str, Any], column: str) -> float | None:
    if column == "C":  # everyone counts the same, seen and unseen
        return metrics.mean_accuracy(line["clients"], line["clients"])
    number = line.get(ROUND_COLUMNS.get(column, column))
    return number if isinstance(number, float) else None


def sweep(results: Sequence[Record], options: PlotOptions) -> Any:
    """Lines over a setting, a line for each method; a band is the deviation over seeds."""
    columns = options.columns or (default_column(results[0]),)
    if results[0].manifest["identity"]["protocol"] == "cross-device" and not options.over:
        return _plot_client_counts(results, options.columns or ("unseen",))
    over = options.over or _swept_setting(results)
    figure, panels = panels_of(columns)
    for column, panel in zip(columns, panels, strict=True):
        lines: dict[str, list[tuple[Any, float, float]]] = {}
        for result, name in zip(results, run_names(results, (over,)), strict=True):
            at = flatten(result.manifest["identity"]).get(over)
            mean, deviation = column_value(result, column)
            if at is not None and mean is not None:
                scale = 1 if is_unscaled(column) else 100
                lines.setdefault(name, []).append((at, scale * mean, scale * (deviation or 0)))
        if not lines:
            raise DataError(f"no run has both {over} and {column}; name others")
        _plot_lines(panel, lines, over)
        panel.set(ylabel=axis_unit(column), title=column)
    return add_legend(figure, panels)


def _plot_client_counts(results: Sequence[Record], columns: Sequence[str]) -> Any:
    """Of a cross-device run: lines over the number of clients that train."""
    figure, panels = panels_of(columns)
    for column, panel in zip(columns, panels, strict=True):
        lines = {}
        for result, name in zip(results, run_names(results), strict=True):
            points = []
            for key, (mean, deviation) in metrics.mean_and_std(result.tables).items():
                if key.startswith(f"{column}, n=") and mean is not None:
                    points.append((int(key.partition("=")[2]), 100 * mean, 100 * (deviation or 0)))
            if points:
                lines[name] = points
        if not lines:
            raise unknown_name("column", column, ("unseen", "own"))
        _plot_lines(panel, lines, "clients that train")
        panel.set(ylabel=axis_unit(column), title=column)
    return add_legend(figure, panels)


def _plot_lines(panel: Any, lines: Mapping[str, list[tuple[Any, float, float]]], over: str) -> None:
    places = sorted({at for points in lines.values() for at, *_ in points}, key=_sort_key)
    words = any(not isinstance(at, int | float) or isinstance(at, bool) for at in places)
    for number, (name, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda point: _sort_key(point[0]))
        x = [places.index(at) if words else at for at, *_ in points]
        plot_with_band(panel, x, [point[1] for point in points], [point[2] for point in points], number, name)
    if words:
        panel.set_xticks(range(len(places)), [_short_name(at) for at in places])
    elif places[0] > 0 and places[-1] / places[0] >= MIN_LOG_RATIO:
        panel.set_xscale("log", base=2)
        panel.set_xticks(places, [f"{at:g}" for at in places])
    panel.set_xlabel(over.removeprefix("method."))


def _sort_key(at: Any) -> tuple[bool, Any]:
    number = isinstance(at, int | float)
    return (not number, at if number else str(at))


def _short_name(at: Any) -> str:
    return str(at).rpartition("/")[2]


def _swept_setting(results: Sequence[Record]) -> str:
    """The one setting in which runs of the same method differ."""
    identities = [flatten(identity.manifest["identity"]) for identity in results]
    swept: dict[str, None] = {}
    for name in {identity["method.name"] for identity in identities}:
        swept |= dict.fromkeys(
            differing_settings([identity for identity in identities if identity["method.name"] == name])
        )
    if len(swept) != 1:
        differences_text = f"differ in {', '.join(sorted(swept))}" if swept else "differ in no setting"
        raise SettingsError(f"the runs of a method {differences_text}; name one by --over")
    return next(iter(swept))


def bars(results: Sequence[Record], options: PlotOptions) -> Any:
    """A bar for each run, grouped by data or by a setting; a whisker is the deviation."""
    columns = options.columns or (default_column(results[0]),)
    identities = [flatten(identity.manifest["identity"]) for identity in results]
    grouping = [key for key in GROUPING_SETTINGS if key in differing_settings(identities)]
    over = options.over or (grouping[0] if grouping else "")
    names = run_names(results, (over,))
    groups = list(dict.fromkeys(_short_name(identity.get(over, "")) for identity in identities))
    kinds = list(dict.fromkeys(names))
    wide = 0.8 / len(kinds)
    figure, panels = panels_of(columns, max(3.6, 0.6 + 0.28 * len(kinds) * len(groups) + 1.2))
    for column, panel in zip(columns, panels, strict=True):
        scale = 1 if is_unscaled(column) else 100
        for number, kind in enumerate(kinds):
            x, heights, off = [], [], []
            for result, identity, name in zip(results, identities, names, strict=True):
                mean, deviation = column_value(result, column)
                if name == kind and mean is not None:
                    offset = (number - (len(kinds) - 1) / 2) * wide
                    x.append(groups.index(_short_name(identity.get(over, ""))) + offset)
                    heights.append(scale * mean)
                    off.append(scale * (deviation or 0))
            colour = COLOURS[number % len(COLOURS)]
            panel.bar(x, heights, 0.92 * wide, color=colour, label=kind)
            if any(off):
                panel.errorbar(x, heights, off, fmt="none", ecolor=TEXT_COLOUR, elinewidth=1, capsize=2)
        panel.set_xticks(range(len(groups)), groups)
        panel.set(ylabel=axis_unit(column), title=column)
    return add_legend(figure, panels)
