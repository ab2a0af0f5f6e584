"""Curves of several runs, one over another: reliability, decision, ROC."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedvlm.errors import DataError, unknown
from fedvlm.evaluate.metrics import area
from fedvlm.record import Record
from fedvlm.report.columns import curve
from fedvlm.report.diagrams import decision_panel, reliability_panel
from fedvlm.report.panels import COLOURS, Asked, finish, panels_of, titles
from fedvlm.report.pictures import PALE

FEW = 6  # clients up to which each has a panel


def _measured(result: Record, asked: Asked) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A training, and the scores of its clients that were kept in full."""
    trainings = result.trainings(asked.seed)
    name = asked.training or result.manifest["trainings"][0]
    if name not in trainings:
        raise unknown("training of this run", name, trainings)
    about = trainings[name]
    found = {id: one for id, one in about["scores"].items() if "decision" in one}
    if not found:
        raise DataError(f"{result.folder} has no metrics of test rows; run it again to have them")
    return about, found


def _overlaid(results: Sequence[Record], asked: Asked, draw: Any) -> Any:
    """A panel for each client, or one for all that train and one for the unseen."""
    about, _ = _measured(results[0], asked)
    ids = [*about["train"], *about["unseen"]]
    groups = {id: [id] for id in ids}
    if len(ids) > FEW:
        groups = {"clients": about["train"], "unseen": about["unseen"]}
    groups = {name: those for name, those in groups.items() if those}
    figure, panels = panels_of(list(groups), 3.8)
    for (title, those), panel in zip(groups.items(), panels, strict=True):
        for number, (result, name) in enumerate(zip(results, titles(results), strict=True)):
            _, found = _measured(result, asked)
            scored = [found[id] for id in those if id in found]
            if scored:
                draw(panel, scored, name, COLOURS[number % len(COLOURS)])
        unseen = ", unseen" if title in about["unseen"] else ""
        panel.set_title(f"{title}{unseen}")
    return finish(figure, panels)


def reliability(results: Sequence[Record], asked: Asked) -> Any:
    return _overlaid(results, asked, reliability_panel)


def decision(results: Sequence[Record], asked: Asked) -> Any:
    return _overlaid(results, asked, decision_panel)


def roc(results: Sequence[Record], asked: Asked) -> Any:
    """ROC and precision-recall curves of the clients' own test rows, one class against the rest."""
    figure, panels = panels_of(("ROC", "PR"), 4.4)
    says = {"ROC": ("false positive rate", "true positive rate"), "PR": ("recall", "precision")}
    for kind, panel in zip(says, panels, strict=True):
        for number, (result, name) in enumerate(zip(results, titles(results), strict=True)):
            points = curve(result, kind, asked.training, asked.seed)
            x, y = zip(*points, strict=True)
            colour = COLOURS[number % len(COLOURS)]
            panel.plot(x, y, color=colour, label=f"{name}, area {area(points, kind):.3f}")
        panel.set(xlabel=says[kind][0], ylabel=says[kind][1], title=kind, xlim=(0, 1.01))
        panel.set_ylim(0, 1.01)
    panels[0].plot([0, 1], [0, 1], color=PALE, lw=0.8, zorder=0)
    return finish(figure, panels)
