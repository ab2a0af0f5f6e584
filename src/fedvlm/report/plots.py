"""Which pictures of runs there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedvlm.classifier.personalised import client_classifier, reopen_encoder
from fedvlm.data.splits import Ints
from fedvlm.errors import DataError, SettingsError, unknown_name
from fedvlm.evaluate import metrics
from fedvlm.evaluate.metrics import area_under_curve
from fedvlm.methods._prompts import class_features
from fedvlm.record import Record
from fedvlm.report.columns import COLUMNS, compute_columns, is_unscaled, ranking_curve
from fedvlm.report.explain import (
    MUTED_COLOUR,
    TEXT_COLOUR,
    colorbar_below,
    draw_prompt_map,
    hide_ticks,
    new_figure,
    overlay_patches,
    patch_grid,
    prompt_map,
    read_image,
    save_figure,
)
from fedvlm.report.tables import MAIN_COLUMNS
from fedvlm.storage.files import atomic_write, flatten, slug

# What each shows; those of one run alone say so.
PLOT_KINDS = {
    "rounds": "lines over the rounds, with bands over seeds",
    "sweep": "lines over a swept setting, or over the clients that train",
    "bars": "a bar for each run",
    "reliability": "confidence against hits, a panel for each client",
    "roc": "ROC and precision-recall curves",
    "decision": "net benefit, a panel for each client",
    "partition": "rows per class and client, dots coloured by domain",
    "kite": "the same as kites",
    "tsne": "local prompts on a plane, of one run",
    "heat": "where prompts look in an image",
}


def draw_runs(
    kind: str,
    results: Sequence[Record],
    out: str | Path,
    *,
    columns: Sequence[str] = (),
    over: str = "",
    training: str | None = None,
    seed: int | None = None,
    image: Path | None = None,
    name: str | None = None,
    client: str | None = None,
) -> Path:
    """A picture of some runs to a .png or .svg file; what a kind has no use for is refused."""
    if kind not in PLOT_KINDS:
        raise unknown_name("kind of picture", kind, PLOT_KINDS)
    if not results:
        raise SettingsError("no run is named; give one or more run directories")
    is_unused = {"--columns": bool(columns) and kind not in ("rounds", "sweep", "bars")}
    is_unused |= {"--x-axis": bool(over) and kind not in ("sweep", "bars")}
    is_unused |= {"--training": bool(training) and kind not in ("reliability", "roc", "decision")}
    is_unused |= {"--image": image is not None and kind != "heat"}
    for option, is_given in is_unused.items():
        if is_given:
            raise SettingsError(f"{option} has no use for a picture of kind {kind}; leave it out")
    if kind in ("rounds", "sweep", "bars", "reliability", "roc", "decision"):
        builders = {"rounds": rounds, "sweep": sweep, "bars": bars, "roc": roc}
        builders |= {"reliability": reliability, "decision": decision}
        options = PlotOptions(tuple(columns), over, training, seed)
        return save_figure(builders[kind](results, options), out)
    if kind in ("partition", "kite"):
        return draw_partitions(results, out, kite=kind == "kite")
    if kind == "tsne":
        return draw_tsne(results, out, seed)
    if image is None:
        raise SettingsError("a heat map is of an image; give --image FILE")
    return prompt_heatmaps(results, out, image, name, client, seed)


COLOURS = ("#1f6fb4", "#c2571a", "#2a8f6a", "#9a4ea3", "#b8860b", "#4d4d4d", "#d1467a", "#5aa9e6")


@dataclass(frozen=True)
class PlotOptions:
    """What a picture is of, where there is a choice."""

    columns: tuple[str, ...] = ()  # a panel each; the first of the table if left out
    over: str = ""  # the setting along the axis; the one in which runs differ
    training: str | None = None  # the first
    seed: int | None = None  # the first


def run_names(results: Sequence[Record], besides: Sequence[str] = ()) -> list[str]:
    """Methods, with the settings in which runs of the same one differ."""
    identities = [flatten(identity.manifest["identity"]) for identity in results]
    out = []
    for identity in identities:
        same = [
            other_identity for other_identity in identities if other_identity["method.name"] == identity["method.name"]
        ]
        keys = [key for key in differing_settings(same) if key not in besides and key in identity]
        words = [f"{key.removeprefix('method.')}={identity[key]}" for key in keys]
        out.append(", ".join([identity["method.name"], *words]))
    return out


def differing_settings(identities: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings in which they differ; where data lie does not matter."""
    keys = dict.fromkeys(key for identity in identities for key in identity)
    return [
        key
        for key in keys
        if not key.startswith("source.") and len({repr(identity.get(key)) for identity in identities}) > 1
    ]


def panels_of(columns: Sequence[str], width: float = 4.8) -> tuple[Any, list[Any]]:
    figure = new_figure(width * len(columns), 4.0)
    return figure, list(figure.subplots(1, len(columns), squeeze=False)[0])


def mean_and_std(groups: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [fmean(values) for values in groups], [stdev(values) if len(values) > 1 else 0.0 for values in groups]


def plot_with_band(
    panel: Any,
    x: Sequence[float],
    middle: Sequence[float],
    wide: Sequence[float],
    number: int,
    name: str,
    mark: str = "o",
) -> None:
    colour = COLOURS[number % len(COLOURS)]
    style = ("-", "--", ":")[number // len(COLOURS) % 3]
    panel.plot(x, middle, style, marker=mark or None, ms=4, color=colour, label=name)
    if any(wide):
        low, high = ([m + s * w for m, w in zip(middle, wide, strict=True)] for s in (-1, 1))
        panel.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)


def axis_unit(column: str) -> str:
    return column if is_unscaled(column) else "per cent"


def add_legend(figure: Any, panels: Sequence[Any]) -> Any:
    """One legend below for all panels if it is the same in each, else one in each."""
    names = [tuple(panel.get_legend_handles_labels()[1]) for panel in panels]
    for panel in panels:
        panel.tick_params(labelsize=8, colors=TEXT_COLOUR)
        panel.spines[["top", "right"]].set_visible(False)
        panel.title.set_fontsize(10)
        if len(set(names)) > 1:
            panel.legend(fontsize=7, frameon=False)
    if len(set(names)) == 1 and names[0]:
        longest = max(map(len, names[0]))
        fits = max(1, int(figure.get_figwidth() * 13 / (longest + 6)))
        handles = panels[0].get_legend_handles_labels()[0]
        figure.legend(handles, names[0], loc="outside lower center", ncols=fits, fontsize=8, frameon=False)
    return figure


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
        raise SettingsError(f"the runs of a method {differences_text}; name one by --x-axis")
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


MAX_CLIENT_PANELS = 6  # clients up to which each has a panel


def _measured(result: Record, options: PlotOptions) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A training, and the scores of its clients that were kept in full."""
    trainings = result.trainings(options.seed)
    name = options.training or result.manifest["trainings"][0]
    if name not in trainings:
        raise unknown_name("training of this run", name, trainings)
    about = trainings[name]
    measured = {id: client_scores for id, client_scores in about["scores"].items() if "decision" in client_scores}
    if not measured:
        raise DataError(f"{result.folder} has no metrics of test rows; run it again to have them")
    return about, measured


def _overlaid(results: Sequence[Record], options: PlotOptions, draw: Any) -> Any:
    """A panel for each client, or one for all that train and one for the unseen."""
    about, _ = _measured(results[0], options)
    ids = [*about["train"], *about["unseen"]]
    groups = {id: [id] for id in ids}
    if len(ids) > MAX_CLIENT_PANELS:
        groups = {"clients": about["train"], "unseen": about["unseen"]}
    groups = {name: those for name, those in groups.items() if those}
    figure, panels = panels_of(list(groups), 3.8)
    for (title, those), panel in zip(groups.items(), panels, strict=True):
        for number, (result, name) in enumerate(zip(results, run_names(results), strict=True)):
            _, measured = _measured(result, options)
            scored = [measured[id] for id in those if id in measured]
            if scored:
                draw(panel, scored, name, COLOURS[number % len(COLOURS)])
        unseen = ", unseen" if title in about["unseen"] else ""
        panel.set_title(f"{title}{unseen}")
    return add_legend(figure, panels)


def reliability(results: Sequence[Record], options: PlotOptions) -> Any:
    return _overlaid(results, options, reliability_panel)


def decision(results: Sequence[Record], options: PlotOptions) -> Any:
    return _overlaid(results, options, decision_panel)


def roc(results: Sequence[Record], options: PlotOptions) -> Any:
    """ROC and precision-recall curves of the clients' own test rows, one class against the rest."""
    figure, panels = panels_of(("ROC", "PR"), 4.4)
    axis_labels = {"ROC": ("false positive rate", "true positive rate"), "PR": ("recall", "precision")}
    for kind, panel in zip(axis_labels, panels, strict=True):
        for number, (result, name) in enumerate(zip(results, run_names(results), strict=True)):
            points = ranking_curve(result, kind, options.training, options.seed)
            x, y = zip(*points, strict=True)
            colour = COLOURS[number % len(COLOURS)]
            panel.plot(x, y, color=colour, label=f"{name}, area {area_under_curve(points, kind):.3f}")
        panel.set(xlabel=axis_labels[kind][0], ylabel=axis_labels[kind][1], title=kind, xlim=(0, 1.01))
        panel.set_ylim(0, 1.01)
    panels[0].plot([0, 1], [0, 1], color=MUTED_COLOUR, lw=0.8, zorder=0)
    return add_legend(figure, panels)


Floats = NDArray[np.float64]
CLIENT_GROUPS = (("clients", "train", "#1f6fb4"), ("unseen", "unseen", "#c2571a"))
ROUND_CURVES = (("accuracy", "unseen", "accuracy", "-"), ("clients F1", "target F1", "macro-F1", ":"))


DIAGRAM_PANELS = ("reliability", "decision", "rounds")


def draw_diagrams(result: Record, out: str | Path, training: str | None = None, seed: int | None = None) -> Path:
    """One training's three diagrams to a PNG file; the first training and seed if none is named."""
    return save_figure(diagram(result, DIAGRAM_PANELS, training, seed), out)


def diagram(result: Record, kinds: Sequence[str], training: str | None = None, seed: int | None = None) -> Any:
    """Some of PANELS side by side, as a matplotlib figure."""
    for kind in kinds:
        if kind not in DIAGRAM_PANELS:
            raise unknown_name("figure", kind, DIAGRAM_PANELS)
    trainings = result.trainings(seed)
    name = training or result.manifest["trainings"][0]
    if name not in trainings:
        raise unknown_name("training of this run", name, trainings)
    about = trainings[name]
    figure = new_figure(4.4 * len(kinds), 4.3)
    panels = dict(zip(kinds, figure.subplots(1, len(kinds), squeeze=False)[0], strict=True))
    measured = False
    for label, key, colour in CLIENT_GROUPS:
        client_scores = [about["scores"].get(id, {}) for id in about[key]]
        scores = [client_score for client_score in client_scores if "decision" in client_score]
        measured |= bool(scores)
        if scores and "reliability" in panels:
            reliability_panel(panels["reliability"], scores, label, colour)
        if scores and "decision" in panels:
            decision_panel(panels["decision"], scores, label, colour)
    if not measured and set(kinds) != {"rounds"}:
        raise DataError(f"{result.folder} has no metrics of test rows; run it again to have them")
    seed = result.manifest["identity"]["seeds"][0] if seed is None else seed
    if "rounds" in panels:
        training_lines = [line for line in result.lines() if line["training"] == f"{seed}-{slug(name)}"]
        _rounds(panels["rounds"], training_lines)
    unseen = "".join(f", {id} unseen" for id in about["unseen"][:3])
    figure.suptitle(
        f"{result.manifest['identity']['method']['name']} on {result.manifest['data']}{unseen}",
        fontsize=11,
        color=TEXT_COLOUR,
    )
    for panel in panels.values():
        panel.tick_params(labelsize=8, colors=TEXT_COLOUR)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8, frameon=False)
    return figure


def reliability_panel(panel: Any, scores: Sequence[Any], label: str, colour: str) -> None:
    bins: Floats = np.array([client_score["reliability"] for client_score in scores])  # (clients, bins, 3)
    rows = bins[:, :, 0].sum(0)
    confidence, accuracy = ((bins[:, :, 0] * bins[:, :, i]).sum(0) / rows.clip(1) for i in (1, 2))
    error = (rows * abs(confidence - accuracy)).sum() / rows.sum()
    nonempty = rows > 0
    panel.plot([0, 1], [0, 1], color=MUTED_COLOUR, zorder=0)
    panel.plot(confidence[nonempty], accuracy[nonempty], color=colour, alpha=0.6)
    size = 6 + 90 * rows[nonempty] / rows.max()
    panel.scatter(confidence[nonempty], accuracy[nonempty], size, colour, label=f"{label}, ECE {error:.1%}")
    panel.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="share of hits")
    panel.set_title("reliability (15 bins, a dot as large as its rows)", fontsize=9, color=TEXT_COLOUR)


def decision_panel(panel: Any, scores: Sequence[Any], label: str, colour: str) -> None:
    curves: Floats = np.array([client_score["decision"] for client_score in scores])
    rows = np.array([client_score["test_rows"] for client_score in scores])
    benefit = (rows[:, None] * curves[:, :, 1]).sum(0) / rows.sum()
    panel.plot(curves[0, :, 0], benefit, color=colour, label=label)
    panel.axhline(0, color=MUTED_COLOUR, zorder=0)
    panel.set(xlabel="threshold", ylabel="net benefit")
    panel.set_title("decision curve (one vs rest, mean over classes)", fontsize=9, color=TEXT_COLOUR)


def _rounds(panel: Any, lines: Sequence[Any]) -> None:
    panel.set(xlabel="round", ylabel="on test rows")
    panel.set_title("before each round's update", fontsize=9, color=TEXT_COLOUR)
    if not lines:
        panel.text(0.5, 0.5, "no rounds", ha="center", color=TEXT_COLOUR, transform=panel.transAxes)
    for *keys, name, style in ROUND_CURVES:
        for key, (label, _, colour) in zip(keys, CLIENT_GROUPS, strict=True):
            if lines and lines[0].get(key) is not None:
                values = [line[key] for line in lines]
                places = [line["round"] for line in lines]
                panel.plot(places, values, style, color=colour, label=f"{name}, {label}")


MAX_TICK_LABELS = 40  # classes or clients up to which an axis has their names


def draw_partitions(results: Sequence[Record], out: str | Path, kite: bool = False) -> Path:
    """A panel for each run: training rows of each class at each client.

    Dots as large as the rows and coloured by domain; or kites as wide as them.
    """
    counts = [_counts(run_counts) for run_counts in results]
    wide = [max(2.6, 0.3 * len(run_counts) + 1.2) for run_counts in counts]
    figure = new_figure(sum(wide), max(3.6, 0.17 * max(run_counts.shape[1] for run_counts in counts) + 1.6))
    panels = figure.subplots(1, len(results), squeeze=False, width_ratios=wide)[0]
    domains = sorted({run_counts for result in results for run_counts in _domains(result)} - {""})
    for panel, result, table in zip(panels, results, counts, strict=True):
        _draw_counts(panel, table, [_domain_colour(run_counts, domains) for run_counts in _domains(result)], kite)
        clients = list(result.manifest["counts"])
        if len(clients) <= MAX_TICK_LABELS:
            panel.set_xticks(range(len(clients)), clients, rotation=90, fontsize=7)
        if table.shape[1] <= MAX_TICK_LABELS:
            panel.set_yticks(range(table.shape[1]), result.manifest["classes"], fontsize=7)
        panel.set(xlabel="client", ylim=(table.shape[1] - 0.4, -0.6), xlim=(-0.7, len(table) - 0.3))
        about = result.manifest["identity"]["clients"]
        panel.set_title(f"{result.manifest['data']}, {about['partition']}", fontsize=10, color=TEXT_COLOUR)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("class")
    for number, name in enumerate(domains):
        panels[-1].scatter([], [], color=COLOURS[number % len(COLOURS)], label=name)
    if domains:
        figure.legend(loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return save_figure(figure, out)


def _draw_counts(panel: Any, table: Any, colours: Sequence[str], kite: bool) -> None:
    max_count = table.max()
    if not max_count:
        raise DataError("there is nothing to draw: no client has any training rows")
    for client, (row, colour) in enumerate(zip(table, colours, strict=True)):
        if kite:
            half_width = 0.46 * row / max_count
            places = range(len(row))
            panel.fill_betweenx(places, client - half_width, client + half_width, color=colour, lw=0.6)
        else:
            (class_ids,) = np.nonzero(row)
            panel.scatter([client] * len(class_ids), class_ids, 90 * row[class_ids] / max_count + 2, colour, lw=0)


def _counts(result: Record) -> Any:
    counts = result.manifest.get("counts")
    if not counts:
        raise DataError(f"{result.folder} has no rows per class and client; run it again")
    return np.array(list(counts.values()), dtype=np.float64)


def _domains(result: Record) -> list[str]:
    """Of each client; empty where its rows come from several, or where a record does not say."""
    named = result.manifest.get("domains", {})
    return [named.get(id, "") for id in result.manifest["counts"]]


def _domain_colour(domain: str, domains: Sequence[str]) -> str:
    return COLOURS[domains.index(domain) % len(COLOURS)] if domain else MUTED_COLOUR


def draw_tsne(results: Sequence[Record], out: str | Path, seed: int | None = None) -> Path:
    """The local prompts of one run on a plane, coloured by domain or superclass."""
    if len(results) != 1:
        raise SettingsError(f"a map is of one run, and {len(results)} are named; name one")
    return draw_prompt_map(prompt_map(results[0], seed), out)


def prompt_heatmaps(
    results: Sequence[Record],
    out: str | Path,
    image: Path,
    name: str | None = None,
    client: str | None = None,
    seed: int | None = None,
) -> Path:
    """Where the prompts of each run look in an image: cosines of patches and a class's feature.

    Without `name` it is the class nearest to the mean of the patches, for the first prompt.
    """
    decoded, shown_image, rows = read_image(image), None, []
    for result, title in zip(results, run_names(results), strict=True):
        client_id = client or next(iter(result.local(seed=seed)))
        classifier = client_classifier(result, client_id, seed)
        prompt_tensors = {"shared": classifier.shared.get("prompt"), "local": classifier.local.get("own")}
        prompt_tensors["local"] = classifier.local.get("prompt", prompt_tensors["local"])
        prompts = {word: tensor for word, tensor in prompt_tensors.items() if tensor is not None and tensor.ndim == 2}
        if not prompts:
            raise SettingsError(
                f"{result.folder} is a run of {title}, which has no prompt to look with; name runs "
                "of fedotp, promptfl or coop"
            )
        encoder, frozen = reopen_encoder(classifier.encoder), classifier.frozen
        preprocess: Any = encoder.preprocess
        pixels = preprocess(decoded)
        embedded = encoder.embed([pixels], patches=True)
        patches = torch.nn.functional.normalize(torch.from_numpy(embedded.patches).float()[0], dim=-1)
        shown_image = preprocess.undo(pixels) if shown_image is None else shown_image
        shape = patch_grid(len(patches), *pixels.shape[1:])
        for word, prompt in prompts.items():
            features = class_features(frozen, prompt)
            if name is None:
                name = frozen.classes[int((features @ patches.mean(0)).argmax())]
            if name not in frozen.classes:
                raise unknown_name("class", name, frozen.classes)
            cosines = (patches @ features[frozen.classes.index(name)]).double().numpy()
            rows.append((f"{title}\n{word} prompt", cosines.reshape(shape)))
    return _draw_heatmaps(shown_image, rows, f"{name}, by client {client or client_id}", out)


def _draw_heatmaps(image: Any, rows: Sequence[tuple[str, Any]], title: str, out: str | Path) -> Path:
    figure = new_figure(2.3 * (len(rows) + 1), 3.3)
    panels = figure.subplots(1, len(rows) + 1, squeeze=False)[0]
    hide_ticks(panels[0]).imshow(image)
    panels[0].set_title("image", fontsize=9, color=TEXT_COLOUR)
    for panel, (word, values) in zip(panels[1:], rows, strict=True):
        drawn = overlay_patches(hide_ticks(panel), image, values, float(values.min()), float(values.max()))
        panel.set_title(word, fontsize=9, color=TEXT_COLOUR)
        bar = colorbar_below(figure, drawn, [panel])
        bar.ax.tick_params(labelsize=7, colors=TEXT_COLOUR)
        bar.ax.locator_params(nbins=3)
    figure.suptitle(f"cosine of each patch with {title}", fontsize=10, color=TEXT_COLOUR)
    return save_figure(figure, out)


MAX_DIAMETER, MIN_DIAMETER = 0.94, 0.3  # diameters of bubbles, in cells
MAX_CELL_LABELS = 100  # more clients or classes than this are numbered on the axis, not named


def draw_partition(
    counts: Ints, clients: Sequence[str], classes: Sequence[str], path: str | Path, title: str = ""
) -> Path:
    """A bubble for each class and client, as large as it has rows; to a .png, .svg or .pdf."""
    file = Path(path)
    kind = file.suffix.lstrip(".").lower()
    if kind not in ("png", "svg", "pdf"):
        raise SettingsError(f"a picture cannot be drawn to {file}; end it in .png, .svg or .pdf")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError("drawing the partition needs matplotlib; install fedvlm[plot]") from error
    if not counts.any():
        raise DataError("there is nothing to draw: no client has any rows")
    cell = _cell_inches(max(counts.shape))
    size = (cell * len(clients) + 2.6, cell * len(classes) + 1.6)
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(aspect="equal")
    drawn = _bubbles(axes, counts)
    bar = figure.colorbar(drawn, ax=axes, label="rows", shrink=min(1, 3 / size[1]), pad=0.02)
    min_count, max_count = int(drawn.norm.vmin), int(drawn.norm.vmax)
    ticks = np.unique(np.geomspace(min_count, max_count, 5).round().astype(int)).tolist()
    bar.set_ticks(ticks, labels=[f"{tick:,}" for tick in ticks], minor=False)
    bar.minorticks_off()
    _label_axis(axes.xaxis, clients, "client", cell)
    _label_axis(axes.yaxis, classes, "class", cell)
    axes.set_xlim(-0.6, len(clients) - 0.4)
    axes.set_ylim(len(classes) - 0.4, -0.6)
    axes.set_title(title or f"{counts.sum():,} rows", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_write(file) as draft_path:
        figure.savefig(draft_path, format=kind)
    return file


def _cell_inches(count: int) -> float:
    """The side of a cell: room for names on a short axis, 15 inches in all for a long one."""
    return float(np.clip(15 / count, 0.02, 0.45))


def _bubbles(axes: Any, counts: Ints) -> Any:
    """Area and colour both say how many: area for large bubbles, colour for small ones."""
    from matplotlib.collections import EllipseCollection
    from matplotlib.colors import LogNorm

    column, row = np.nonzero(counts)
    rows = counts[column, row]
    size = np.maximum(MAX_DIAMETER * np.sqrt(rows / rows.max()), MIN_DIAMETER)
    bubbles = EllipseCollection(
        size,
        size,
        np.zeros(len(size)),
        units="x",
        offsets=np.column_stack([column, row]),
        offset_transform=axes.transData,
        cmap="viridis_r",
        norm=LogNorm(rows.min(), max(rows.max(), rows.min() + 1)),
    )
    bubbles.set_array(rows)
    return axes.add_collection(bubbles)


def _label_axis(axis: Any, names: Sequence[str], label: str, cell: float) -> None:
    """Names at their rows and columns, turned where they would touch; numbers where too many."""
    if len(names) > MAX_CELL_LABELS:
        axis.set_label_text(f"{label} (0 to {len(names) - 1})")
        return
    font = min(9.0, 0.8 * 72 * cell)
    touch = max(map(len, names), default=0) * 0.62 * font > 72 * cell
    turn = 90 if touch and axis.axis_name == "x" else 0
    axis.set_ticks(range(len(names)), names, rotation=turn, fontsize=font)
    axis.set_tick_params(length=2)
    axis.set_label_text(label)
