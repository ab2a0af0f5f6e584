"""Explanations drawn as PNG files by matplotlib, which is asked for only when one is drawn."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvlm.errors import SettingsError
from fedvlm.storage.files import write_file

if TYPE_CHECKING:
    from fedvlm.report.explain import Explanation, PromptMap

TEXT_COLOUR, MUTED_COLOUR = "#222222", "#888888"
MAX_LABELLED_CLIENTS = 40  # clients up to which each point of a map has its name beside it


def draw_explanation(explained: "Explanation", out: str | Path) -> Path:
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
            drawn_image = overlay_patches(
                hide_ticks(axis), explained.image, patch_values, float(values.min()), float(values.max())
            )
        pair[0].set_title(title, fontsize=10, color=TEXT_COLOUR)
        bar = colorbar_below(figure, drawn_image, list(pair))
        bar.ax.tick_params(labelsize=8, colors=TEXT_COLOUR)
        bar.ax.locator_params(nbins=4)
        label = "cosine" if column == 1 else "share of the patch"
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


def legend(axis: Any, explained: "Explanation") -> None:
    lines = [
        ("class", explained.name),
        ("client", explained.client),
        ("chance", f"{explained.probability:.1%}"),
        ("answer", explained.likeliest),
    ]
    for place, (word, value) in enumerate(lines):
        y = 0.9 - 0.24 * place
        axis.text(0.02, y, word, fontsize=8, color=MUTED_COLOUR, transform=axis.transAxes, va="center")
        text = value if len(value) <= 22 else value[:21] + "…"
        axis.text(0.02, y - 0.1, text, fontsize=10, color=TEXT_COLOUR, transform=axis.transAxes, va="center")
    for side in axis.spines.values():
        side.set_visible(False)


def draw_prompt_map(drawn: "PromptMap", out: str | Path) -> Path:
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


def new_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError("pictures are drawn by matplotlib; install fedvlm[plot]") from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained", facecolor="white")


def hide_ticks(axis: Any) -> Any:
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_color(MUTED_COLOUR)
    return axis


def save_figure(figure: Any, out: str | Path) -> Path:
    path = Path(out)
    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "svg"):
        raise SettingsError(f"a picture cannot be drawn to {path}; end it in .png or .svg")
    data = BytesIO()
    figure.savefig(data, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_file(path, data.getvalue())
    return path
