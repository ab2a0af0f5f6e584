"""Our numbers beside those of the tables that an experiment says it reproduces."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedvlm.evaluate import scores
from fedvlm.report.papers import judge, matches, numbers
from fedvlm.report.units import printed

Beside = dict[str, Any]
ORDER = ("met", "within noise", "differs", "void", "not comparable")


def beside_papers(runs: Sequence[Mapping[str, Any]]) -> list[Beside]:
    """A line per printed number of a run's method, settings and data that the run has as well."""
    out: list[Beside] = []
    for place, run in enumerate(runs):
        identity, found = run["identity"], scores.spread(run["tables"])
        for item in run["reproduces"] or ():
            for one in numbers().get(item, ()):
                mean, deviation = found.get(one.column, (None, None))
                if mean is None or one.data != identity["data"] or not matches(one, identity):
                    continue
                ours, spread = printed(one.column, mean, deviation)
                said = judge(one, ours, spread, identity)
                line = {"item": item, "row": one.row, "run": place, "column": one.column}
                line |= {"ours": round(ours, 4), "deviation": spread and round(spread, 4)}
                line |= {"published": one.value, "published deviation": one.deviation}
                line |= {"round": one.round, "word": said.word, "why": said.why}
                out.append(line)
    return sorted(out, key=lambda line: ORDER.index(line["word"]))


def counted(lines: Sequence[Beside]) -> list[str]:
    """The verdicts in one sentence; none where nothing is printed."""
    if not lines:
        return []
    found = Counter(line["word"] for line in lines)
    said = [f"{found[word]} {word}" for word in ORDER if found[word]]
    return [f"Of {len(lines)} printed numbers that these runs have too: {', '.join(said)}."]
