"""Drawings as inline SVG, without a style attribute: colours are classes of the style sheet.

A name of the data only ever gets into a drawing through `escape`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10

from markupsafe import Markup, escape

WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 38
COLOURS, DASHES = 8, 3  # of the style sheet
LONGEST = 22  # letters of a name in a drawing; the whole name is in its title
NAMED = 20  # points of a scatter, if there are no more, have their names beside them

Point = Sequence[float]


def nice(low: float, high: float, count: int = 5) -> list[float]:
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


def short(name: str, most: int = LONGEST) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def text(
    x: float, y: float, said: str, kind: str = "", turn: int = 0, most: int = LONGEST
) -> Markup:
    about = Markup("<title>{}</title>").format(said) if len(said) > most else Markup("")
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    head = Markup(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{turned}>')
    return head + escape(short(said, most)) + about + Markup("</text>")


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
        every = [point for line in self.lines for point in line.points]
        every += [(x, value) for line in self.lines for x, *both in line.band for value in both]
        xs, ys = [self._across(x) for x, _ in every], [y for _, y in every]
        x_range = self.x_range or (min(xs, default=0), max(xs, default=1))
        y_range = self.y_range or (min(ys, default=0), max(ys, default=1))
        low, high = floor(x_range[0]), ceil(x_range[1])
        powers = [float(one) for one in range(low, max(high, low + 1) + 1)]
        self.ticks = (powers if self.x_log else nice(*x_range), nice(*y_range))

    def _across(self, x: float) -> float:
        return log10(x) if self.x_log else x

    def place(self, x: float, y: float) -> tuple[float, float]:
        (x0, *_, x1), (y0, *_, y1) = self.ticks
        right = LEFT + (self._across(x) - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)
        return right, down

    def _axes(self) -> Markup:
        xs, ys = self.ticks
        out = []
        for value in ys:
            _, y = self.place(1, value)
            said = f"{100 * value:g}" if self.percent else f"{value:g}"
            out.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            out.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 3.5:.1f}">{said}</text>')
        for value in xs:
            x, _ = self.place(10**value if self.x_log else value, ys[0])
            said = f"{10**value:,g}" if self.x_log else f"{value:g}"
            kind = "end" if value == xs[-1] and len(said) > 3 else "mid"  # not over the edge
            out.append(
                f'<text class="tick {kind}" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}">{said}</text>'
            )
        base = HEIGHT - BOTTOM
        out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
        return (
            Markup("".join(out))
            + text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, self.x, "label mid", most=60)
            + text(11, (TOP + base) / 2, self.y, "label mid", -90, most=60)
        )

    def _line(self, line: Line) -> str:
        marks = colour(line.run)
        run = f'data-run="{line.run}"'
        band = [self.place(x, high) for x, _, high in line.band]
        band += [self.place(x, low) for x, low, _ in reversed(line.band)]
        out = f'<polygon class="band {marks}" {run} points="{joined(band)}"/>' if band else ""
        points = [self.place(*point) for point in line.points]
        out += f'<polyline class="line {marks}" {run} points="{joined(points)}"/>'
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
            f'data-box="{LEFT} {TOP} {WIDTH - RIGHT} {HEIGHT - BOTTOM}" aria-label="'
        )
        body = "".join(map(self._line, self.lines))
        if self.diagonal:
            ends = joined([self.place(x0, y0), self.place(x1, y1)])
            body = f'<polyline class="diagonal" points="{ends}"/>' + body
        rule = f'<line class="rule" hidden="hidden" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        return (
            head + escape(self.name) + Markup('">') + self._axes() + Markup(f"{body}{rule}</svg>")
        )


def colour(run: int) -> str:
    return f"c{run % COLOURS} d{run // COLOURS % DASHES}"


def joined(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def bubbles(counts: Sequence[Sequence[int]], rows: Sequence[str], columns: Sequence[str]) -> Markup:
    """A bubble per row (client) and column (class), its area as large as its count."""
    cell = min(30.0, max(8.0, 760 / max(1, len(columns))))
    left, top = 150, 120
    width, height = left + cell * len(columns) + 40, top + cell * len(rows) + 8
    most = max((n for row in counts for n in row), default=0) or 1
    out = Markup(
        f'<svg class="wide" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        'aria-label="training rows per client and class">'
    )
    for place, name in enumerate(columns):
        out += text(left + cell * (place + 0.6), top - 8, name, "tick", -55)
    for number, (name, row) in enumerate(zip(rows, counts, strict=True)):
        y = top + cell * (number + 0.5)
        out += text(left - 8, y + 4, name, "tick end")
        for place, n in enumerate(row):
            if n:
                size = max(1.2, 0.47 * cell * (n / most) ** 0.5)
                x = left + cell * (place + 0.5)
                said = escape(f"{name}, {columns[place]}: {n} rows")
                out += Markup(f'<circle class="bubble" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}">')
                out += Markup("<title>") + said + Markup("</title></circle>")
    return out + Markup("</svg>")


def scatter(name: str, places: Sequence[Point], names: Sequence[str]) -> Markup:
    """Named points on a plane whose axes mean nothing, at the same scale both ways."""
    xs, ys = zip(*places, strict=True)
    room = min(WIDTH - 90, HEIGHT - 40)
    span = max(max(xs) - min(xs), max(ys) - min(ys)) or 1.0
    out = Markup(f'<svg class="plane" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="')
    out += escape(name) + Markup('">')
    for number, ((px, py), said) in enumerate(zip(places, names, strict=True)):
        x = WIDTH / 2 + (px - (max(xs) + min(xs)) / 2) / span * room
        y = HEIGHT / 2 - (py - (max(ys) + min(ys)) / 2) / span * room
        head = f'<circle class="dot {colour(number)}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>'
        out += Markup(head) + escape(said) + Markup("</title></circle>")
        if len(names) <= NAMED:
            out += text(x + 8, y + 4, said, "tick", most=14)
    return out + Markup("</svg>")


def slopes(columns: Sequence[str], lines: Sequence[tuple[str, Sequence[float | None]]]) -> Markup:
    """One line per client over the runs: its share of hits with each."""
    step, top, base, left = 96, 16, 240, 46
    width = left + step * (len(columns) - 1) + 190
    values = [value for _, each in lines for value in each if value is not None]
    ticks = nice(min(values, default=0), max(values, default=1))

    def down(value: float) -> float:
        return base - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (base - top)

    out = Markup(
        f'<svg class="wide" viewBox="0 0 {width} {base + 88}" width="{width}" role="img" '
        'aria-label="share of hits of each client with each run">'
    )
    for value in ticks:
        y = down(value)
        right = left + step * (len(columns) - 1)
        out += Markup(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out += text(left - 6, y + 3.5, f"{100 * value:g}", "tick end")
    for place, name in enumerate(columns):
        out += text(left + step * place, base + 14, name, "tick end", -35)
    lowest = 0.0
    ends = sorted(lines, key=lambda line: -(line[1][-1] or 0))
    for number, (name, each) in enumerate(ends):
        points = [(left + step * i, down(v)) for i, v in enumerate(each) if v is not None]
        if not points:
            continue
        out += Markup(f'<polyline class="line {colour(number)}" points="{joined(points)}"/>')
        lowest = max(points[-1][1] + 4, lowest + 13)
        out += text(points[-1][0] + 8, lowest, name, f"tick ink {colour(number)}")
    return out + Markup("</svg>")
