"""Runs side by side: mean ± deviation over seeds, as text, Markdown, LaTeX or CSV."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from json import dumps, loads
from statistics import fmean

from fedvlm.channel.settings import Channel
from fedvlm.errors import SettingsError, unknown
from fedvlm.evaluate import scores
from fedvlm.evaluate.metrics import METRICS
from fedvlm.evaluate.metrics import metrics as all_metrics
from fedvlm.record import Record

FORMS = ("text", "markdown", "latex", "csv")
TRAFFIC = ("exchanges", "kB per client")
MAIN = {"G", "P", "C", "own", "average"}  # what a table shows first; the rest is per client
WHO = (("own", "train"), ("unseen", "unseen"))
MAIN |= {f"{who} {name}" for name in METRICS for who in ("clients", "target")}


def label(result: Record) -> str:
    """The method, with the settings in which it differs from its defaults."""
    from fedvlm.core import make

    settings = dict(result.manifest["identity"]["method"])
    name = settings.pop("name")
    method = make(name, **settings)
    if small := result.manifest["identity"].get("allow_small", False):
        settings.pop("smallest", None)
    usual = loads(dumps(asdict(make(name))))  # as a manifest has it
    odd = [f"{key}={value}" for key, value in settings.items() if usual[key] != value]
    odd += [key for key in ("descriptions", "texts") if result.manifest["identity"][key]]
    if tuned := result.manifest.get("tuned"):
        odd.append(f"tuned on validation rows ({len(tuned['trials'])} trials)")
    if first := result.manifest["identity"]["warm_start"]:
        odd.append(f"warm start by {first['name']}")
    if method.traits.centralised:
        odd.append("not federated")
    if method.traits.reference == "target":
        odd.remove("reference=target")
        odd.append("TRANSDUCTIVE: adapts to the test rows")
    plain = asdict(Channel())
    through = result.manifest["identity"]["channel"]
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


def generalises(result: Record) -> bool:
    """Whether a run has numbers of unseen clients; a method that shares nothing has none."""
    unseen = [key for key in result.tables[0] if key[:2] in ("G", "ta", "un")]
    return any(result.tables[0][key] is not None for key in unseen)


def asked(metrics: Iterable[str]) -> set[str]:
    """The columns of metrics that were asked for."""
    return {f"{name}, {who}" for name in metrics for who, _ in WHO}


def measured(result: Record, metrics: Sequence[str]) -> list[scores.Table]:
    """By seed: the mean over trainings of each metric's mean over clients."""
    for name in metrics:
        if name not in all_metrics():
            raise unknown("metric", name, all_metrics())
    out: list[scores.Table] = []
    for seed in result.manifest["identity"]["seeds"]:
        one: scores.Table = {}
        trainings = result.trainings(seed).values() if metrics else ()
        for name in metrics:
            for who, key in WHO[: 1 + generalises(result)]:
                parts = [
                    scores.metric(training["scores"], training[key], name) for training in trainings
                ]
                there = [part for part in parts if part is not None]
                if there:
                    one[f"{name}, {who}"] = fmean(there)
        out.append(one)
    return out


def cell(mean: float | None, deviation: float | None, form: str) -> str:
    if mean is None:
        return "" if form == "csv" else "-"
    if deviation is None:
        return f"{100 * mean:.2f}"
    between = {"latex": r" $\pm$ ", "csv": " ± "}.get(form, " ± ")
    return f"{100 * mean:.2f}{between}{100 * deviation:.2f}"


def compare(
    results: Sequence[Record],
    form: str = "text",
    every: bool = False,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    traffic: bool = False,
    metrics: Sequence[str] = (),
    chance: bool = False,
) -> str:
    """One row per run, in per cent; `every` adds the columns per domain or client.

    `traffic` adds the exchanges of a client and its kilobytes up and down over all of them.
    `metrics` are names of metrics: adds each one over clients that trained, and over unseen ones.
    `paper` has what was published, by row and column; its numbers stand below ours.
    `chance` begins with what guessing would give.
    """
    if form not in FORMS:
        raise unknown("table form", form, FORMS)
    if not results:
        raise SettingsError("no run is named; give one or more run directories")
    found = [scores.spread(result.tables) for result in results]
    columns = list(dict.fromkeys(key for one in found for key in one))
    if not every and (main := [key for key in columns if key in MAIN]):
        columns = main
    for result, one in zip(results, found, strict=True):
        one |= scores.spread(measured(result, metrics))
    columns += [
        key for key in dict.fromkeys(k for one in found for k in one) if key in asked(metrics)
    ]
    last = [*(TRAFFIC if traffic else ()), "seeds"]
    head = ["method", *columns, *last]
    body = [[*guessing(results[0], columns, form), *("-" for _ in last)]] if chance else []
    for result, one in zip(results, found, strict=True):
        cells = [cell(*one.get(key, (None, None)), form) for key in columns]
        exchanges, moved = result.traffic if traffic else (0, 0.0)
        more = [f"{exchanges}", f"{moved / 1000:.1f}"] if traffic else []
        body.append([label(result), *cells, *more, f"{len(result.tables)}"])
    for name, numbers in (paper or {}).items():
        cells = [f"{numbers[key]:.2f}" if key in numbers else "-" for key in columns]
        body.append([f"published: {name}", *cells, *("-" for _ in last)])
    below = [f"{label(one)}: {w}\n" for one in results for w in (*one.far, *one.unsettled)]
    if below and form == "markdown":
        below.insert(0, "\n")  # or the words would be one more row
    return render(head, body, form) + "".join(below if form in ("text", "markdown") else ())


def guessing(result: Record, columns: Sequence[str], form: str) -> list[str]:
    """A row of one in as many as there are classes, where a column is a share of hits."""
    share = 1 / len(result.manifest["classes"])
    others = {f"{who} {name}" for name in METRICS[1:] for who in ("clients", "target")}
    others |= asked(all_metrics())
    hits = [key not in others and not key.startswith("deviation ") for key in columns]
    return ["chance", *(cell(share if hit else None, None, form) for hit in hits)]


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
