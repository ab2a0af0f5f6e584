"""Draw the plots of docs/papers from the tables on their pages and from the benchmarks' figures.

python -m tools.result_plots
"""

import json
import re
from pathlib import Path
from typing import Any

from fedvlm.report.plots import new_figure, save_figure

ROOT = Path(__file__).parents[1]
PAGES, PICTURES = ROOT / "docs" / "papers", ROOT / "docs" / "pictures"
Rows = list[list[str]]


def read_table(page: Path, head: str) -> Rows:
    """Return the cells of the first table of a page whose heading has this column."""
    blocks = re.findall(r"(?m)(?:^\|.*\n)+", page.read_text(encoding="utf-8"))
    cells = [
        [[cell.strip() for cell in line.strip(" |").split("|")] for line in block.splitlines()] for block in blocks
    ]
    return next(rows[:1] + rows[2:] for rows in cells if head in rows[0])


def value(cell: str) -> tuple[float, float]:
    """Return mean and standard deviation of a cell as `58.83 ± 2.77`."""
    mean, _, std = cell.replace("%", "").partition("±")
    return float(mean), float(std or 0)


def draw_bars(panel: Any, names: list[str], bars: dict[str, list[tuple[float, float]]], label: str) -> None:
    """Draw a group of horizontal bars for each name, the first on top."""
    height = 0.8 / len(bars)
    for number, (series, values) in enumerate(bars.items()):
        places = [-(place + number * height) for place in range(len(names))]
        means, stds = [mean for mean, _ in values], [std for _, std in values]
        panel.barh(places, means, height * 0.9, xerr=stds if any(stds) else None, label=series)
    panel.set_yticks([-place - (len(bars) - 1) * height / 2 for place in range(len(names))], names)
    panel.set_xlabel(label)
    if len(bars) > 1:
        panel.legend(fontsize=8)


def draw_methods() -> None:
    figure = new_figure(9.0, 3.4)
    page = PAGES / "which-method.md"
    for number, (column, title) in enumerate((("G", "unseen site"), ("own", "two classes per client"))):
        head, *rows = read_table(page, column)
        panel = figure.add_subplot(1, 2, number + 1)
        at = head.index(column)
        draw_bars(
            panel, [row[0].split(" (")[0] for row in rows], {column: [value(row[at]) for row in rows]}, "accuracy, %"
        )
        panel.set_title(title)
    save_figure(figure, PICTURES / "which-method.svg")


def draw_attacks() -> None:
    head, *rows = read_table(PAGES / "how-robust.md", "attackers named")
    names = [f"{row[0].replace('`', '')}, {row[1]}" for row in rows]
    bars = {name: [value(row[head.index(name)]) for row in rows] for name in ("bound", "trimmed mean")}
    figure = new_figure(7.0, 4.0)
    draw_bars(figure.add_subplot(), names, bars, "accuracy with attack less without, points")
    save_figure(figure, PICTURES / "how-robust.svg")


def draw_speed() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))["peers"]["rows"]
    names = [row["what"].split(" (")[0] for row in rows]
    figure = new_figure(7.0, 2.2)
    draw_bars(
        figure.add_subplot(),
        names,
        {"ms": [(row["figures"]["ms a round"], 0.0) for row in rows]},
        "milliseconds per round",
    )
    save_figure(figure, PICTURES / "how-fast.svg")


if __name__ == "__main__":
    draw_methods()
    draw_attacks()
    draw_speed()
