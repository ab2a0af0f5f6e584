"""Records into one model of plain numbers and words: all that a page shows, and its JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from json import dumps
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedvlm import tensors
from fedvlm.channel.settings import Channel
from fedvlm.core import make
from fedvlm.errors import SettingsError
from fedvlm.evaluate import metrics, protocols
from fedvlm.evaluate.metrics import METRICS, unpack_correct
from fedvlm.evaluate.protocols import contract
from fedvlm.evaluate.statistics import Cell, Contributions, compare_with_best, weighted_correct
from fedvlm.maths import orthogonal
from fedvlm.maths.tsne import tsne
from fedvlm.methods.fedot import selected_skew
from fedvlm.record import Record
from fedvlm.report.explain import MIN_PROMPTS, local_prompts
from fedvlm.report.paper_tables import compare_with_papers, verdict_sentence
from fedvlm.report.runs import PAGE_FORMAT, Model, has_unseen_scores, run_label
from fedvlm.report.tables import MAIN_COLUMNS, read_audit
from fedvlm.storage.files import flatten, slug

Details = dict[int, Mapping[str, dict[str, Any]]]  # seed -> training -> what came of it
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


def _trainings_by_seed(record: Record) -> Details:
    return {seed: record.trainings(seed) for seed in record.manifest["identity"]["seeds"]}


def _run_model(record: Record, details: Details) -> dict[str, Any]:
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
        "maps": diagnostic_ranges(details),
        "angles": rotation_angles(record),
        "weights": mean_sentence_weights(record),
        "prompts": prompt_positions(record),
        "shared": _tensor_list(record),
        "epsilon": _max_epsilon(lines, details),
        "far": record.outlier_warnings,
        "audit": read_audit(record),
        "channel": _changed_channel(record),
        "apart": outlier_history(lines),
    }


def round_number(value: Any, digits: int = 4) -> Any:
    """Four digits after the point are more than a picture shows."""
    return round(value, digits) if isinstance(value, float) else value


def _curves(lines: Sequence[Mapping[str, Any]], details: Details) -> list[dict[str, Any]]:
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


def _cells(details: Details) -> list[dict[str, Any]]:
    """Every client's test rows in every training of every seed."""
    out = []
    for seed, trainings in details.items():
        for training, about in trainings.items():
            member_ids = {*about["train"], *about["unseen"]}
            for id, client in about["scores"].items():
                if not client["test_rows"] or id not in member_ids:
                    continue
                cell = {
                    "seed": seed,
                    "training": training,
                    "client": id,
                    "rows": client["test_rows"],
                }
                cell["unseen"] = id in about["unseen"]
                cell["accuracy"] = round_number(client["test_hits"] / client["test_rows"], 7)
                cell |= {key: round_number(client[key], 7) for key in METRICS[1:] if key in client}
                if "recall" in client:
                    cell["recall"] = [round_number(part) for part in client["recall"]]
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


def _max_epsilon(lines: Sequence[Mapping[str, Any]], details: Details) -> float | None:
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


Run = Mapping[str, Any]
COLUMN_MEANINGS = {
    "G": "On domains that nobody trained on (G)",
    "P": "On the domains of the clients that trained (P)",
    "own": "On the clients' own test rows",
    "base": "On classes that were trained on",
    "clients accuracy": "On the clients that trained",
    "target accuracy": "On the unseen target",
}
PAIRING_SETTINGS = ("clients", "seeds", "protocol", "target", "counts", "unseen", "smoke")


def compare_runs(runs: Sequence[Run], details: Sequence[Any], main: Sequence[str]) -> dict[str, Any]:
    """By column: the best run, and of the others the difference to it with its interval.

    Only runs of the same rows, clients and seeds can be paired; those that stand alone, and runs
    whose record has no hits row by row, are left out.
    """
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        alike = {key: run["identity"].get(key) for key in PAIRING_SETTINGS}
        groups.setdefault(dumps([run["rows"], alike], sort_keys=True), []).append(place)
    group = max(groups.values(), key=len)
    out: dict[str, Any] = {}
    for column in main:
        samples_by_run = {str(place): _sample_scores(runs[place], details[place], column) for place in group}
        comparable = {place: rows for place, rows in samples_by_run.items() if rows}
        if len(comparable) < 2:
            continue
        best, differences = compare_with_best(comparable)
        half_widths = [(interval.high - interval.low) / 2 for interval in differences.values()]
        order = sorted(differences, key=lambda place: -differences[place].mean)
        out[column] = {
            "best": int(best),
            "widths": [round(interval, 5) for interval in (min(half_widths), max(half_widths))],
            "differences": {
                place: [round(interval.mean, 5), round(interval.low, 5), round(interval.high, 5)]
                for place, interval in differences.items()
            },
            "level": [int(place) for place in order if not differences[place].is_significant],
        }
    return out


def _sample_scores(run: Run, details: Mapping[int, Any], column: str) -> list[Contributions]:
    """A column row by row, one entry per seed; nothing if the record cannot give it."""
    generalises = run["tables"][0].get(column) is not None
    if not generalises:
        return []
    out = []
    for trainings in details.values():
        correct: dict[Cell, NDArray[np.bool_]] = {}
        members: dict[str, tuple[list[str], list[str]]] = {}
        for training, about in trainings.items():
            by_client = about["scores"]
            if any("hits" not in client_scores for client_scores in by_client.values() if client_scores["test_rows"]):
                return []
            tested = {id: client_scores for id, client_scores in by_client.items() if client_scores["test_rows"]}
            correct |= {
                (training, id): unpack_correct(client_scores["hits"], client_scores["test_rows"])
                for id, client_scores in tested.items()
            }
            train, unseen = about["train"], about["unseen"]
            members[training] = (
                [id for id in train if id in tested],
                [id for id in unseen if id in tested],
            )
        weights = protocols.make_protocol(run["identity"]["protocol"]).weights(members, True).get(column)
        if not weights or any(cell not in correct for cell in weights):
            return []
        out.append(weighted_correct(weights, correct))
    return out


def format_mean(run: Run, column: str) -> str:
    """Mean ± deviation over seeds, in per cent."""
    mean, deviation = metrics.mean_and_std(run["tables"]).get(column, (None, None))
    if mean is None:
        return "-"
    return f"{100 * mean:.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}")


def result_sentences(runs: Sequence[Run], verdicts: Mapping[str, Any]) -> list[str]:
    """The result in words, a sentence per column that has a meaning of its own."""
    out = [
        _column_sentence(runs, column, verdicts[column])
        for column in verdicts
        if column in COLUMN_MEANINGS or column.startswith(("own, ", "unseen, "))
    ]
    if out:
        return out
    column = next((key for key in runs[0]["tables"][0] if runs[0]["tables"][0][key] is not None), "")
    meaning = COLUMN_MEANINGS.get(column, f"In {column}")
    lines = [f"{meaning} {run['name']} has {format_mean(run, column)}." for run in runs[:3]]
    if len(runs) > 1:
        lines.append("Nothing is compared: no two runs have the same rows, clients and seeds, row by row.")
    return lines


def _column_sentence(runs: Sequence[Run], column: str, verdict: Mapping[str, Any]) -> str:
    meaning = COLUMN_MEANINGS.get(column, f"In {column}")
    best = runs[verdict["best"]]
    level = [runs[place] for place in verdict["level"]]
    behind = len(verdict["differences"]) - len(level)
    rest = f"; {behind} other{'s lie' if behind > 1 else ' lies'} below." if behind else "."
    out = f"{meaning} {best['name']} has the most, {format_mean(best, column)} %"
    if not level:
        return out + rest
    listed = [f"{run['name']} ({format_mean(run, column)})" for run in level[:3]]
    if len(level) > 3:
        listed.append(f"{len(level) - 3} more")
    names = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    out += f", but it cannot be told from {names}"
    return out + rest


def run_badges(runs: Sequence[Run]) -> list[list[str]]:
    """[badge, why] of what makes numbers weaker than they look."""
    checks = {
        "SMOKE": ("few rows and rounds: nothing here is a result", _is_smoke),
        "ORACLE": ("the round was chosen by test rows", _is_oracle),
        "TRANSDUCTIVE": ("the method adapts to the test rows", _is_transductive),
        "ALLOW-SMALL": ("class statistics of few rows were uploaded", _allows_small),
        "CHANGED TREE": ("the code had changes that are in no commit", _has_uncommitted_changes),
    }
    out = []
    for badge, (reason, holds) in checks.items():
        count = sum(holds(run) for run in runs)
        if count:
            out.append([badge, reason if count == len(runs) else f"{reason} ({count} of {len(runs)} runs)"])
    return out


def _is_smoke(run: Run) -> bool:
    return bool(run["identity"]["smoke"])


def _is_oracle(run: Run) -> bool:
    return bool(run["identity"]["selection"] == "oracle")


def _is_transductive(run: Run) -> bool:
    method = make(**run["identity"]["method"])
    return contract.has_reference(method) and method.traits.training.reference == "target"


def _allows_small(run: Run) -> bool:
    return bool(run["identity"].get("allow_small", False))


def _has_uncommitted_changes(run: Run) -> bool:
    return bool(run["dirty"])


N_ANGLE_QUANTILES = 33  # quantiles of the angles by which maps turn
MAX_PROMPTS = 200  # local prompts that are drawn


def diagnostic_ranges(details: Details) -> dict[str, list[float]]:
    """What the method says of its clients' tensors: least, mean and most of each number."""
    values_by_key: dict[str, list[float]] = {}
    for trainings in details.values():
        for about in trainings.values():
            for diagnostics in about["maps"].values():
                for key, value in diagnostics.items():
                    values_by_key.setdefault(key, []).append(value)
    return {key: [min(values), fmean(values), max(values)] for key, values in values_by_key.items()}


def rotation_angles(record: Record) -> list[float]:
    """Quantiles, in degrees, of the angles by which the maps of the first training turn."""
    shared, local = record.outcome(record.manifest["trainings"][0])
    angles_by_client = []
    for local_tensors in local.values():
        tensors = {**shared, **local_tensors}
        if not any(key.startswith("skew") for key in tensors):
            return []
        turn = orthogonal.orthogonal(selected_skew(tensors)).double()
        angles_by_client.append(torch.linalg.eigvals(turn).angle().abs().rad2deg().flatten())
    if not angles_by_client:
        return []
    places = torch.linspace(0, 1, N_ANGLE_QUANTILES, dtype=torch.float64)
    return [round(angle, 3) for angle in torch.cat(angles_by_client).quantile(places).tolist()]


def mean_sentence_weights(record: Record) -> list[float]:
    """TOFA's weights of the sentences of a class, the mean over classes, largest first."""
    shared, _ = record.outcome(record.manifest["trainings"][0])
    sentence_weights = shared.get("weights")
    if sentence_weights is None or sentence_weights.ndim != 2 or sentence_weights.shape[1] < 2:
        return []
    ordered = sentence_weights.sort(dim=1, descending=True).values.mean(0)
    return [round(weight, 4) for weight in ordered.tolist()]


def prompt_positions(record: Record) -> dict[str, Any]:
    """The prompts that clients of the first training keep, on a plane; nothing if they are few."""
    shown_prompts = dict(list(local_prompts(record).items())[:MAX_PROMPTS])
    if len(shown_prompts) < MIN_PROMPTS:
        return {}
    places = tsne(np.stack([prompt.double().numpy() for prompt in shown_prompts.values()]))
    return {"clients": list(shown_prompts), "places": places.round(3).tolist()}


Floats = NDArray[np.float64]


def pool_by_group(details: Mapping[int, Mapping[str, Mapping[str, Any]]], classes: int) -> dict[str, Any]:
    """By who was tested, "clients" that trained or "unseen" ones; nothing where nobody was."""
    out = {}
    for kind, key in (("clients", "train"), ("unseen", "unseen")):
        scores = [
            about["scores"][id]
            for trainings in details.values()
            for about in trainings.values()
            for id in about[key]
            if "decision" in about["scores"].get(id, {})
        ]
        if scores:
            out[kind] = _pool_scores(scores, classes)
    return out


def _pool_scores(scores: Sequence[Mapping[str, Any]], classes: int) -> dict[str, Any]:
    bins: Floats = np.array([client_scores["reliability"] for client_scores in scores])  # (clients, bins, 3)
    rows = bins[:, :, 0].sum(0)
    sure, right = ((bins[:, :, 0] * bins[:, :, i]).sum(0) / rows.clip(1) for i in (1, 2))
    curves: Floats = np.array([client_scores["decision"] for client_scores in scores])
    weight = np.array([client_scores["test_rows"] for client_scores in scores], float)
    benefit = (weight[:, None] * curves[:, :, 1]).sum(0) / weight.sum()
    out: dict[str, Any] = {
        "rows": int(weight.sum()),
        "ECE": round(float((rows * abs(sure - right)).sum() / rows.sum()), 4),
        "reliability": np.stack([sure, right], axis=1)[rows > 0].round(4).tolist(),
        "bins": rows[rows > 0].astype(int).tolist(),
        "risk": _risk_coverage(rows, right),
        "decision": _curve_points(curves[0, :, 0], benefit),
    }
    if all("scores" in client_scores for client_scores in scores):
        counts: Floats = np.array([client_scores["scores"] for client_scores in scores], float).sum(0)
        out |= ranking_curves(counts)
        out["confusion"] = _confusion(scores, classes)
    return out


def _risk_coverage(rows: Floats, right: Floats) -> list[list[float]]:
    """Share of the rows that are answered, and of these the wrong ones, one bin after the other.

    The bins are those of the reliability diagram, the surest first.
    """
    nonempty = rows[::-1] > 0
    answered = rows[::-1][nonempty].cumsum()
    wrong = (rows * (1 - right))[::-1][nonempty].cumsum()
    return _curve_points(answered / answered[-1], wrong / answered)


def ranking_curves(counts: Floats) -> dict[str, Any]:
    """ROC and precision-recall of pairs of row and class, from counts of (own, others) by score.

    A step of the ROC curve within a bin is a straight line, as if its scores were ties.
    """
    true_counts, false_counts = (np.concatenate([[0.0], bin_counts[::-1].cumsum()]) for bin_counts in counts)
    hit, false = true_counts / true_counts[-1], false_counts / max(false_counts[-1], 1.0)
    area = float(((false[1:] - false[:-1]) * (hit[1:] + hit[:-1]) / 2).sum())
    nonempty = true_counts + false_counts > 0
    precision = true_counts[nonempty] / (true_counts + false_counts)[nonempty]
    return {
        "ROC": _curve_points(false, hit),
        "AUC": round(area, 4),
        "precision": _curve_points(hit[nonempty], precision),
    }


def _curve_points(x: Floats, y: Floats) -> list[list[float]]:
    """Points of a line, without those that repeat the one before."""
    out: list[list[float]] = []
    for point in np.stack([x, y], axis=1).round(4).tolist():
        if not out or point != out[-1]:
            out.append(point)
    return out


def _confusion(scores: Sequence[Mapping[str, Any]], classes: int) -> list[list[int]]:
    """[true, predicted, rows] where there are any."""
    total = np.zeros((classes, classes), np.int64)
    for client_scores in scores:
        for true, guess, rows in client_scores["confusion"]:
            total[true, guess] += rows
    return [[int(i), int(j), int(total[i, j])] for i, j in np.argwhere(total)]


OutlierHistory = dict[str, Any]
KEYS = ("norm", "alike", "cosine")  # what a round's line says of a client beside `far`


def outlier_history(lines: Sequence[Mapping[str, Any]]) -> list[OutlierHistory]:
    """By training: the rounds that were compared, and each client's numbers in them."""
    out: dict[str, OutlierHistory] = {}
    for line in lines:
        compared_clients = {id: client_line for id, client_line in line["clients"].items() if "far" in client_line}
        if not compared_clients:
            continue
        about = out.setdefault(line["training"], {"rounds": [], "clients": {}})
        for id, client_line in compared_clients.items():
            numbers = [round(float(client_line[key]), 2) if key in client_line else None for key in KEYS]
            rounds_of_client = about["clients"].setdefault(id, {})
            rounds_of_client[str(line["round"])] = [int(client_line["far"]), *numbers]
        about["rounds"].append(line["round"])
    return [{"training": name, **about} for name, about in out.items() if _any(about)]


def _any(about: OutlierHistory) -> bool:
    """A drawing in which nobody was ever far says nothing."""
    return any(numbers[0] for by_round in about["clients"].values() for numbers in by_round.values())
