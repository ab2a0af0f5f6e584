"""Curves of several runs, one over another: reliability, decision, ROC."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedvlm.errors import DataError, unknown_name
from fedvlm.evaluate.metrics import area_under_curve
from fedvlm.record import Record
from fedvlm.report.columns import ranking_curve
from fedvlm.report.diagrams import decision_panel, reliability_panel
from fedvlm.report.panels import COLOURS, PlotOptions, add_legend, panels_of, run_names
from fedvlm.report.pictures import MUTED_COLOUR

MAX_CLIENT_PANELS = 6  # clients up to which each has a panel


def _measured(result: Record, options: PlotOptions) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A training, and the scores of its clients that were kept in full."""
    trainings = result.trainings(options.seed)
    name = options.training or result.manifest["trainings"][0]
    if name not in trainings:
        raise unknown_name("training of this run", name, trainings)
    about = trainings[name]
    measured = {id: client_scores for id, client_scores in about["scores"].items() if "decision" in client_scores}
    if not measured:
        raise DataError(f"{result.folder} has no metrics of test rows; run it again to have them")
    return about, measured


def _overlaid(results: Sequence[Record], options: PlotOptions, draw: Any) -> Any:
    """A panel for each client, or one for all that train and one for the unseen."""
    about, _ = _measured(results[0], options)
    ids = [*about["train"], *about["unseen"]]
    groups = {id: [id] for id in ids}
    if len(ids) > MAX_CLIENT_PANELS:
        groups = {"clients": about["train"], "unseen": about["unseen"]}
    groups = {name: those for name, those in groups.items() if those}
    figure, panels = panels_of(list(groups), 3.8)
    for (title, those), panel in zip(groups.items(), panels, strict=True):
        for number, (result, name) in enumerate(zip(results, run_names(results), strict=True)):
            _, measured = _measured(result, options)
            scored = [measured[id] for id in those if id in measured]
            if scored:
                draw(panel, scored, name, COLOURS[number % len(COLOURS)])
        unseen = ", unseen" if title in about["unseen"] else ""
        panel.set_title(f"{title}{unseen}")
    return add_legend(figure, panels)


def reliability(results: Sequence[Record], options: PlotOptions) -> Any:
    return _overlaid(results, options, reliability_panel)


def decision(results: Sequence[Record], options: PlotOptions) -> Any:
    return _overlaid(results, options, decision_panel)


def roc(results: Sequence[Record], options: PlotOptions) -> Any:
    """ROC and precision-recall curves of the clients' own test rows, one class against the rest."""
    figure, panels = panels_of(("ROC", "PR"), 4.4)
    axis_labels = {"ROC": ("false positive rate", "true positive rate"), "PR": ("recall", "precision")}
    for kind, panel in zip(axis_labels, panels, strict=True):
        for number, (result, name) in enumerate(zip(results, run_names(results), strict=True)):
            points = ranking_curve(result, kind, options.training, options.seed)
            x, y = zip(*points, strict=True)
            colour = COLOURS[number % len(COLOURS)]
            panel.plot(x, y, color=colour, label=f"{name}, area {area_under_curve(points, kind):.3f}")
        panel.set(xlabel=axis_labels[kind][0], ylabel=axis_labels[kind][1], title=kind, xlim=(0, 1.01))
        panel.set_ylim(0, 1.01)
    panels[0].plot([0, 1], [0, 1], color=MUTED_COLOUR, lw=0.8, zorder=0)
    return add_legend(figure, panels)
