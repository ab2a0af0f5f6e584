"""Which pictures of runs there are."""

from collections.abc import Sequence
from pathlib import Path

from fedvlm.errors import SettingsError, unknown
from fedvlm.record import Record

# What each shows; those of one run alone say so.
KINDS = {
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
    from fedvlm.report.panels import Asked
    from fedvlm.report.pictures import save

    if kind not in KINDS:
        raise unknown("kind of picture", kind, KINDS)
    if not results:
        raise SettingsError("no run is named; give one or more run directories")
    useless = {"--columns": bool(columns) and kind not in ("rounds", "sweep", "bars")}
    useless |= {"--over": bool(over) and kind not in ("sweep", "bars")}
    useless |= {"--training": bool(training) and kind not in ("reliability", "roc", "decision")}
    useless |= {"--image": image is not None and kind != "heat"}
    for option, there in useless.items():
        if there:
            raise SettingsError(f"{option} has no use for a picture of kind {kind}; leave it out")
    if kind in ("rounds", "sweep", "bars", "reliability", "roc", "decision"):
        file = several if kind in ("rounds", "sweep", "bars") else overlaid
        asked = Asked(tuple(columns), over, training, seed)
        return save(getattr(file, kind)(results, asked), out)
    if kind in ("partition", "kite"):
        return portraits.partition(results, out, kite=kind == "kite")
    if kind == "tsne":
        return portraits.tsne(results, out, seed)
    if image is None:
        raise SettingsError("a heat map is of an image; give --image FILE")
    return portraits.heat(results, out, image, name, client, seed)
