"""Runs side by side: mean ± deviation over seeds, as text, Markdown, LaTeX or CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from json import dumps, loads

from fedvlm.channel.settings import Channel
from fedvlm.errors import SettingsError, unknown
from fedvlm.evaluate import scores
from fedvlm.evaluate.metrics import METRICS
from fedvlm.record import Record
from fedvlm.report.columns import on_demand, setting, split, written

FORMS = ("text", "markdown", "latex", "csv")
TRAFFIC = ("exchanges", "kB per client")
MAIN = {
    "G",
    "P",
    "C",
    "own",
    "global",
    "average",
}  # what a table shows first; the rest is per client
MAIN |= {f"{who} {name}" for name in METRICS for who in ("clients", "target")}


def label(result: Record, besides: Sequence[str] = ()) -> str:
    """The method, with the settings in which it differs from its defaults, but for some."""
    from fedvlm.core import make

    settings = dict(result.manifest["identity"]["method"])
    name = settings.pop("name")
    method = make(name, **settings)
    if small := result.manifest["identity"].get("allow_small", False):
        settings.pop("smallest", None)
    usual = loads(dumps(asdict(make(name))))  # as a manifest has it
    rest = {key: value for key, value in settings.items() if f"method.{key}" not in besides}
    odd = [f"{key}={value}" for key, value in rest.items() if usual[key] != value]
    odd += [key for key in ("descriptions", "texts") if result.manifest["identity"].get(key)]
    if tuned := result.manifest.get("tuned"):
        odd.append(f"tuned on validation rows ({len(tuned['trials'])} trials)")
    if first := result.manifest["identity"].get("warm_start"):
        odd.append(f"warm start by {first['name']}")
    if result.manifest["identity"].get("centralised"):
        odd.append("centralised")
    elif method.traits.centralised:
        odd.append("not federated")
    if method.traits.reference == "target":
        odd = [one for one in odd if one != "reference=target"]
        odd.append("TRANSDUCTIVE: adapts to the test rows")
    plain = asdict(Channel())
    through = result.manifest["identity"].get("channel", plain)
    odd += [f"channel.{key}={value}" for key, value in through.items() if plain[key] != value]
    if attack := result.manifest["identity"].get("attack"):
        odd.append(f"ATTACK: {attack} by {result.manifest['identity']['attackers']:.0%}")
    chosen = result.manifest["identity"]["selection"]
    if chosen == "oracle":
        odd.append("ORACLE: best test round")
    elif chosen == "validation":
        odd.append("best validation round")
    if small:
        odd.append("ALLOW-SMALL")
    if result.manifest["identity"]["smoke"]:
        odd.append("SMOKE")
    return f"{name} ({', '.join(odd)})" if odd else str(name)


def cell(mean: float | None, deviation: float | None, form: str, column: str = "") -> str:
    if mean is None:
        return "" if form == "csv" else "-"
    if deviation is None:
        return written(column, mean)
    between = {"latex": r" $\pm$ ", "csv": " ± "}.get(form, " ± ")
    return f"{written(column, mean)}{between}{written(column, deviation)}"


def compare(
    results: Sequence[Record],
    form: str = "text",
    every: bool = False,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    traffic: bool = False,
    asked: Sequence[str] = (),
    chance: bool = False,
) -> str:
    """One row per run, in per cent; `every` adds the columns per domain or client.

    `traffic` adds the exchanges of a client and its kilobytes up and down over all of them.
    `asked` are names of COLUMNS, and settings by dotted names, which follow the method.
    `paper` has what was published, by row and column; its numbers stand below ours.
    `chance` begins with what guessing would give.
    """
    if form not in FORMS:
        raise unknown("table form", form, FORMS)
    if not results:
        raise SettingsError("no run is named; give one or more run directories")
    names, settings = split(results, asked)
    found = [scores.spread(result.tables) for result in results]
    columns = list(dict.fromkeys(key for one in found for key in one))
    if not every and (main := [key for key in columns if key in MAIN]):
        columns = main
    shares = list(columns)
    for result, one in zip(results, found, strict=True):
        more = scores.spread(on_demand(result, names))
        one |= more
        columns += [key for key in more if key not in columns]
    last = [*(TRAFFIC if traffic else ()), "seeds"]
    head = ["method", *settings, *columns, *last]
    dashes = ["-" for _ in settings]
    body = []
    if chance:
        guessed = dict(zip(shares, guessing(results[0], shares, form), strict=True))
        cells = [guessed.get(key, cell(None, None, form)) for key in columns]
        body.append(["chance", *dashes, *cells, *("-" for _ in last)])
    for result, one in zip(results, found, strict=True):
        cells = [cell(*one.get(key, (None, None)), form, key) for key in columns]
        exchanges, moved = result.traffic if traffic else (0, 0.0)
        more_ = [f"{exchanges}", f"{moved / 1000:.1f}"] if traffic else []
        before = [label(result, settings), *(setting(result, name) for name in settings)]
        body.append([*before, *cells, *more_, f"{len(result.tables)}"])
    for name, numbers in (paper or {}).items():
        cells = [f"{numbers[key]:.2f}" if key in numbers else "-" for key in columns]
        body.append([f"published: {name}", *dashes, *cells, *("-" for _ in last)])
    below = [f"{label(one)}: {w}\n" for one in results for w in (*one.far, *one.unsettled)]
    return render(head, body, form) + "".join(below if form in ("text", "markdown") else ())


def guessing(result: Record, columns: Sequence[str], form: str) -> list[str]:
    """One in as many as there are classes, where a column is a share of hits."""
    share = 1 / len(result.manifest["classes"])
    others = {f"{who} {name}" for name in METRICS[1:] for who in ("clients", "target")}
    hits = [key not in others and not key.startswith("deviation ") for key in columns]
    return [cell(share if hit else None, None, form) for hit in hits]


def render(
    head: Sequence[str], body: Sequence[Sequence[str]], form: str, words: bool = False
) -> str:
    """A table; its columns after the first are numbers, set to the right, unless they are words."""
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([head, *body])
        return out.getvalue()
    if form == "latex":

        def escape(text: str) -> str:
            return text.replace("_", r"\_").replace("%", r"\%").replace("&", r"\&")

        lines = [" & ".join(map(escape, row)) + r" \\" for row in (head, *body)]
        begin = rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}"
        rows = [begin, r"\hline", lines[0], r"\hline", *lines[1:], r"\hline", r"\end{tabular}", ""]
        return "\n".join(rows)
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        set_to = str.ljust if words else str.rjust
        cells += [set_to(text, width) for text, width in zip(row[1:], widths[1:], strict=True)]
        return f"| {' | '.join(cells)} |" if form == "markdown" else "  ".join(cells).rstrip()

    rule = ["-" * width for width in widths]
    if form == "markdown":
        rule = [rule[0], *(f"{one[:-1]}:" for one in rule[1:])]
    return "\n".join([line(head), line(rule), *map(line, body), ""])
