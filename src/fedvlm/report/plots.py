"""Which pictures of runs there are."""

from collections.abc import Sequence
from pathlib import Path

from fedvlm.errors import SettingsError, unknown_name
from fedvlm.record import Record

# What each shows; those of one run alone say so.
PLOT_KINDS = {
    "rounds": "lines over the rounds, with bands over seeds",
    "sweep": "lines over a swept setting, or over the clients that train",
    "bars": "a bar for each run",
    "reliability": "confidence against hits, a panel for each client",
    "roc": "ROC and precision-recall curves",
    "decision": "net benefit, a panel for each client",
    "partition": "rows per class and client, dots coloured by domain",
    "kite": "the same as kites",
    "tsne": "local prompts on a plane, of one run",
    "heat": "where prompts look in an image",
}


def draw_runs(
    kind: str,
    results: Sequence[Record],
    out: str | Path,
    *,
    columns: Sequence[str] = (),
    over: str = "",
    training: str | None = None,
    seed: int | None = None,
    image: Path | None = None,
    name: str | None = None,
    client: str | None = None,
) -> Path:
    """A picture of some runs to a .png or .svg file; what a kind has no use for is refused."""
    from fedvlm.report import overlaid, portraits, several
    from fedvlm.report.panels import PlotOptions
    from fedvlm.report.pictures import save_figure

    if kind not in PLOT_KINDS:
        raise unknown_name("kind of picture", kind, PLOT_KINDS)
    if not results:
        raise SettingsError("no run is named; give one or more run directories")
    is_unused = {"--columns": bool(columns) and kind not in ("rounds", "sweep", "bars")}
    is_unused |= {"--over": bool(over) and kind not in ("sweep", "bars")}
    is_unused |= {"--training": bool(training) and kind not in ("reliability", "roc", "decision")}
    is_unused |= {"--image": image is not None and kind != "heat"}
    for option, is_given in is_unused.items():
        if is_given:
            raise SettingsError(f"{option} has no use for a picture of kind {kind}; leave it out")
    if kind in ("rounds", "sweep", "bars", "reliability", "roc", "decision"):
        file = several if kind in ("rounds", "sweep", "bars") else overlaid
        options = PlotOptions(tuple(columns), over, training, seed)
        return save_figure(getattr(file, kind)(results, options), out)
    if kind in ("partition", "kite"):
        return portraits.draw_partitions(results, out, kite=kind == "kite")
    if kind == "tsne":
        return portraits.draw_tsne(results, out, seed)
    if image is None:
        raise SettingsError("a heat map is of an image; give --image FILE")
    return portraits.prompt_heatmaps(results, out, image, name, client, seed)
