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
from fedvlm.report.columns import compute_columns, settings_of, split_requested
from fedvlm.report.names import has_unseen_scores, run_label

TIDY_FORMS = ("csv", "json")
TIDY_COLUMNS = ("method", "data", "seed", "training", "client", "unseen", "rows", "metric", "value")
DECIMALS = 7  # as a page keeps them


def client_scores(result: Record) -> Iterator[dict[str, Any]]:
    """Every seed, training and client that has test rows, with all its metrics."""
    for seed in result.manifest["identity"]["seeds"]:
        for training, about in result.trainings(seed).items():
            unseen_ids = about["unseen"] if has_unseen_scores(result) else []
            for id, scores in about["scores"].items():
                if not scores["test_rows"] or id not in (*about["train"], *unseen_ids):
                    continue
                numbers = {key: scores.get(key) for key in metrics()}
                numbers["accuracy"] = scores["test_hits"] / scores["test_rows"]
                place = {"seed": seed, "training": training, "client": id, "unseen": id in unseen_ids}
                yield {**place, "rows": scores["test_rows"], **numbers}


def tidy_rows(results: Sequence[Record], extra_columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All of them, as shares of one; a metric that a client does not have has no line."""
    names, settings = split_requested(results, extra_columns)
    nobody = dict.fromkeys(("training", "client", "unseen", "rows"))
    out = []
    for result in results:
        run = {"method": run_label(result, settings), **settings_of(result, settings)}
        run["data"] = result.manifest["data"]
        for client_row in client_scores(result):
            row = {**run, **{key: client_row[key] for key in TIDY_COLUMNS[2:-2]}}
            for name in metrics():
                if client_row[name] is not None:
                    out.append({**row, "metric": name, "value": round(client_row[name], DECIMALS)})
        seeds = result.manifest["identity"]["seeds"]
        for seed, table in zip(seeds, compute_columns(result, names), strict=True):
            for name, value in table.items():
                if value is not None:
                    row = {**run, "seed": seed, **nobody}
                    out.append({**row, "metric": name, "value": round(value, DECIMALS)})
    return out


def tidy_table(results: Sequence[Record], form: str, extra_columns: Sequence[str] = ()) -> str:
    """As CSV or JSON; settings that were asked for follow the method."""
    settings = split_requested(results, extra_columns)[1]
    return serialise(tidy_rows(results, extra_columns), (TIDY_COLUMNS[0], *settings, *TIDY_COLUMNS[1:]), form)


def serialise(rows: Sequence[Mapping[str, Any]], head: Sequence[str], form: str) -> str:
    """Lines as CSV or JSON."""
    if form == "json":
        return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
    out = io.StringIO()
    table = csv.DictWriter(out, head, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return out.getvalue()
