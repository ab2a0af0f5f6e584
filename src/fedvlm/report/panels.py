"""What pictures of several runs have in common: names, colours, panels, legends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from fedvlm.record import Record
from fedvlm.report.pictures import INK, canvas
from fedvlm.report.units import plain
from fedvlm.storage.toml import flat

COLOURS = ("#1f6fb4", "#c2571a", "#2a8f6a", "#9a4ea3", "#b8860b", "#4d4d4d", "#d1467a", "#5aa9e6")


@dataclass(frozen=True)
class Asked:
    """What a picture is of, where there is a choice."""

    columns: tuple[str, ...] = ()  # a panel each; the first of the table if left out
    over: str = ""  # the setting along the axis; the one in which runs differ
    training: str | None = None  # the first
    seed: int | None = None  # the first


def titles(results: Sequence[Record], besides: Sequence[str] = ()) -> list[str]:
    """Methods, with the settings in which runs of the same one differ."""
    every = [flat(one.manifest["identity"]) for one in results]
    out = []
    for one in every:
        same = [other for other in every if other["method.name"] == one["method.name"]]
        keys = [key for key in differing(same) if key not in besides and key in one]
        words = [f"{key.removeprefix('method.')}={one[key]}" for key in keys]
        out.append(", ".join([one["method.name"], *words]))
    return out


def differing(identities: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings in which they differ; where data lie does not matter."""
    keys = dict.fromkeys(key for one in identities for key in one)
    return [
        key
        for key in keys
        if not key.startswith("source.") and len({repr(one.get(key)) for one in identities}) > 1
    ]


def panels_of(columns: Sequence[str], width: float = 4.8) -> tuple[Any, list[Any]]:
    figure = canvas(width * len(columns), 4.0)
    return figure, list(figure.subplots(1, len(columns), squeeze=False)[0])


def middle_of(many: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [fmean(one) for one in many], [stdev(one) if len(one) > 1 else 0.0 for one in many]


def band(
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


def unit(column: str) -> str:
    return column if plain(column) else "per cent"


def finish(figure: Any, panels: Sequence[Any]) -> Any:
    """One legend below for all panels if it is the same in each, else one in each."""
    names = [tuple(panel.get_legend_handles_labels()[1]) for panel in panels]
    for panel in panels:
        panel.tick_params(labelsize=8, colors=INK)
        panel.spines[["top", "right"]].set_visible(False)
        panel.title.set_fontsize(10)
        if len(set(names)) > 1:
            panel.legend(fontsize=7, frameon=False)
    if len(set(names)) == 1 and names[0]:
        longest = max(map(len, names[0]))
        fits = max(1, int(figure.get_figwidth() * 13 / (longest + 6)))
        handles = panels[0].get_legend_handles_labels()[0]
        figure.legend(
            handles, names[0], loc="outside lower center", ncols=fits, fontsize=8, frameon=False
        )
    return figure
