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
from fedvlm.report.audit import read_audit
from fedvlm.report.names import has_unseen_scores, run_label
from fedvlm.report.page import apart, inside
from fedvlm.report.page.pooled import pool_by_group
from fedvlm.report.page.published import compare_with_papers, verdict_sentence
from fedvlm.report.page.read import PAGE_FORMAT, Model
from fedvlm.report.page.verdict import compare_runs, result_sentences, run_badges
from fedvlm.report.tables import MAIN_COLUMNS
from fedvlm.storage.files import slug
from fedvlm.storage.toml import flatten

CURVE_KEYS = ("accuracy", "unseen", "clients F1", "clients balanced", "loss", "cosine")
MANIFEST_KEYS = ["identity", "data", "encoder", "rows", "classes", "dim", "trainings", "clients", "counts"]
MANIFEST_KEYS += ("duplicates_dropped", "reproduces", "notes", "versions", "started", "commit", "dirty")


def build_model(
    records: Sequence[Record],
    title: str = "",
    paper: Mapping[str, Mapping[str, float]] | None = None,
    command: str = "",
) -> Model:
    """What a page of these runs says; `paper` has published numbers by row and column."""
    if not records:
        raise SettingsError("no run is named; give one or more run directories")
    details = [_trainings_by_seed(record) for record in records]
    runs = [_run_model(record, run_details) for record, run_details in zip(records, details, strict=True)]
    for run, called in zip(runs, run_names(runs), strict=True):
        run["name"] = called
    all_columns = dict.fromkeys(key for run in runs for table in run["tables"] for key in table)
    main = [key for key in all_columns if key in MAIN_COLUMNS] or list(all_columns)
    verdicts = compare_runs(runs, details, main)
    printed = compare_with_papers(runs)
    return {
        "format": PAGE_FORMAT,
        "title": title or " and ".join(dict.fromkeys(run["data"] for run in runs)),
        "started": min(run["started"] for run in runs),
        "command": command,
        "columns": main,
        "verdicts": verdicts,
        "sentences": [*result_sentences(runs, verdicts), *verdict_sentence(printed)],
        "badges": run_badges(runs),
        "paper": {name: dict(numbers) for name, numbers in (paper or {}).items()},
        "published": printed,
        "runs": runs,
    }


def run_names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The methods' names, with as few settings as tell runs of one method apart."""
    plain = [{key.removeprefix("method."): value for key, value in flatten(run["identity"]).items()} for run in runs]
    out = []
    for settings in plain:
        alike = [
            other_settings
            for other_settings in plain
            if other_settings["name"] == settings["name"] and other_settings is not settings
        ]
        odd = [
            f"{key} {value}"
            for key, value in settings.items()
            if key != "name" and any(other_settings.get(key) != value for other_settings in alike)
        ]
        out.append(" ".join([settings["name"], f"({', '.join(odd)})"]) if odd else settings["name"])
    return [
        f"{other_settings} [{place}]" if out.count(other_settings) > 1 else other_settings
        for place, other_settings in enumerate(out, 1)
    ]


def _trainings_by_seed(record: Record) -> inside.Details:
    return {seed: record.trainings(seed) for seed in record.manifest["identity"]["seeds"]}


def _run_model(record: Record, details: inside.Details) -> dict[str, Any]:
    lines = record.lines()
    if not has_unseen_scores(record):  # nothing was learnt for a client that is unseen
        details = {
            seed: {training: {**outcome, "unseen": []} for training, outcome in trainings.items()}
            for seed, trainings in details.items()
        }
        lines = [{**line, "unseen": None} for line in lines]
    exchanges, moved = record.traffic
    return {
        "label": run_label(record),
        "folder": record.folder.name,
        **{key: record.manifest.get(key) for key in MANIFEST_KEYS},
        "tables": record.tables,
        "traffic": [exchanges, moved],
        "seconds": round(sum(line["seconds"] for line in lines), 2),
        "curves": _curves(lines, details),
        "cells": _cells(details),
        "who": {
            str(seed): {training: [outcome["train"], outcome["unseen"]] for training, outcome in trainings.items()}
            for seed, trainings in details.items()
        },
        "sure": pool_by_group(details, len(record.manifest["classes"])),
        "maps": inside.diagnostic_ranges(details),
        "angles": inside.rotation_angles(record),
        "weights": inside.mean_sentence_weights(record),
        "prompts": inside.prompt_positions(record),
        "shared": _tensor_list(record),
        "epsilon": _max_epsilon(lines, details),
        "far": record.outlier_warnings,
        "audit": read_audit(record),
        "channel": _changed_channel(record),
        "apart": apart.outlier_history(lines),
    }


def round_number(value: Any, digits: int = 4) -> Any:
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
            training_lines = by_training.get(f"{seed}-{slug(training)}", [])
            if not training_lines:
                continue
            curve: dict[str, Any] = {"seed": seed, "training": training, "kB": _kilobytes(training_lines)}
            for key in CURVE_KEYS:
                if any(line.get(key) is not None for line in training_lines):
                    curve[key] = [round_number(line.get(key)) for line in training_lines]
            out.append(curve)
    return out


def _kilobytes(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """What a client had moved before each round, the mean over those that train."""
    total, out = 0.0, []
    for line in lines:
        out.append(round(total, 2))
        sizes = [client["bytes_up"] + client["bytes_down"] for client in line["clients"].values()]
        moved = [size for size in sizes if size]
        total += fmean(moved) / 1000 if moved else 0.0
    return out


def _cells(details: inside.Details) -> list[dict[str, Any]]:
    """Every client's test rows in every training of every seed."""
    out = []
    for seed, trainings in details.items():
        for training, about in trainings.items():
            member_ids = {*about["train"], *about["unseen"]}
            for id, scores in about["scores"].items():
                if not scores["test_rows"] or id not in member_ids:
                    continue
                cell = {
                    "seed": seed,
                    "training": training,
                    "client": id,
                    "rows": scores["test_rows"],
                }
                cell["unseen"] = id in about["unseen"]
                cell["accuracy"] = round_number(scores["test_hits"] / scores["test_rows"], 7)
                cell |= {key: round_number(scores[key], 7) for key in METRICS[1:] if key in scores}
                if "recall" in scores:
                    cell["recall"] = [round_number(part) for part in scores["recall"]]
                out.append(cell)
    return out


def _changed_channel(record: Record) -> dict[str, Any]:
    """What of the channel was not left as it is."""
    plain = asdict(Channel())
    channel = record.manifest["identity"]["channel"]
    return {key: value for key, value in channel.items() if plain[key] != value}


def _tensor_list(record: Record) -> list[dict[str, Any]]:
    shared, local = record.outcome(record.manifest["trainings"][0])
    local_tensors = next(iter(local.values()), {})
    return [
        {
            "name": key,
            "shape": list(value.shape),
            "type": str(value.dtype).removeprefix("torch."),
            "bytes": tensors.count_bytes({key: value}),
            "held": held,
        }
        for held, group in (("shared", shared), ("local", local_tensors))
        for key, value in group.items()
    ]


def _max_epsilon(lines: Sequence[Mapping[str, Any]], details: inside.Details) -> float | None:
    """The most that any client has spent, by the channel's noise or by the method's own."""
    spent: list[float] = []
    for line in lines:
        epsilon = line.get("epsilon")
        epsilons = list(epsilon.values()) if isinstance(epsilon, Mapping) else [epsilon]
        spent += [spent_epsilon for spent_epsilon in epsilons if spent_epsilon is not None]
    for trainings in details.values():
        for about in trainings.values():
            spent += [
                spent_epsilon["epsilon"] for spent_epsilon in about["maps"].values() if "epsilon" in spent_epsilon
            ]
    return max(spent, default=None)
