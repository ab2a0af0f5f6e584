"""How sure, how useful and how soon: a run's reliability, decision curve and rounds as one picture.

Clients' own test rows are taken together, and so are those of unseen clients.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.errors import DataError, unknown_name
from fedvlm.record import Record
from fedvlm.report.pictures import MUTED_COLOUR, TEXT_COLOUR, new_figure, save_figure
from fedvlm.storage.files import slug

Floats = NDArray[np.float64]
CLIENT_GROUPS = (("clients", "train", "#1f6fb4"), ("unseen", "unseen", "#c2571a"))
ROUND_CURVES = (("accuracy", "unseen", "accuracy", "-"), ("clients F1", "target F1", "macro-F1", ":"))


DIAGRAM_PANELS = ("reliability", "decision", "rounds")


def draw_diagrams(result: Record, out: str | Path, training: str | None = None, seed: int | None = None) -> Path:
    """One training's three diagrams to a PNG file; the first training and seed if none is named."""
    return save_figure(diagram(result, DIAGRAM_PANELS, training, seed), out)


def diagram(result: Record, kinds: Sequence[str], training: str | None = None, seed: int | None = None) -> Any:
    """Some of PANELS side by side, as a matplotlib figure."""
    for kind in kinds:
        if kind not in DIAGRAM_PANELS:
            raise unknown_name("figure", kind, DIAGRAM_PANELS)
    trainings = result.trainings(seed)
    name = training or result.manifest["trainings"][0]
    if name not in trainings:
        raise unknown_name("training of this run", name, trainings)
    about = trainings[name]
    figure = new_figure(4.4 * len(kinds), 4.3)
    panels = dict(zip(kinds, figure.subplots(1, len(kinds), squeeze=False)[0], strict=True))
    measured = False
    for label, key, colour in CLIENT_GROUPS:
        client_scores = [about["scores"].get(id, {}) for id in about[key]]
        scores = [client_score for client_score in client_scores if "decision" in client_score]
        measured |= bool(scores)
        if scores and "reliability" in panels:
            reliability_panel(panels["reliability"], scores, label, colour)
        if scores and "decision" in panels:
            decision_panel(panels["decision"], scores, label, colour)
    if not measured and set(kinds) != {"rounds"}:
        raise DataError(f"{result.folder} has no metrics of test rows; run it again to have them")
    seed = result.manifest["identity"]["seeds"][0] if seed is None else seed
    if "rounds" in panels:
        training_lines = [line for line in result.lines() if line["training"] == f"{seed}-{slug(name)}"]
        _rounds(panels["rounds"], training_lines)
    unseen = "".join(f", {id} unseen" for id in about["unseen"][:3])
    figure.suptitle(
        f"{result.manifest['identity']['method']['name']} on {result.manifest['data']}{unseen}",
        fontsize=11,
        color=TEXT_COLOUR,
    )
    for panel in panels.values():
        panel.tick_params(labelsize=8, colors=TEXT_COLOUR)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8, frameon=False)
    return figure


def reliability_panel(panel: Any, scores: Sequence[Any], label: str, colour: str) -> None:
    bins: Floats = np.array([client_score["reliability"] for client_score in scores])  # (clients, bins, 3)
    rows = bins[:, :, 0].sum(0)
    confidence, accuracy = ((bins[:, :, 0] * bins[:, :, i]).sum(0) / rows.clip(1) for i in (1, 2))
    error = (rows * abs(confidence - accuracy)).sum() / rows.sum()
    nonempty = rows > 0
    panel.plot([0, 1], [0, 1], color=MUTED_COLOUR, zorder=0)
    panel.plot(confidence[nonempty], accuracy[nonempty], color=colour, alpha=0.6)
    size = 6 + 90 * rows[nonempty] / rows.max()
    panel.scatter(confidence[nonempty], accuracy[nonempty], size, colour, label=f"{label}, ECE {error:.1%}")
    panel.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="share of hits")
    panel.set_title("reliability (15 bins, a dot as large as its rows)", fontsize=9, color=TEXT_COLOUR)


def decision_panel(panel: Any, scores: Sequence[Any], label: str, colour: str) -> None:
    curves: Floats = np.array([client_score["decision"] for client_score in scores])
    rows = np.array([client_score["test_rows"] for client_score in scores])
    benefit = (rows[:, None] * curves[:, :, 1]).sum(0) / rows.sum()
    panel.plot(curves[0, :, 0], benefit, color=colour, label=label)
    panel.axhline(0, color=MUTED_COLOUR, zorder=0)
    panel.set(xlabel="threshold", ylabel="net benefit")
    panel.set_title("decision curve (one vs rest, mean over classes)", fontsize=9, color=TEXT_COLOUR)


def _rounds(panel: Any, lines: Sequence[Any]) -> None:
    panel.set(xlabel="round", ylabel="on test rows")
    panel.set_title("before each round's update", fontsize=9, color=TEXT_COLOUR)
    if not lines:
        panel.text(0.5, 0.5, "no rounds", ha="center", color=TEXT_COLOUR, transform=panel.transAxes)
    for *keys, name, style in ROUND_CURVES:
        for key, (label, _, colour) in zip(keys, CLIENT_GROUPS, strict=True):
            if lines and lines[0].get(key) is not None:
                values = [line[key] for line in lines]
                places = [line["round"] for line in lines]
                panel.plot(places, values, style, color=colour, label=f"{name}, {label}")
