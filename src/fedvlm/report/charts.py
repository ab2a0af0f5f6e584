"""Describe the charts of runs as data; the page draws them as SVG and `fedvlm plot` by matplotlib."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from fedvlm.errors import DataError, SettingsError, unknown_name
from fedvlm.evaluate.metrics import mean_and_std
from fedvlm.record import Record
from fedvlm.report.columns import column_value, is_unscaled
from fedvlm.report.runs import differing_settings, find_training, identities_of, pool_scores, round_curves, run_names
from fedvlm.report.tables import MAIN_COLUMNS
from fedvlm.storage.files import flatten

Point = Sequence[float]
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#6a3d9a", "#444444")  # of runs
CLIENT_PALETTE = ("#8c510a", "#35978f", "#c51b7d", "#7fbc41", "#4d4dff", "#e08214", "#542788", "#878787")
N_DASHES = 3  # line styles; a ninth run has the first colour and the second style
UNIT_RANGE = (0.0, 1.0)
MIN_LOG_RATIO = 8  # of the largest to the smallest value of a swept setting, for a logarithmic axis
MAX_CLIENT_CHARTS = 6  # with more clients there is one chart for all of them
GROUPING_SETTINGS = ("data", "encoder")  # that bars are grouped by, if they differ
UNSCALED_PREFIXES = ("loss", "difference", "epsilon")  # of a round's line, beside those of columns
ROUND_KEYS = {"P": "accuracy", "own": "accuracy", "G": "unseen", "global": "unseen"}
PLOT_KINDS = {  # of `fedvlm plot`
    "rounds": "lines over the rounds, with bands over seeds",
    "sweep": "lines over a swept setting, or over the clients that train",
    "bars": "a bar for each run",
    "reliability": "confidence against accuracy, a panel for each client",
    "roc": "ROC and precision-recall curves",
    "decision": "net benefit, a panel for each client",
    "partition": "samples per class and client, dots coloured by domain",
    "kite": "the same as kites",
    "tsne": "local prompts on a plane, of one run",
    "heat": "where prompts look in an image",
    "subgroups": "AUC by subgroup, a panel for each column of subgroups",
}
RANKING_CURVES = (
    ("ROC", "AUC", "ROC curve", "false positive rate", "true positive rate (%)"),
    ("PR", "AP", "Precision-recall curve", "recall", "precision (%)"),
)
MIN_BIN_FRACTION = 0.01  # of the samples; smaller bins of a reliability diagram are noise


@dataclass(frozen=True)
class Series:
    """One named line, or the dots of one name."""

    name: str
    points: Sequence[Point]  # (x, y)
    position: int  # of the run: its colour and line style
    band: Sequence[tuple[float, float, float]] = ()  # x, low, high
    sizes: Sequence[float] = ()  # areas of the dots, relative to the largest


@dataclass(frozen=True)
class Chart:
    """A diagram with two axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: Literal["line", "dots", "bars"] = "line"
    is_percent: bool = True  # y values are fractions and are shown as per cent
    x_log: bool = False
    has_diagonal: bool = False
    has_zero_line: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    categories: Sequence[str] = ()  # names of x = 0, 1, ...
    key: str = ""  # of the curve that the page's script redraws it from
    across: str = ""  # what its x axis is of: "round" or "kB"
    size_note: str = ""  # what the area of a dot means
    x_ticks: Sequence[float] = ()  # all of them, if they are not to be chosen
    is_of_clients: bool = False  # its colours are those of clients, none of which is a run's


@dataclass(frozen=True)
class BubbleChart:
    """Samples per client and class: the area of a bubble is the count."""

    title: str
    counts: Sequence[Sequence[int]]  # (clients, classes)
    clients: Sequence[str]
    classes: Sequence[str]
    groups: Sequence[str] = ()  # the domain of each client, empty if it has several

    @property
    def max_count(self) -> int:
        return max((int(count) for row in self.counts for count in row), default=0)


def size_legend(max_count: int) -> list[int]:
    """Counts whose bubbles stand in the legend: the largest, and round fractions of it."""
    magnitude = 10 ** (len(str(max_count)) - 1)
    largest = max(max_count // magnitude * magnitude, 1)
    return sorted({count for count in (largest // 10, largest // 3, largest) if count})


def mean_curve(
    curves: Sequence[Mapping[str, Any]], key: str, across: str = "round"
) -> list[tuple[float, float, float]]:
    """Return (x, mean over trainings and seeds, standard deviation over seeds) of each round."""
    by_seed: dict[int, list[Mapping[str, Any]]] = {}
    for curve in curves:
        if key in curve:
            by_seed.setdefault(curve["seed"], []).append(curve)
    length = min((len(curve["kB"]) for group in by_seed.values() for curve in group), default=0)
    out = []
    for number in range(length):
        means = []
        for group in by_seed.values():
            values = [curve[key][number] for curve in group if curve[key][number] is not None]
            if values:
                means.append(fmean(values))
        moved = fmean(curve["kB"][number] for group in by_seed.values() for curve in group)
        if not means or (across == "kB" and not moved):  # there is no logarithm of nothing
            continue
        x = float(number) if across == "round" else moved
        out.append((x, fmean(means), stdev(means) if len(means) > 1 else 0.0))
    return out


def with_band(name: str, points: Iterable[tuple[float, float, float]], position: int) -> Series:
    """Build a line with a band of one standard deviation around it."""
    points = list(points)
    band = [(x, mean - std, mean + std) for x, mean, std in points] if any(std for *_, std in points) else []
    return Series(name, [(x, mean) for x, mean, _ in points], position, band)


Summaries = Mapping[int, tuple[str, Mapping[str, Any]]]  # by position: a run's name and its pooled scores


def reliability_chart(summaries: Summaries, title: str = "Reliability diagram") -> Chart:
    """Accuracy by confidence; the ECE is that of the pooled samples."""
    series = []
    for position, (name, summary) in summaries.items():
        least = MIN_BIN_FRACTION * summary["n_samples"]
        pairs = zip(summary["reliability"], summary["bins"], strict=True)
        shown = [(point, count / max(summary["bins"])) for point, count in pairs if count >= least]
        label = f"{name}, ECE {summary['ECE']:.1%}"
        series.append(Series(label, [p for p, _ in shown], position, sizes=[size for _, size in shown]))
    chart = Chart(title, "confidence", "accuracy (%)", series, has_diagonal=True)
    return replace(chart, x_range=UNIT_RANGE, y_range=UNIT_RANGE, size_note="dot area: samples in the bin")


def ranking_charts(summaries: Summaries) -> list[Chart]:
    """ROC and precision-recall curves: one class against the rest, all pairs of sample and class together."""
    out = []
    for kind, area, title, x_label, y_label in RANKING_CURVES:
        series = []
        for position, (name, summary) in summaries.items():
            series.append(Series(f"{name}, {area} {summary[area]:.3f}", summary[kind], position))
        chart = Chart(f"{title} (micro-average)", x_label, y_label, series, has_diagonal=kind == "ROC")
        out.append(replace(chart, x_range=UNIT_RANGE, y_range=UNIT_RANGE))
    return out


def decision_chart(summaries: Summaries, title: str = "Decision curve") -> Chart:
    """Net benefit over the threshold, one class against the rest, mean over classes."""
    series = [Series(name, summary["decision"], position) for position, (name, summary) in summaries.items()]
    return Chart(title, "threshold probability", "net benefit", series, is_percent=False, has_zero_line=True)


def risk_chart(summaries: Summaries) -> Chart:
    """Error rate if only the most confident samples are answered."""
    series = [Series(name, summary["risk"], position) for position, (name, summary) in summaries.items()]
    return Chart("Risk-coverage curve", "coverage", "error rate (%)", series, x_range=UNIT_RANGE)


# Charts of several runs, as `fedvlm plot` draws them.


@dataclass(frozen=True)
class PlotOptions:
    """What a plot shows, where there is a choice."""

    columns: Sequence[str] = ()  # a panel each; the main column of the table if left out
    over: str = ""  # the setting along the x axis; the one in which the runs differ
    training: str | None = None  # the first
    seed: int | None = None  # the first
    image: Path | None = None  # what the prompts look at
    class_name: str | None = None  # the class nearest to the image
    client: str | None = None  # the first


def default_column(result: Record) -> str:
    """Return the column a plot is of if none is named: the last of the main ones, as C."""
    table = result.tables[0]
    main = [key for key in ("C", "own", "target accuracy") if key in table]
    return next(iter([*main, *(key for key in table if key in MAIN_COLUMNS), *table]))


def rounds_charts(results: Sequence[Record], options: PlotOptions) -> list[Chart]:
    """Draw lines over the rounds: mean over trainings, band of one standard deviation over seeds."""
    default = "C" if "C" in results[0].tables[0] else "accuracy"
    charts = []
    for column in options.columns or (default,):
        key = ROUND_KEYS.get(column, column)
        series = []
        for position, (result, name) in enumerate(zip(results, run_names(identities_of(results)), strict=True)):
            points = mean_curve(round_curves(result, [key]), key)
            if not points:
                known = {key for line in result.lines() for key in line if isinstance(line[key], float)}
                raise unknown_name("curve over the rounds", column, known | {"C"})
            series.append(with_band(name, points, position))
        is_percent = not is_unscaled(column) and not column.startswith(UNSCALED_PREFIXES)
        charts.append(Chart(column, "round", "per cent" if is_percent else column, series, is_percent=is_percent))
    return charts


def sweep_charts(results: Sequence[Record], options: PlotOptions) -> list[Chart]:
    """Draw lines over a setting, one for each method, or over the clients of a cross-device run."""
    is_cross_device = results[0].manifest["identity"]["protocol"] == "cross-device" and not options.over
    if is_cross_device:
        return [_client_count_chart(results, column) for column in options.columns or ("unseen",)]
    over = options.over or _swept_setting(results)
    charts = []
    for column in options.columns or (default_column(results[0]),):
        lines: dict[str, list[tuple[Any, float, float]]] = {}
        for result, name in zip(results, run_names(identities_of(results), (over,)), strict=True):
            at = flatten(result.manifest["identity"]).get(over)
            mean, std = column_value(result, column)
            if at is not None and mean is not None:
                lines.setdefault(name, []).append((at, mean, std or 0.0))
        if not lines:
            raise DataError(f"no run has both {over} and {column}; name others")
        charts.append(_line_chart(column, over.removeprefix("method."), lines))
    return charts


def _client_count_chart(results: Sequence[Record], column: str) -> Chart:
    """Draw lines over the number of clients that train."""
    lines: dict[str, list[tuple[Any, float, float]]] = {}
    for result, name in zip(results, run_names(identities_of(results)), strict=True):
        for key, (mean, std) in mean_and_std(result.tables).items():
            if key.startswith(f"{column}, n=") and mean is not None:
                lines.setdefault(name, []).append((int(key.partition("=")[2]), mean, std or 0.0))
    if not lines:
        raise unknown_name("column", column, ("unseen", "own"))
    return _line_chart(column, "training clients", lines)


def _line_chart(column: str, x_label: str, lines: Mapping[str, list[tuple[Any, float, float]]]) -> Chart:
    """Build a chart of named lines over numbers, or of dots over words."""
    places = sorted({at for points in lines.values() for at, *_ in points}, key=_sort_key)
    is_categorical = any(not isinstance(at, int | float) or isinstance(at, bool) for at in places)
    series = []
    for position, (name, points) in enumerate(lines.items()):
        ordered = sorted(points, key=lambda point: _sort_key(point[0]))
        placed = [(places.index(at) if is_categorical else at, mean, std) for at, mean, std in ordered]
        series.append(with_band(name, placed, position))
    is_log = not is_categorical and places[0] > 0 and places[-1] / places[0] >= MIN_LOG_RATIO
    return Chart(
        column,
        x_label,
        _unit(column),
        series,
        kind="dots" if is_categorical else "line",
        is_percent=not is_unscaled(column),
        x_log=is_log,
        x_ticks=places if is_log else (),
        categories=[_short_name(at) for at in places] if is_categorical else (),
    )


def bar_charts(results: Sequence[Record], options: PlotOptions) -> list[Chart]:
    """Draw a bar for each run, grouped by data, encoder or a setting; whiskers are standard deviations."""
    identities = [flatten(result.manifest["identity"]) for result in results]
    over = options.over or next((key for key in GROUPING_SETTINGS if key in differing_settings(identities)), "")
    names = run_names(identities_of(results), (over,))
    groups = list(dict.fromkeys(_short_name(identity.get(over, "")) for identity in identities))
    charts = []
    for column in options.columns or (default_column(results[0]),):
        bars: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        for result, identity, name in zip(results, identities, names, strict=True):
            mean, std = column_value(result, column)
            if mean is not None:
                place = float(groups.index(_short_name(identity.get(over, ""))))
                bars[name].append((place, mean, std or 0.0))
        series = [with_band(name, points, position) for position, (name, points) in enumerate(bars.items())]
        is_percent = not is_unscaled(column)
        charts.append(Chart(column, "", _unit(column), series, "bars", is_percent, categories=groups))
    return charts


def _unit(column: str) -> str:
    return column if is_unscaled(column) else "per cent"


def _sort_key(at: Any) -> tuple[bool, Any]:
    is_number = isinstance(at, int | float)
    return (not is_number, at if is_number else str(at))


def _short_name(at: Any) -> str:
    return str(at).rpartition("/")[2]


def _swept_setting(results: Sequence[Record]) -> str:
    """Return the one setting in which runs of the same method differ."""
    identities = [flatten(result.manifest["identity"]) for result in results]
    swept: set[str] = set()
    for name in {identity["method.name"] for identity in identities}:
        swept.update(differing_settings([identity for identity in identities if identity["method.name"] == name]))
    if len(swept) != 1:
        which = f"differ in {', '.join(sorted(swept))}" if swept else "differ in no setting"
        raise SettingsError(f"the runs of a method {which}; name one by --x-axis")
    return next(iter(swept))


def client_charts(results: Sequence[Record], options: PlotOptions, build: Callable[..., Chart]) -> list[Chart]:
    """Build a chart for each client, or one for all that train and one for the unseen; a series for each run."""
    about = find_training(results[0], options.training, options.seed)
    ids = [*about["train"], *about["unseen"]]
    groups = {id: [id] for id in ids}
    if len(ids) > MAX_CLIENT_CHARTS:
        groups = {"clients": about["train"], "unseen": about["unseen"]}
    charts = []
    for title, members in groups.items():
        if members:
            unseen = ", unseen" if title in about["unseen"] else ""
            charts.append(build(_summaries(results, options, members), f"{title}{unseen}"))
    return charts


def _summaries(results: Sequence[Record], options: PlotOptions, ids: Sequence[str] | None = None) -> Summaries:
    """Pool the test samples of some clients of one training, or of all that trained, run by run."""
    summaries = {}
    for position, (result, name) in enumerate(zip(results, run_names(identities_of(results)), strict=True)):
        about = find_training(result, options.training, options.seed)
        summary = pool_scores(about["scores"].get(id, {}) for id in ids or about["train"])
        if summary:
            summaries[position] = (name, summary)
    if not summaries:
        raise DataError(f"{results[0].folder} has no metrics of test samples; run it again to have them")
    return summaries


def own_ranking_charts(results: Sequence[Record], options: PlotOptions) -> list[Chart]:
    """Draw the ROC and precision-recall curves of the clients' own test samples."""
    return ranking_charts(_summaries(results, options))


def training_charts(result: Record, kinds: Sequence[str], training: str | None, seed: int | None) -> list[Chart]:
    """Build reliability, decision or rounds of one training: its clients against the unseen."""
    about = find_training(result, training, seed)
    groups = {"clients": about["train"], "unseen": about["unseen"]}
    pooled = [(name, pool_scores(about["scores"].get(id, {}) for id in ids)) for name, ids in groups.items()]
    summaries = {position: pair for position, pair in enumerate(pooled) if pair[1]}
    if not summaries and set(kinds) != {"rounds"}:
        raise DataError(f"{result.folder} has no metrics of test samples; run it again to have them")
    build: dict[str, Callable[[], Chart]] = {
        "rounds": lambda: _training_rounds(result, training or result.manifest["trainings"][0], seed),
        "reliability": lambda: reliability_chart(summaries),
        "decision": lambda: decision_chart(summaries),
    }
    return [build[kind]() for kind in kinds]


def _training_rounds(result: Record, training: str, seed: int | None) -> Chart:
    """Draw accuracy and macro-F1 of one training before each round's update."""
    seed = result.manifest["identity"]["seeds"][0] if seed is None else seed
    names = {"accuracy": "accuracy, clients", "unseen": "accuracy, unseen"}
    names |= {"clients F1": "macro-F1, clients", "target F1": "macro-F1, unseen"}
    chosen, every = (seed, training), round_curves(result, list(names))
    curves = [curve for curve in every if (curve["seed"], curve["training"]) == chosen]
    series = [with_band(name, mean_curve(curves, key), place) for place, (key, name) in enumerate(names.items())]
    drawn = [line for line in series if line.points]
    return Chart("Before each round, and as reported", "round", "per cent", drawn)
