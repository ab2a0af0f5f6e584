"""Draw charts and explanations to files by matplotlib, which is imported only when something is drawn."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.data.splits import Ints
from fedvlm.errors import DataError, SettingsError, unknown_name
from fedvlm.plugins import require
from fedvlm.record import Record
from fedvlm.report import charts
from fedvlm.report.charts import PLOT_KINDS, BubbleChart, Chart, PlotOptions
from fedvlm.report.explain import Explanation, PromptMap, prompt_heatmaps, prompt_map
from fedvlm.report.runs import find_training, identities_of, run_names
from fedvlm.report.subgroups import subgroup_charts, subgroup_tables
from fedvlm.storage.files import write_file

# Kinds that an option is of use for.
OPTION_USES: dict[str, tuple[str, ...]] = {"columns": ("rounds", "sweep", "bars"), "over": ("sweep", "bars")}
OPTION_USES |= {"training": ("reliability", "roc", "decision"), "image": ("heat",)}
OPTION_NAMES = {"over": "x-axis"}  # of the command line
DIAGRAMS = ("reliability", "decision", "rounds")  # of one run
TEXT_COLOUR, MUTED_COLOUR = "#222222", "#888888"
MAX_LABELLED_CLIENTS = 40  # a map of more clients has no names in it
MAX_TICK_LABELS = 60  # more clients or classes than this are numbered on the axis, not named


def draw_runs(kind: str, results: Sequence[Record], out: str | Path, **given: Any) -> Path:
    """Draw runs to a .png or .svg file; `given` are PlotOptions, refused where a kind has no use for one."""
    if kind not in PLOT_KINDS:
        raise unknown_name("kind of plot", kind, PLOT_KINDS)
    if not results:
        raise SettingsError("no run is named; give one or more run directories")
    options = PlotOptions(**given)
    for option, kinds in OPTION_USES.items():
        if getattr(options, option) and kind not in kinds:
            name = OPTION_NAMES.get(option, option)
            raise SettingsError(f"--{name} has no use for a plot of kind {kind}; leave it out")
    if kind == "tsne":
        if len(results) != 1:
            raise SettingsError(f"a t-SNE map is of one run, and {len(results)} are named; name one")
        return draw_prompt_map(prompt_map(results[0], options.seed), out)
    if kind == "heat":
        return _draw_heatmaps(results, options, out)
    if kind in ("partition", "kite"):
        return draw_partitions([partition_chart(result) for result in results], out, is_kite=kind == "kite")
    return save_figure(figure_of(run_charts(kind, results, options)), out)


def run_charts(kind: str, results: Sequence[Record], options: PlotOptions) -> list[Chart]:
    """Return the charts of a kind of plot."""
    if kind in ("reliability", "decision"):
        return charts.client_charts(results, options, getattr(charts, f"{kind}_chart"))
    if kind == "subgroups":
        names = run_names(identities_of(results))
        tables = [subgroup_tables(result, options.columns) for result in results]
        return subgroup_charts(list(zip(names, tables, strict=True)))
    builders = {"rounds": charts.rounds_charts, "sweep": charts.sweep_charts, "bars": charts.bar_charts}
    return {**builders, "roc": charts.own_ranking_charts}[kind](results, options)


def draw_diagrams(result: Record, out: str | Path, training: str | None = None, seed: int | None = None) -> Path:
    """Draw the reliability diagram, decision curve and rounds of one training."""
    return save_figure(diagram(result, DIAGRAMS, training, seed), out)


def diagram(result: Record, kinds: Sequence[str], training: str | None = None, seed: int | None = None) -> Any:
    """Return some of DIAGRAMS of one training side by side, as a matplotlib figure."""
    for kind in kinds:
        if kind not in DIAGRAMS:
            raise unknown_name("figure", kind, DIAGRAMS)
    figure = figure_of(charts.training_charts(result, kinds, training, seed))
    name = result.manifest["identity"]["method"]["name"]
    unseen = "".join(f", {id} unseen" for id in find_training(result, training, seed)["unseen"][:3])
    figure.suptitle(f"{name} on {result.manifest['data']}{unseen}", fontsize=11, color=TEXT_COLOUR)
    return figure


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of that many inches."""
    module = require("matplotlib.figure", "plots are drawn by matplotlib", "plot")
    return module.Figure(figsize=(width, height), dpi=120, layout="constrained", facecolor="white")


def save_figure(figure: Any, out: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF; the same figure gives the same bytes."""
    path = Path(out)
    form = path.suffix.lstrip(".").lower()
    if form not in ("png", "svg", "pdf"):
        raise SettingsError(f"a plot cannot be drawn to {path}; end it in .png, .svg or .pdf")
    data = BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    figure.savefig(data, format=form, metadata=metadata)
    write_file(path, data.getvalue())
    return path


def figure_of(drawn: Sequence[Chart], width: float = 4.8) -> Any:
    """Draw charts side by side; one legend below if it is the same for all, else one in each."""
    bars = max((len(chart.series) * len(chart.categories) for chart in drawn if chart.kind == "bars"), default=0)
    width = max(width, 0.28 * bars + 1.8)
    figure = new_figure(width * len(drawn), 4.2)
    panels = list(figure.subplots(1, len(drawn), squeeze=False)[0])
    for panel, chart in zip(panels, drawn, strict=True):
        draw_chart(panel, chart)
    names = [tuple(panel.get_legend_handles_labels()[1]) for panel in panels]
    if len(set(names)) == 1 and names[0]:
        fits = max(1, int(figure.get_figwidth() * 13 / (max(map(len, names[0])) + 6)))
        handles = panels[0].get_legend_handles_labels()[0]
        figure.legend(handles, names[0], loc="outside lower center", ncols=fits, fontsize=8, frameon=False)
    else:
        for panel, listed in zip(panels, names, strict=True):
            if listed:
                panel.legend(fontsize=7, frameon=False)
    return figure


def draw_chart(panel: Any, chart: Chart) -> None:
    """Draw one chart into matplotlib axes."""
    scale = 100 if chart.is_percent else 1
    palette = charts.CLIENT_PALETTE if chart.is_of_clients else charts.PALETTE
    wide = 0.8 / max(1, len(chart.series))
    for number, series in enumerate(chart.series):
        colour = palette[series.position % len(palette)]
        style = ("-", "--", ":")[series.position // len(palette) % charts.N_DASHES]
        x, y = [point[0] for point in series.points], [scale * point[1] for point in series.points]
        sides = [[scale * bounds[side] for bounds in series.band] for side in (1, 2)]
        whiskers = [[abs(end - value) for end, value in zip(ends, y, strict=False)] for ends in sides]
        if chart.kind == "bars":
            x = [place + (number - (len(chart.series) - 1) / 2) * wide for place in x]
            panel.bar(x, y, 0.92 * wide, color=colour, label=series.name)
        elif chart.kind == "dots":
            panel.plot(x, y, "o", color=colour, label=series.name)
        else:
            marker = "o" if chart.x_ticks or len(x) == 1 else None
            panel.plot(x, y, style, marker=marker, ms=4, color=colour, label=series.name)
        if series.band and chart.kind == "line":
            low, high = ([scale * edge[i] for edge in series.band] for i in (1, 2))
            panel.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        elif any(map(any, whiskers)):
            panel.errorbar(x, y, whiskers, fmt="none", ecolor=TEXT_COLOUR, elinewidth=1, capsize=2)
        if series.sizes:
            panel.scatter(x, y, [6 + 90 * size for size in series.sizes], color=colour)
    if chart.has_diagonal:
        panel.plot([0, 1], [0, scale], color=MUTED_COLOUR, lw=0.8, zorder=0)
    if chart.has_zero_line:
        panel.axhline(0, color=MUTED_COLOUR, lw=0.8, zorder=0)
    if chart.x_range:
        panel.set_xlim(chart.x_range[0], chart.x_range[1] + 0.01)
    if chart.y_range:
        panel.set_ylim(scale * chart.y_range[0], scale * (chart.y_range[1] + 0.01))
    if chart.categories:
        panel.set_xticks(range(len(chart.categories)), chart.categories)
        panel.set_xlim(-0.5, len(chart.categories) - 0.5) if chart.kind == "dots" else None
    elif chart.x_log:
        panel.set_xscale("log", base=2 if chart.x_ticks else 10)
    if chart.x_ticks:
        panel.set_xticks(list(chart.x_ticks), [f"{at:g}" for at in chart.x_ticks])
    panel.set(xlabel=chart.x_label, ylabel=chart.y_label)
    panel.set_title(chart.title, fontsize=10, color=TEXT_COLOUR)
    panel.tick_params(labelsize=8, colors=TEXT_COLOUR)
    panel.spines[["top", "right"]].set_visible(False)


def draw_partition(
    counts: Ints, clients: Sequence[str], classes: Sequence[str], path: str | Path, title: str = ""
) -> Path:
    """Draw a bubble for each client and class, as large as it has samples."""
    chart = BubbleChart(title or f"{int(counts.sum()):,} samples", counts.tolist(), clients, classes)
    return draw_partitions([chart], path)


def partition_chart(result: Record) -> BubbleChart:
    """Return the training samples of each class at each client of a run."""
    counts = result.manifest.get("counts")
    if not counts:
        raise DataError(f"{result.folder} has no samples per class and client; run it again to have them")
    domains = result.manifest.get("domains", {})
    title = f"{result.manifest['data']}, {result.manifest['identity']['clients']['partition']}"
    groups = [domains.get(id, "") for id in counts]
    return BubbleChart(title, list(counts.values()), list(counts), result.manifest["classes"], groups)


def draw_partitions(drawn: Sequence[BubbleChart], out: str | Path, is_kite: bool = False) -> Path:
    """Draw a panel for each partition: bubbles coloured by domain, or kites as wide as the samples."""
    for chart in drawn:
        if not chart.max_count:
            raise DataError("there is nothing to draw: no client has any training samples")
    cells = [_cell_inches(max(len(chart.clients), len(chart.classes))) for chart in drawn]
    widths = [max(2.6, cell * len(chart.clients) + 1.6) for cell, chart in zip(cells, drawn, strict=True)]
    heights = [cell * len(chart.classes) + 1.8 for cell, chart in zip(cells, drawn, strict=True)]
    figure = new_figure(sum(widths), max(3.0, *heights))
    panels = figure.subplots(1, len(drawn), squeeze=False, width_ratios=widths)[0]
    domains = sorted({group for chart in drawn for group in chart.groups} - {""})
    for panel, chart, cell in zip(panels, drawn, cells, strict=True):
        _draw_counts(panel, chart, domains, cell, is_kite)
        _label_axis(panel.xaxis, chart.clients, "client", cell)
        _label_axis(panel.yaxis, chart.classes, "class", cell)
        panel.set(xlim=(-0.7, len(chart.clients) - 0.3), ylim=(len(chart.classes) - 0.4, -0.6))
        panel.set_title(chart.title, fontsize=10, color=TEXT_COLOUR)
        panel.spines[["top", "right"]].set_visible(False)
    for number, name in enumerate(domains):
        panels[-1].scatter([], [], color=charts.CLIENT_PALETTE[number % 8], label=name)
    if domains:
        figure.legend(loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return save_figure(figure, out)


def _cell_inches(count: int) -> float:
    """Return the side of a cell: room for names on a short axis, 15 inches in all for a long one."""
    return float(np.clip(15 / count, 0.02, 0.45))


def _draw_counts(panel: Any, chart: BubbleChart, domains: Sequence[str], cell: float, is_kite: bool) -> None:
    largest = chart.max_count
    points = (72 * 0.94 * cell) ** 2  # area of the largest bubble, as wide as its cell

    def area(count: Any) -> Any:
        return np.maximum(points * count / largest, 1.0)

    groups = chart.groups or [""] * len(chart.clients)
    for client, (row, group) in enumerate(zip(np.array(chart.counts), groups, strict=True)):
        colour = charts.CLIENT_PALETTE[domains.index(group) % 8] if group else charts.PALETTE[0]
        if is_kite:
            half_width = 0.46 * row / largest
            panel.fill_betweenx(range(len(row)), client - half_width, client + half_width, color=colour, lw=0.6)
        else:
            (class_ids,) = np.nonzero(row)
            panel.scatter([client] * len(class_ids), class_ids, area(row[class_ids]), colour, lw=0)
    if not is_kite:
        sizes = {count: {"lw": 0, "label": f"{count:,}"} for count in charts.size_legend(largest)}
        handles = [panel.scatter([], [], area(count), MUTED_COLOUR, **look) for count, look in sizes.items()]
        legend = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 8, "frameon": False}
        panel.add_artist(panel.legend(handles=handles, title="samples", title_fontsize=8, **legend))
        for handle in handles:
            handle.set_label("_")


def _label_axis(axis: Any, names: Sequence[str], label: str, cell: float) -> None:
    """Write names at their rows and columns, turned where they would touch; numbers where too many."""
    if len(names) > MAX_TICK_LABELS:
        axis.set_label_text(f"{label} (0 to {len(names) - 1})")
        return
    font = min(9.0, 0.8 * 72 * cell)
    is_tight = max(map(len, names), default=0) * 0.62 * font > 72 * cell
    axis.set_ticks(range(len(names)), names, rotation=90 if is_tight and axis.axis_name == "x" else 0, fontsize=font)
    axis.set_tick_params(length=2)
    axis.set_label_text(label)


def draw_explanation(explained: Explanation, out: str | Path) -> Path:
    """Two rows, the global and the local prompt; columns are the image, similarity, each γ."""
    columns = 2 + len(explained.plans)
    figure = new_figure(2.1 * columns + 0.4, 5.2)
    axes = figure.subplots(2, columns, squeeze=False)
    hide_ticks(axes[0, 0]).imshow(explained.image)
    axes[0, 0].set_title("image", fontsize=10, color=TEXT_COLOUR)
    legend(hide_ticks(axes[1, 0]), explained)
    drawn_image: Any = None
    panels: list[tuple[str, Any]] = [("similarity", explained.similarity)]
    for gamma, fractions in explained.plans.items():
        mark = " (trained)" if explained.trained is not None and gamma == explained.trained else ""
        panels.append((f"plan, γ = {gamma:g}{mark}", fractions))
    for column, (title, values) in enumerate(panels, start=1):
        pair = axes[:, column]
        for axis, patch_values in zip(pair, values, strict=True):
            low, high = float(values.min()), float(values.max())
            drawn_image = overlay_patches(hide_ticks(axis), explained.image, patch_values, low, high)
        pair[0].set_title(title, fontsize=10, color=TEXT_COLOUR)
        bar = colorbar_below(figure, drawn_image, list(pair))
        bar.ax.tick_params(labelsize=8, colors=TEXT_COLOUR)
        bar.ax.locator_params(nbins=4)
        label = "cosine" if column == 1 else "fraction of the patch"
        bar.set_label(label, fontsize=8, color=TEXT_COLOUR)
    level = colorbar_below(figure, drawn_image, list(axes[:, 0]))  # an empty one keeps the image beside the rest
    level.ax.set_axis_off()
    level.solids.set_visible(False)
    for axis, word in zip(axes[:, 1], ("global prompt", "local prompt"), strict=True):
        axis.set_ylabel(word, fontsize=10, color=TEXT_COLOUR)
    return save_figure(figure, out)


def colorbar_below(figure: Any, mappable: Any, axes: list[Any]) -> Any:
    return figure.colorbar(mappable, ax=axes, location="bottom", shrink=0.85, pad=0.03)


def overlay_patches(axis: Any, image: Any, values: Any, low: float, high: float) -> Any:
    """Patches coloured over the image in grey, with thin lines between them."""
    height, width = image.shape[:2]
    edges = (-0.5, width - 0.5, height - 0.5, -0.5)
    axis.imshow(image.mean(2), cmap="gray", vmin=0, vmax=255, extent=edges)
    if high - low < 1e-9:  # all the same: one colour, and a bar that does not pretend otherwise
        low, high = low - 0.5e-3, high + 0.5e-3
    heatmap = axis.imshow(values, cmap="viridis", vmin=low, vmax=high, alpha=0.68, extent=edges, zorder=2)
    rows, columns = values.shape
    for k in range(1, rows):
        axis.axhline(k * height / rows - 0.5, color="white", lw=0.4, alpha=0.5, zorder=3)
    for k in range(1, columns):
        axis.axvline(k * width / columns - 0.5, color="white", lw=0.4, alpha=0.5, zorder=3)
    axis.set_xlim(edges[:2])
    axis.set_ylim(edges[2:])
    return heatmap


def legend(axis: Any, explained: Explanation) -> None:
    lines = [("class", explained.name), ("client", explained.client)]
    lines += [("probability", f"{explained.probability:.1%}"), ("answer", explained.likeliest)]
    for place, (word, value) in enumerate(lines):
        y = 0.9 - 0.24 * place
        axis.text(0.02, y, word, fontsize=8, color=MUTED_COLOUR, transform=axis.transAxes, va="center")
        text = value if len(value) <= 22 else value[:21] + "…"
        axis.text(0.02, y - 0.1, text, fontsize=10, color=TEXT_COLOUR, transform=axis.transAxes, va="center")
    for side in axis.spines.values():
        side.set_visible(False)


def draw_prompt_map(drawn: PromptMap, out: str | Path) -> Path:
    """One point for each client, coloured by its domain where clients share one."""
    figure = new_figure(6.2, 5.4)
    axis = hide_ticks(figure.subplots())
    groups = sorted(set(drawn.groups))
    is_ungrouped = len(groups) == len(drawn.clients)
    from matplotlib import colormaps

    colours = colormaps["tab10" if len(groups) <= 10 else "turbo"]
    for number, group in enumerate(groups):
        in_group = np.array([client_group == group for client_group in drawn.groups])
        shade = colours(number if len(groups) <= 10 else number / max(1, len(groups) - 1))
        axis.scatter(*drawn.places[in_group].T, s=46, color=TEXT_COLOUR if is_ungrouped else shade, label=group)
    if len(drawn.clients) <= MAX_LABELLED_CLIENTS:
        middle = float(np.median(drawn.places[:, 0]))
        for id, group, (x, y) in zip(drawn.clients, drawn.groups, drawn.places, strict=True):
            right = x > middle  # names are written inwards, so that none leaves the frame
            axis.annotate(
                id if is_ungrouped else id.removeprefix(f"{group}-"),  # the colour tells the rest
                (x, y),
                xytext=(-5 if right else 5, 5),
                textcoords="offset points",
                ha="right" if right else "left",
                fontsize=8,
                color=TEXT_COLOUR,
            )
    if not is_ungrouped:
        axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=5)
    axis.margins(0.08)
    axis.set_title(f"t-SNE of the {drawn.title}", fontsize=11, color=TEXT_COLOUR)
    return save_figure(figure, out)


def hide_ticks(axis: Any) -> Any:
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_color(MUTED_COLOUR)
    return axis


def _draw_heatmaps(results: Sequence[Record], options: PlotOptions, out: str | Path) -> Path:
    """Draw where the prompts of each run look in an image."""
    if options.image is None:
        raise SettingsError("a heat map is of an image; give --image FILE")
    image, heatmaps, title = prompt_heatmaps(results, options.image, options.class_name, options.client, options.seed)
    figure = new_figure(2.3 * (len(heatmaps) + 1), 3.3)
    panels = figure.subplots(1, len(heatmaps) + 1, squeeze=False)[0]
    hide_ticks(panels[0]).imshow(image)
    panels[0].set_title("image", fontsize=9, color=TEXT_COLOUR)
    for panel, (name, values) in zip(panels[1:], heatmaps.items(), strict=True):
        drawn = overlay_patches(hide_ticks(panel), image, values, float(values.min()), float(values.max()))
        panel.set_title(name, fontsize=9, color=TEXT_COLOUR)
        bar = colorbar_below(figure, drawn, [panel])
        bar.ax.tick_params(labelsize=7, colors=TEXT_COLOUR)
        bar.ax.locator_params(nbins=3)
    figure.suptitle(f"cosine similarity of each patch to {title}", fontsize=10, color=TEXT_COLOUR)
    return save_figure(figure, out)
