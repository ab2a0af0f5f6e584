"""The numbers of runs in long form: one line per seed, training, client and metric.

A column that was asked for has a line per seed, of no training and client.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedvlm.evaluate.metrics import metrics
from fedvlm.record import Record
from fedvlm.report.columns import on_demand, settings_of, split
from fedvlm.report.names import generalises, label

FORMS = ("csv", "json")
HEAD = ("method", "data", "seed", "training", "client", "unseen", "rows", "metric", "value")
DIGITS = 7  # as a page keeps them


def clients(result: Record) -> Iterator[dict[str, Any]]:
    """Every seed, training and client that has test rows, with all its metrics."""
    for seed in result.manifest["identity"]["seeds"]:
        for training, about in result.trainings(seed).items():
            known = about["unseen"] if generalises(result) else []
            for id, one in about["scores"].items():
                if not one["test_rows"] or id not in (*about["train"], *known):
                    continue
                numbers = {key: one.get(key) for key in metrics()}
                numbers["accuracy"] = one["test_hits"] / one["test_rows"]
                place = {"seed": seed, "training": training, "client": id, "unseen": id in known}
                yield {**place, "rows": one["test_rows"], **numbers}


def lines(results: Sequence[Record], asked: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All of them, as shares of one; a metric that a client does not have has no line."""
    names, settings = split(results, asked)
    nobody = dict.fromkeys(("training", "client", "unseen", "rows"))
    out = []
    for result in results:
        run = {"method": label(result, settings), **settings_of(result, settings)}
        run["data"] = result.manifest["data"]
        for one in clients(result):
            who = {**run, **{key: one[key] for key in HEAD[2:-2]}}
            for name in metrics():
                if one[name] is not None:
                    out.append({**who, "metric": name, "value": round(one[name], DIGITS)})
        seeds = result.manifest["identity"]["seeds"]
        for seed, table in zip(seeds, on_demand(result, names), strict=True):
            for name, value in table.items():
                if value is not None:
                    who = {**run, "seed": seed, **nobody}
                    out.append({**who, "metric": name, "value": round(value, DIGITS)})
    return out


def written(results: Sequence[Record], form: str, asked: Sequence[str] = ()) -> str:
    """As CSV or JSON; settings that were asked for follow the method."""
    settings = split(results, asked)[1]
    return put(lines(results, asked), (HEAD[0], *settings, *HEAD[1:]), form)


def put(found: Sequence[Mapping[str, Any]], head: Sequence[str], form: str) -> str:
    """Lines as CSV or JSON."""
    if form == "json":
        return json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    out = io.StringIO()
    table = csv.DictWriter(out, head, lineterminator="\n")
    table.writeheader()
    table.writerows(found)
    return out.getvalue()
