"""Draw charts as inline SVG without a style attribute: colours are classes of the style sheet.

A name of the data only ever gets into a drawing through `escape`.
"""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from typing import Any

from markupsafe import Markup, escape

from fedvlm.report.charts import N_DASHES, PALETTE, BubbleChart, Chart, Point, Series, size_legend

WIDTH, HEIGHT = 560, 340
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 62, 14, 12, 50
MAX_NAME_LENGTH = 22  # letters of a name in a drawing; the whole name is in its title
MAX_NAMED_POINTS = 20  # a scatter chart of more points has no names beside them
MAX_OUTLIER_CLIENTS = 40  # in a drawing; the most frequent outliers come first
CATEGORY_BOTTOM = 90  # room for slanted names of categories


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers from below `low` to above `high`."""
    if high - low < 1e-9 * max(1.0, abs(high)):  # all the same: some room on either side
        low, high = low - 0.05 * max(1.0, abs(low)), high + 0.05 * max(1.0, abs(high))
    span = high - low
    rough = span / count
    size = 10 ** floor(log10(rough))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k >= rough * 0.999)
    ticks = [round(step * floor(low / step + 1e-9), 10)]
    while ticks[-1] < high - 1e-9 * span:
        ticks.append(round(ticks[-1] + step, 10))
    return ticks


def svg_text(
    x: float, y: float, content: str, kind: str = "", rotation: int = 0, max_length: int = MAX_NAME_LENGTH
) -> Markup:
    """Write a text; a long one is cut and has its full form as a tooltip."""
    is_long = len(content) > max_length
    title = Markup("<title>{}</title>").format(content) if is_long else Markup("")
    turned = f' transform="rotate({rotation} {x:.1f} {y:.1f})"' if rotation else ""
    shown = f"{content[: max_length - 1]}…" if is_long else content
    return Markup(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{turned}>') + escape(shown) + title + Markup("</text>")


def line_class(position: int) -> str:
    """Return the classes of a run's colour and line style."""
    return f"c{position % len(PALETTE)} d{position // len(PALETTE) % N_DASHES}"


def client_class(position: int) -> str:
    """Return the class of a client's colour, none of which is a run's."""
    return f"k{position % len(PALETTE)}"


def format_points(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


class Axes:
    """The scales of a chart, and its parts as SVG."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        points = [point for series in chart.series for point in series.points]
        points += [(x, value) for series in chart.series for x, *bounds in series.band for value in bounds]
        xs, ys = [self._scale(x) for x, _ in points], [y for _, y in points]
        x_low, x_high = chart.x_range or (min(xs, default=0), max(xs, default=1))
        y_low, y_high = chart.y_range or (min(ys, default=0), max(ys, default=1))
        if chart.categories:
            self.x_ticks = [-0.5, len(chart.categories) - 0.5]
        elif chart.x_log:
            low = floor(x_low)
            self.x_ticks = [float(power) for power in range(low, max(ceil(x_high), low + 1) + 1)]
        else:
            self.x_ticks = nice_ticks(x_low, x_high)
        self.y_ticks = nice_ticks(y_low, y_high)
        self.height = HEIGHT + (CATEGORY_BOTTOM - MARGIN_BOTTOM if chart.categories else 0)
        self.base = HEIGHT - MARGIN_BOTTOM

    def _scale(self, x: float) -> float:
        return log10(x) if self.chart.x_log else x

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point stands in the drawing."""
        x0, x1, y0, y1 = self.x_ticks[0], self.x_ticks[-1], self.y_ticks[0], self.y_ticks[-1]
        right = MARGIN_LEFT + (self._scale(x) - x0) / (x1 - x0) * (WIDTH - MARGIN_LEFT - MARGIN_RIGHT)
        return right, self.base - (y - y0) / (y1 - y0) * (self.base - MARGIN_TOP)

    def frame(self) -> Markup:
        """Draw the grid, the ticks and the labels of both axes."""
        out = Markup("")
        right, middle = WIDTH - MARGIN_RIGHT, (MARGIN_LEFT + WIDTH - MARGIN_RIGHT) / 2
        for value in self.y_ticks:
            _, y = self.place(1, value)
            shown = f"{100 * value:g}" if self.chart.is_percent else f"{value:g}"
            out += Markup(f'<line class="grid" x1="{MARGIN_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            out += svg_text(MARGIN_LEFT - 8, y + 4.5, shown, "tick end")
        for number, name in enumerate(self.chart.categories):
            out += svg_text(self.place(number, 0)[0] + 4, self.base + 18, name, "tick end", -30)
        for value in () if self.chart.categories else self.x_ticks:
            x, _ = self.place(10**value if self.chart.x_log else value, self.y_ticks[0])
            shown = f"{10**value:,g}" if self.chart.x_log else f"{value:g}"
            kind = "end" if value == self.x_ticks[-1] and len(shown) > 3 else "mid"  # not over the edge
            out += svg_text(x, self.base + 20, shown, f"tick {kind}")
        out += Markup(f'<line class="axis" x1="{MARGIN_LEFT}" x2="{right}" y1="{self.base}" y2="{self.base}"/>')
        if self.chart.x_label:
            out += svg_text(middle, self.height - 8, self.chart.x_label, "label mid", max_length=60)
        return out + svg_text(15, (MARGIN_TOP + self.base) / 2, self.chart.y_label, "label mid", -90, 60)

    def draw_series(self, series: Series, colour: str) -> Markup:
        """Draw a band, a line or dots."""
        run = f'data-run="{series.position}"'
        points = [self.place(*point) for point in series.points]
        sizes = series.sizes or ((0.3,) * len(points) if self.chart.kind == "dots" or len(points) == 1 else ())
        out = Markup("")
        if series.band and self.chart.kind == "dots":
            for x, low, high in series.band:
                ends = format_points([self.place(x, low), self.place(x, high)])
                out += Markup(f'<polyline class="line {colour}" {run} points="{ends}"/>')
        elif series.band:
            edge = [self.place(x, high) for x, _, high in series.band]
            edge += [self.place(x, low) for x, low, _ in reversed(series.band)]
            out += Markup(f'<polygon class="band {colour}" {run} points="{format_points(edge)}"/>')
        if self.chart.kind == "line":
            out += Markup(f'<polyline class="line {colour}" {run} points="{format_points(points)}"/>')
        for (x, y), area, (_, value) in zip(points, sizes, series.points, strict=False):
            radius = max(2.0, 8 * area**0.5)
            number = f"{100 * value:.1f} %" if self.chart.is_percent else f"{value:.4g}"
            out += Markup(f'<circle class="dot {colour}" {run} cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>')
            out += escape(f"{series.name}: {number}") + Markup("</title></circle>")
        return out


def draw_chart(chart: Chart) -> Markup:
    """Draw a chart with its caption; `title` is also what a screen reader reads."""
    axes = Axes(chart)
    about = f'data-x="{axes.x_ticks[0]} {axes.x_ticks[-1]}" data-y="{axes.y_ticks[0]} {axes.y_ticks[-1]}" '
    about += f'data-log="{int(chart.x_log)}" data-percent="{int(chart.is_percent)}" '
    about += f'data-box="{MARGIN_LEFT} {MARGIN_TOP} {WIDTH - MARGIN_RIGHT} {axes.base}"'
    if chart.key:
        about += f' data-key="{chart.key}" data-across="{chart.across}"'
    kind = "plane" if chart.kind == "dots" else "panel"
    focus = ' tabindex="0"' if kind == "panel" else ""
    out = Markup(f'<svg class="{kind}" viewBox="0 0 {WIDTH} {axes.height}" role="img"{focus} {about} aria-label="')
    out += escape(chart.title) + Markup('">') + axes.frame()
    if chart.has_diagonal:
        ends = [axes.place(axes.x_ticks[0], axes.y_ticks[0]), axes.place(axes.x_ticks[-1], axes.y_ticks[-1])]
        out += Markup(f'<polyline class="diagonal" points="{format_points(ends)}"/>')
    for series in chart.series:
        colour = client_class(series.position) if chart.is_of_clients else line_class(series.position)
        out += axes.draw_series(series, colour)
    out += Markup(f'<line class="rule" hidden="hidden" y1="{MARGIN_TOP}" y2="{axes.base}"/></svg>')
    return frame_figure(chart.title, out, chart.size_note)


def frame_figure(title: str, drawing: Markup, note: str = "") -> Markup:
    """Put a caption above a drawing."""
    small = Markup(" <small>({})</small>").format(note) if note else Markup("")
    return Markup("<figure><figcaption>{}{}</figcaption>{}</figure>").format(title, small, drawing)


def draw_bubbles(chart: BubbleChart) -> Markup:
    """Draw a bubble per client (down) and class (across), with a legend of sizes."""
    cell = min(34.0, max(10.0, 900 / max(1, len(chart.classes))))
    left, top = 170, 130
    width, base = left + cell * len(chart.classes) + 60, top + cell * len(chart.clients) + 8
    largest = chart.max_count or 1

    def circle(x: float, y: float, count: int, tooltip: str) -> Markup:
        radius = max(1.4, 0.47 * cell * (count / largest) ** 0.5)
        head = Markup(f'<circle class="bubble" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>')
        return head + escape(tooltip) + Markup("</title></circle>")

    size = f'viewBox="0 0 {width:.0f} {base + cell + 18:.0f}" width="{width:.0f}"'
    out = Markup(f'<svg class="wide" {size} role="img" aria-label="training samples per client and class">')
    for place, name in enumerate(chart.classes):
        out += svg_text(left + cell * (place + 0.6), top - 8, name, "tick", -55)
    for number, (client, row) in enumerate(zip(chart.clients, chart.counts, strict=True)):
        y = top + cell * (number + 0.5)
        out += svg_text(left - 8, y + 4, client, "tick end")
        for place, count in enumerate(row):
            if count:
                tooltip = f"{client}, {chart.classes[place]}: {count} samples"
                out += circle(left + cell * (place + 0.5), y, count, tooltip)
    x = float(left)
    out += svg_text(left - 8, base + cell / 2 + 8, "samples", "tick end")
    for count in size_legend(largest):
        out += circle(x + cell / 2, base + cell / 2 + 4, count, f"{count} samples")
        out += svg_text(x + cell + 4, base + cell / 2 + 8, f"{count:,}", "tick")
        x += cell + 24 + 8 * len(f"{count:,}")
    return out + Markup("</svg>")


def draw_positions(title: str, places: Sequence[Point], names: Sequence[str]) -> Markup:
    """Draw named points on a plane whose axes mean nothing, at the same scale both ways."""
    xs, ys = zip(*places, strict=True)
    room = min(WIDTH - 150, HEIGHT - 60)
    span = max(max(xs) - min(xs), max(ys) - min(ys)) or 1.0
    out = Markup(f'<svg class="plane" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="')
    out += escape(title) + Markup('">')
    for number, ((px, py), name) in enumerate(zip(places, names, strict=True)):
        x = WIDTH / 2 + (px - (max(xs) + min(xs)) / 2) / span * room
        y = HEIGHT / 2 - (py - (max(ys) + min(ys)) / 2) / span * room
        head = f'<circle class="dot {client_class(number)}" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>'
        out += Markup(head) + escape(name) + Markup("</title></circle>")
        if len(names) <= MAX_NAMED_POINTS:
            out += svg_text(x + 9, y + 4, name, "tick", max_length=14)
    return frame_figure(title, out + Markup("</svg>"))


def draw_outliers(history: Mapping[str, Any]) -> Markup:
    """Draw a square per client (down) and round (across), filled where the client was an outlier."""
    rounds = history["rounds"]
    often = {id: sum(numbers[0] for numbers in by_round.values()) for id, by_round in history["clients"].items()}
    ids = sorted(often, key=lambda id: (-often[id], id))[:MAX_OUTLIER_CLIENTS]
    cell, left, top = min(16.0, max(3.0, 640 / len(rounds))), 170, 20
    width, height = left + cell * len(rounds) + 90, top + 18 * len(ids) + 8
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
    out = Markup(f'<svg class="wide" {size} role="img" aria-label="rounds in which a client was an outlier">')
    out += svg_text(left, top - 6, f"round {rounds[0]} to {rounds[-1]}", "tick")
    for row, id in enumerate(ids):
        y = top + 18 * row
        out += svg_text(left - 8, y + 12, id, "tick end")
        for place, number in enumerate(rounds):
            if (numbers := history["clients"][id].get(str(number))) is not None:
                kind = "bubble" if numbers[0] else "band c7"
                out += Markup(f'<rect class="{kind}" x="{left + cell * place:.1f}" y="{y}" ')
                out += Markup(f'width="{cell - 1:.1f}" height="15"><title>')
                out += escape(_outlier_tooltip(id, number, numbers)) + Markup("</title></rect>")
        out += svg_text(left + cell * len(rounds) + 6, y + 12, f"{often[id]} rounds", "tick")
    return out + Markup("</svg>")


def _outlier_tooltip(id: str, number: int, numbers: Sequence[float | None]) -> str:
    units = ("times the median norm", "times the norm of similar updates", "cosine to the others")
    parts = [f"{value:g} {unit}" for value, unit in zip(numbers[1:], units, strict=True) if value is not None]
    return f"{id}, round {number}{': outlier' if numbers[0] else ''}; {', '.join(parts)}"
