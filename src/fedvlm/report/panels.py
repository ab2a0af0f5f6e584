"""What pictures of several runs have in common: names, colours, panels, legends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from fedvlm.record import Record
from fedvlm.report.pictures import TEXT_COLOUR, new_figure
from fedvlm.report.units import is_unscaled
from fedvlm.storage.toml import flatten

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
