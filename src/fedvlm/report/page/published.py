"""Our numbers beside those of the tables that an experiment says it reproduces."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedvlm.evaluate import metrics
from fedvlm.report.papers import judge_number, matches_method, numbers
from fedvlm.report.units import to_printed_unit

PaperComparison = dict[str, Any]
VERDICT_ORDER = ("met", "within noise", "differs", "void", "not comparable")


def compare_with_papers(runs: Sequence[Mapping[str, Any]]) -> list[PaperComparison]:
    """A line per printed number of a run's method, settings and data that the run has as well."""
    out: list[PaperComparison] = []
    for place, run in enumerate(runs):
        identity, column_statistics = run["identity"], metrics.mean_and_std(run["tables"])
        for item in run["reproduces"] or ():
            for number in numbers().get(item, ()):
                mean, deviation = column_statistics.get(number.column, (None, None))
                if mean is None or number.data != identity["data"] or not matches_method(number, identity):
                    continue
                measured, spread = to_printed_unit(number.column, mean, deviation)
                verdict = judge_number(number, measured, spread, identity)
                line = {"item": item, "row": number.row, "run": place, "column": number.column}
                line |= {"ours": round(measured, 4), "deviation": spread and round(spread, 4)}
                line |= {"published": number.value, "published deviation": number.deviation}
                line |= {"round": number.round, "word": verdict.word, "why": verdict.reason}
                out.append(line)
    return sorted(out, key=lambda line: VERDICT_ORDER.index(line["word"]))


def verdict_sentence(lines: Sequence[PaperComparison]) -> list[str]:
    """The verdicts in one sentence; none where nothing is printed."""
    if not lines:
        return []
    counts = Counter(line["word"] for line in lines)
    texts = [f"{counts[word]} {word}" for word in VERDICT_ORDER if counts[word]]
    return [f"Of {len(lines)} printed numbers that these runs have too: {', '.join(texts)}."]
