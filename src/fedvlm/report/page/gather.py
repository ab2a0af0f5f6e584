"""Records into one model of plain numbers and words: all that a page shows, and its JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from fedvlm import tensors
from fedvlm.channel.settings import Channel
from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import METRICS
from fedvlm.record import Record
from fedvlm.report.audit import kept
from fedvlm.report.names import generalises, label
from fedvlm.report.page import apart, inside
from fedvlm.report.page.pooled import pooled
from fedvlm.report.page.published import beside_papers, counted
from fedvlm.report.page.read import FORMAT, Model
from fedvlm.report.page.verdict import badges, judge, sentences
from fedvlm.report.tables import MAIN
from fedvlm.storage.files import slug
from fedvlm.storage.toml import flat

CURVES = ("accuracy", "unseen", "clients F1", "clients balanced", "loss", "cosine")
TOLD = ["identity", "data", "encoder", "rows", "classes", "dim", "trainings", "clients", "counts"]
TOLD += ("duplicates_dropped", "reproduces", "notes", "versions", "started", "commit", "dirty")


def gather(
    records: Sequence[Record],
    title: str = "",
    paper: Mapping[str, Mapping[str, float]] | None = None,
    command: str = "",
) -> Model:
    """What a page of these runs says; `paper` has published numbers by row and column."""
    if not records:
        raise SettingsError("no run is named; give one or more run directories")
    details = [_details(record) for record in records]
    runs = [_run(record, one) for record, one in zip(records, details, strict=True)]
    for run, called in zip(runs, names(runs), strict=True):
        run["name"] = called
    every = dict.fromkeys(key for run in runs for table in run["tables"] for key in table)
    main = [key for key in every if key in MAIN] or list(every)
    verdicts = judge(runs, details, main)
    printed = beside_papers(runs)
    return {
        "format": FORMAT,
        "title": title or " and ".join(dict.fromkeys(run["data"] for run in runs)),
        "started": min(run["started"] for run in runs),
        "command": command,
        "columns": main,
        "verdicts": verdicts,
        "sentences": [*sentences(runs, verdicts), *counted(printed)],
        "badges": badges(runs),
        "paper": {name: dict(numbers) for name, numbers in (paper or {}).items()},
        "published": printed,
        "runs": runs,
    }


def names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The methods' names, with as few settings as tell runs of one method apart."""
    plain = [
        {key.removeprefix("method."): value for key, value in flat(run["identity"]).items()}
        for run in runs
    ]
    out = []
    for own in plain:
        alike = [one for one in plain if one["name"] == own["name"] and one is not own]
        odd = [
            f"{key} {value}"
            for key, value in own.items()
            if key != "name" and any(one.get(key) != value for one in alike)
        ]
        out.append(" ".join([own["name"], f"({', '.join(odd)})"]) if odd else own["name"])
    return [f"{one} [{place}]" if out.count(one) > 1 else one for place, one in enumerate(out, 1)]


def _details(record: Record) -> inside.Details:
    return {seed: record.trainings(seed) for seed in record.manifest["identity"]["seeds"]}


def _run(record: Record, details: inside.Details) -> dict[str, Any]:
    lines = record.lines()
    if not generalises(record):  # nothing was learnt for a client that is unseen
        details = {
            seed: {training: {**one, "unseen": []} for training, one in trainings.items()}
            for seed, trainings in details.items()
        }
        lines = [{**line, "unseen": None} for line in lines]
    exchanges, moved = record.traffic
    return {
        "label": label(record),
        "folder": record.folder.name,
        **{key: record.manifest.get(key) for key in TOLD},
        "tables": record.tables,
        "traffic": [exchanges, moved],
        "seconds": round(sum(line["seconds"] for line in lines), 2),
        "curves": _curves(lines, details),
        "cells": _cells(details),
        "who": {
            str(seed): {
                training: [one["train"], one["unseen"]] for training, one in trainings.items()
            }
            for seed, trainings in details.items()
        },
        "sure": pooled(details, len(record.manifest["classes"])),
        "maps": inside.maps(details),
        "angles": inside.angles(record),
        "weights": inside.weights(record),
        "prompts": inside.prompts(record),
        "shared": _shared(record),
        "epsilon": _epsilon(lines, details),
        "far": record.far,
        "audit": kept(record),
        "channel": _through(record),
        "apart": apart.seen(lines),
    }


def short(value: Any, digits: int = 4) -> Any:
    """Four digits after the point are more than a picture shows."""
    return round(value, digits) if isinstance(value, float) else value


def _curves(lines: Sequence[Mapping[str, Any]], details: inside.Details) -> list[dict[str, Any]]:
    """One per seed and training: what is known before each round, and kB of a client so far."""
    out = []
    by_training: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_training.setdefault(line["training"], []).append(line)
    for seed, trainings in details.items():
        for training in trainings:
            mine = by_training.get(f"{seed}-{slug(training)}", [])
            if not mine:
                continue
            one: dict[str, Any] = {"seed": seed, "training": training, "kB": _kilobytes(mine)}
            for key in CURVES:
                if any(line.get(key) is not None for line in mine):
                    one[key] = [short(line.get(key)) for line in mine]
            out.append(one)
    return out


def _kilobytes(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """What a client had moved before each round, the mean over those that train."""
    total, out = 0.0, []
    for line in lines:
        out.append(round(total, 2))
        sizes = [one["bytes_up"] + one["bytes_down"] for one in line["clients"].values()]
        moved = [size for size in sizes if size]
        total += fmean(moved) / 1000 if moved else 0.0
    return out


def _cells(details: inside.Details) -> list[dict[str, Any]]:
    """Every client's test rows in every training of every seed."""
    out = []
    for seed, trainings in details.items():
        for training, about in trainings.items():
            known = {*about["train"], *about["unseen"]}
            for id, scores in about["scores"].items():
                if not scores["test_rows"] or id not in known:
                    continue
                one = {
                    "seed": seed,
                    "training": training,
                    "client": id,
                    "rows": scores["test_rows"],
                }
                one["unseen"] = id in about["unseen"]
                one["accuracy"] = short(scores["test_hits"] / scores["test_rows"], 7)
                one |= {key: short(scores[key], 7) for key in METRICS[1:] if key in scores}
                if "recall" in scores:
                    one["recall"] = [short(part) for part in scores["recall"]]
                out.append(one)
    return out


def _through(record: Record) -> dict[str, Any]:
    """What of the channel was not left as it is."""
    plain = asdict(Channel())
    found = record.manifest["identity"]["channel"]
    return {key: value for key, value in found.items() if plain[key] != value}


def _shared(record: Record) -> list[dict[str, Any]]:
    shared, local = record.outcome(record.manifest["trainings"][0])
    own = next(iter(local.values()), {})
    return [
        {
            "name": key,
            "shape": list(value.shape),
            "type": str(value.dtype).removeprefix("torch."),
            "bytes": tensors.count_bytes({key: value}),
            "held": held,
        }
        for held, group in (("shared", shared), ("local", own))
        for key, value in group.items()
    ]


def _epsilon(lines: Sequence[Mapping[str, Any]], details: inside.Details) -> float | None:
    """The most that any client has spent, by the channel's noise or by the method's own."""
    spent: list[float] = []
    for line in lines:
        found = line.get("epsilon")
        each = list(found.values()) if isinstance(found, Mapping) else [found]
        spent += [one for one in each if one is not None]
    for trainings in details.values():
        for about in trainings.values():
            spent += [one["epsilon"] for one in about["maps"].values() if "epsilon" in one]
    return max(spent, default=None)
