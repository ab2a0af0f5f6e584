"""Who has how many rows of which class, as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.data.splits import Ints
from fedvlm.errors import DataError, SettingsError
from fedvlm.storage.files import atomic_write

MAX_DIAMETER, MIN_DIAMETER = 0.94, 0.3  # diameters of bubbles, in cells
MAX_TICK_LABELS = 100  # more clients or classes than this are numbered on the axis, not named


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
    if len(names) > MAX_TICK_LABELS:
        axis.set_label_text(f"{label} (0 to {len(names) - 1})")
        return
    font = min(9.0, 0.8 * 72 * cell)
    touch = max(map(len, names), default=0) * 0.62 * font > 72 * cell
    turn = 90 if touch and axis.axis_name == "x" else 0
    axis.set_ticks(range(len(names)), names, rotation=turn, fontsize=font)
    axis.set_tick_params(length=2)
    axis.set_label_text(label)
