"""Drawings as inline SVG, without a style attribute: colours are classes of the style sheet.

A name of the data only ever gets into a drawing through `escape`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10

from markupsafe import Markup, escape

WIDTH, HEIGHT = 380, 250
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 46, 10, 10, 38
N_COLOURS, N_DASHES = 8, 3  # of the style sheet
MAX_NAME_LENGTH = 22  # letters of a name in a drawing; the whole name is in its title
MAX_NAMED_POINTS = 20  # points of a scatter, if there are no more, have their names beside them

Point = Sequence[float]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from below `low` to above `high`."""
    if high - low < 1e-9 * max(1.0, abs(high)):  # all the same: some room on either side
        low, high = low - 0.05 * max(1.0, abs(low)), high + 0.05 * max(1.0, abs(high))
    span = high - low
    rough = span / count
    size = 10 ** floor(log10(rough))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k >= rough * 0.999)
    first = floor(low / step + 1e-9)
    out = [round(step * first, 10)]
    while out[-1] < high - 1e-9 * span:
        out.append(round(out[-1] + step, 10))
    return out


def shorten(name: str, max_length: int = MAX_NAME_LENGTH) -> str:
    return name if len(name) <= max_length else f"{name[: max_length - 1]}…"


def svg_text(
    x: float, y: float, content: str, kind: str = "", rotation: int = 0, max_length: int = MAX_NAME_LENGTH
) -> Markup:
    about = Markup("<title>{}</title>").format(content) if len(content) > max_length else Markup("")
    turned = f' transform="rotate({rotation} {x:.1f} {y:.1f})"' if rotation else ""
    head = Markup(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{turned}>')
    return head + escape(shorten(content, max_length)) + about + Markup("</text>")


@dataclass
class Line:
    """One run's line in a panel, with a band around it if it has one."""

    run: int
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()  # x, low, high
    dots: Sequence[float] = ()  # areas of dots at the points, of which the largest is 1


@dataclass
class Panel:
    """A diagram with axes; `name` says what it shows, and is what a screen reader reads."""

    name: str
    x: str
    y: str
    lines: Sequence[Line]
    x_log: bool = False
    percent: bool = True  # of y
    diagonal: bool = False
    key: str = ""  # what the script redraws it from
    across: str = "round"  # the same in key's x
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    ticks: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def __post_init__(self) -> None:
        all_points = [point for line in self.lines for point in line.points]
        all_points += [(x, value) for line in self.lines for x, *bounds in line.band for value in bounds]
        xs, ys = [self._across(x) for x, _ in all_points], [y for _, y in all_points]
        x_range = self.x_range or (min(xs, default=0), max(xs, default=1))
        y_range = self.y_range or (min(ys, default=0), max(ys, default=1))
        low, high = floor(x_range[0]), ceil(x_range[1])
        powers = [float(power) for power in range(low, max(high, low + 1) + 1)]
        self.ticks = (powers if self.x_log else nice_ticks(*x_range), nice_ticks(*y_range))

    def _across(self, x: float) -> float:
        return log10(x) if self.x_log else x

    def place(self, x: float, y: float) -> tuple[float, float]:
        (x0, *_, x1), (y0, *_, y1) = self.ticks
        right = MARGIN_LEFT + (self._across(x) - x0) / (x1 - x0) * (WIDTH - MARGIN_LEFT - MARGIN_RIGHT)
        down = HEIGHT - MARGIN_BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - MARGIN_TOP - MARGIN_BOTTOM)
        return right, down

    def _axes(self) -> Markup:
        xs, ys = self.ticks
        out = []
        for value in ys:
            _, y = self.place(1, value)
            tick_label = f"{100 * value:g}" if self.percent else f"{value:g}"
            out.append(f'<line class="grid" x1="{MARGIN_LEFT}" x2="{WIDTH - MARGIN_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            out.append(f'<text class="tick end" x="{MARGIN_LEFT - 6}" y="{y + 3.5:.1f}">{tick_label}</text>')
        for value in xs:
            x, _ = self.place(10**value if self.x_log else value, ys[0])
            tick_label = f"{10**value:,g}" if self.x_log else f"{value:g}"
            kind = "end" if value == xs[-1] and len(tick_label) > 3 else "mid"  # not over the edge
            out.append(f'<text class="tick {kind}" x="{x:.1f}" y="{HEIGHT - MARGIN_BOTTOM + 15}">{tick_label}</text>')
        base = HEIGHT - MARGIN_BOTTOM
        out.append(f'<line class="axis" x1="{MARGIN_LEFT}" x2="{WIDTH - MARGIN_RIGHT}" y1="{base}" y2="{base}"/>')
        return (
            Markup("".join(out))
            + svg_text((MARGIN_LEFT + WIDTH - MARGIN_RIGHT) / 2, HEIGHT - 5, self.x, "label mid", max_length=60)
            + svg_text(11, (MARGIN_TOP + base) / 2, self.y, "label mid", -90, max_length=60)
        )

    def _line(self, line: Line) -> str:
        marks = line_class(line.run)
        run = f'data-run="{line.run}"'
        band = [self.place(x, high) for x, _, high in line.band]
        band += [self.place(x, low) for x, low, _ in reversed(line.band)]
        out = f'<polygon class="band {marks}" {run} points="{format_points(band)}"/>' if band else ""
        points = [self.place(*point) for point in line.points]
        out += f'<polyline class="line {marks}" {run} points="{format_points(points)}"/>'
        if len(points) == 1:
            line.dots = (0.3,)
        for (x, y), area in zip(points, line.dots, strict=False):
            size = max(1.5, 6 * area**0.5)
            out += f'<circle class="dot {marks}" {run} cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
        return out

    def draw(self) -> Markup:
        (x0, *_, x1), (y0, *_, y1) = self.ticks
        about = f'data-x="{x0} {x1}" data-y="{y0} {y1}" data-log="{int(self.x_log)}"'
        about += f' data-percent="{int(self.percent)}"'
        if self.key:
            about += f' data-key="{self.key}" data-across="{self.across}"'
        head = Markup(
            f'<svg class="panel" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" {about} '
            f'data-box="{MARGIN_LEFT} {MARGIN_TOP} {WIDTH - MARGIN_RIGHT} {HEIGHT - MARGIN_BOTTOM}" aria-label="'
        )
        body = "".join(map(self._line, self.lines))
        if self.diagonal:
            ends = format_points([self.place(x0, y0), self.place(x1, y1)])
            body = f'<polyline class="diagonal" points="{ends}"/>' + body
        rule = f'<line class="rule" hidden="hidden" y1="{MARGIN_TOP}" y2="{HEIGHT - MARGIN_BOTTOM}"/>'
        return head + escape(self.name) + Markup('">') + self._axes() + Markup(f"{body}{rule}</svg>")


def line_class(run: int) -> str:
    return f"c{run % N_COLOURS} d{run // N_COLOURS % N_DASHES}"


def format_points(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def bubble_chart(counts: Sequence[Sequence[int]], rows: Sequence[str], columns: Sequence[str]) -> Markup:
    """A bubble per row (client) and column (class), its area as large as its count."""
    cell = min(30.0, max(8.0, 760 / max(1, len(columns))))
    left_margin, top = 150, 120
    width, height = left_margin + cell * len(columns) + 40, top + cell * len(rows) + 8
    max_count = max((n for row in counts for n in row), default=0) or 1
    out = Markup(
        f'<svg class="wide" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        'aria-label="training rows per client and class">'
    )
    for place, name in enumerate(columns):
        out += svg_text(left_margin + cell * (place + 0.6), top - 8, name, "tick", -55)
    for number, (name, row) in enumerate(zip(rows, counts, strict=True)):
        y = top + cell * (number + 0.5)
        out += svg_text(left_margin - 8, y + 4, name, "tick end")
        for place, n in enumerate(row):
            if n:
                size = max(1.2, 0.47 * cell * (n / max_count) ** 0.5)
                x = left_margin + cell * (place + 0.5)
                tooltip = escape(f"{name}, {columns[place]}: {n} rows")
                out += Markup(f'<circle class="bubble" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}">')
                out += Markup("<title>") + tooltip + Markup("</title></circle>")
    return out + Markup("</svg>")


def scatter_chart(name: str, places: Sequence[Point], names: Sequence[str]) -> Markup:
    """Named points on a plane whose axes mean nothing, at the same scale both ways."""
    xs, ys = zip(*places, strict=True)
    room = min(WIDTH - 90, HEIGHT - 40)
    span = max(max(xs) - min(xs), max(ys) - min(ys)) or 1.0
    out = Markup(f'<svg class="plane" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="')
    out += escape(name) + Markup('">')
    for number, ((px, py), label) in enumerate(zip(places, names, strict=True)):
        x = WIDTH / 2 + (px - (max(xs) + min(xs)) / 2) / span * room
        y = HEIGHT / 2 - (py - (max(ys) + min(ys)) / 2) / span * room
        head = f'<circle class="dot {line_class(number)}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>'
        out += Markup(head) + escape(label) + Markup("</title></circle>")
        if len(names) <= MAX_NAMED_POINTS:
            out += svg_text(x + 8, y + 4, label, "tick", max_length=14)
    return out + Markup("</svg>")


def slopegraph(columns: Sequence[str], lines: Sequence[tuple[str, Sequence[float | None]]]) -> Markup:
    """One line per client over the runs: its share of hits with each."""
    step, top, base, left_margin = 96, 16, 240, 46
    width = left_margin + step * (len(columns) - 1) + 190
    values = [value for _, series in lines for value in series if value is not None]
    ticks = nice_ticks(min(values, default=0), max(values, default=1))

    def down(value: float) -> float:
        return base - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (base - top)

    out = Markup(
        f'<svg class="wide" viewBox="0 0 {width} {base + 88}" width="{width}" role="img" '
        'aria-label="share of hits of each client with each run">'
    )
    for value in ticks:
        y = down(value)
        right = left_margin + step * (len(columns) - 1)
        out += Markup(f'<line class="grid" x1="{left_margin}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out += svg_text(left_margin - 6, y + 3.5, f"{100 * value:g}", "tick end")
    for place, name in enumerate(columns):
        out += svg_text(left_margin + step * place, base + 14, name, "tick end", -35)
    lowest = 0.0
    ends = sorted(lines, key=lambda line: -(line[1][-1] or 0))
    for number, (name, series) in enumerate(ends):
        points = [(left_margin + step * i, down(v)) for i, v in enumerate(series) if v is not None]
        if not points:
            continue
        out += Markup(f'<polyline class="line {line_class(number)}" points="{format_points(points)}"/>')
        lowest = max(points[-1][1] + 4, lowest + 13)
        out += svg_text(points[-1][0] + 8, lowest, name, f"tick ink {line_class(number)}")
    return out + Markup("</svg>")
