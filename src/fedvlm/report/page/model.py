"""Build the model of a page: everything it shows of some runs, as plain numbers and texts."""

from collections.abc import Callable, Mapping, Sequence
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
from fedvlm.evaluate import protocols, statistics
from fedvlm.evaluate.metrics import METRICS, mean_and_std, unpack_correct
from fedvlm.evaluate.protocols import contract
from fedvlm.maths import orthogonal
from fedvlm.methods.fedot import selected_skew
from fedvlm.record import Record
from fedvlm.report.columns import compute_columns, usual_columns
from fedvlm.report.explain import MIN_PROMPTS, local_prompts, plane_positions
from fedvlm.report.paper_tables import compare_with_papers, verdict_sentence
from fedvlm.report.runs import (
    PAGE_FORMAT,
    Model,
    has_unseen_scores,
    pool_scores,
    read_trainings,
    round_curves,
    run_label,
    run_names,
)
from fedvlm.report.subgroups import subgroup_tables
from fedvlm.report.tables import MAIN_COLUMNS, format_cell, read_audit

CURVE_KEYS = ("accuracy", "unseen", "clients F1", "clients balanced", "loss", "cosine")
MANIFEST_KEYS = ["identity", "data", "encoder", "rows", "classes", "dim", "trainings", "clients", "counts"]
MANIFEST_KEYS += ("duplicates_dropped", "reproduces", "notes", "versions", "started", "commit", "dirty")
PAIRING_SETTINGS = ("clients", "seeds", "protocol", "target", "counts", "unseen", "smoke")
COLUMN_MEANINGS = {
    "G": "On domains that nobody trained on (G)",
    "P": "On the domains of the clients that trained (P)",
    "own": "On the clients' own test samples",
    "base": "On classes that were trained on",
    "source": "On the test samples of the data that were trained on",
    "clients accuracy": "On the clients that trained",
    "target accuracy": "On the unseen target",
}
# Runs that a federation is compared with, in the order of the page; all other methods are federated.
BASELINES = {"zero-shot": 0, "alone": 2, "fedot-all-local": 2, "pooled": 3}
FEDERATED = 1
N_ANGLE_QUANTILES = 33
MAX_PROMPTS = 200  # that are placed on a plane
OUTLIER_KEYS = ("norm", "alike", "cosine")  # what a round's line has of a client beside `far`

Run = Mapping[str, Any]
Trainings = Mapping[int, Mapping[str, Mapping[str, Any]]]  # seed -> training -> members and scores


def build_model(
    records: Sequence[Record],
    title: str = "",
    paper: Mapping[str, Mapping[str, float]] | None = None,
    command: str = "",
) -> Model:
    """Return what a page of these runs shows; `paper` has published numbers by row and column."""
    if not records:
        raise SettingsError("no run is named; give one or more run directories")
    trainings = [{seed: read_trainings(run, seed) for seed in run.manifest["identity"]["seeds"]} for run in records]
    runs = [_run_model(record, by_seed) for record, by_seed in zip(records, trainings, strict=True)]
    for run, name in zip(runs, run_names([run["identity"] for run in runs], unique=True), strict=True):
        run["name"] = name
    columns = dict.fromkeys(key for run in runs for table in run["tables"] for key in table)
    main = [key for key in columns if key in MAIN_COLUMNS] or list(columns)
    verdicts = compare_runs(runs, trainings, main)
    printed = compare_with_papers(runs)
    return {
        "format": PAGE_FORMAT,
        "title": title or " and ".join(dict.fromkeys(run["data"] for run in runs)),
        "started": min(run["started"] for run in runs),
        "command": command,
        "columns": main,
        "beside": list(dict.fromkeys(key for run in runs for key in run["beside"])),
        "verdicts": verdicts,
        "sentences": [*result_sentences(runs, verdicts), *verdict_sentence(printed)],
        "badges": run_badges(runs),
        "warnings": run_warnings(runs),
        "paper": {name: dict(numbers) for name, numbers in (paper or {}).items()},
        "published": printed,
        "runs": runs,
    }


def run_kind(run: Run) -> int:
    """Return the place of a run among zero-shot, federated, alone and pooled ones."""
    if run["identity"].get("centralised"):
        return BASELINES["pooled"]
    return BASELINES.get(run["identity"]["method"]["name"], FEDERATED)


def _run_model(record: Record, trainings: Trainings) -> dict[str, Any]:
    lines = record.lines()
    keys: Sequence[str] = CURVE_KEYS
    if not has_unseen_scores(record):  # nothing was learnt for a client that is unseen
        trainings = {
            seed: {name: {**outcome, "unseen": []} for name, outcome in by_name.items()}
            for seed, by_name in trainings.items()
        }
        keys = [key for key in CURVE_KEYS if key != "unseen"]
    rounds, moved = record.traffic
    channel = asdict(Channel())
    return {
        "label": run_label(record),
        "folder": record.folder.name,
        **{key: record.manifest.get(key) for key in MANIFEST_KEYS},
        "tables": record.tables,
        "traffic": [rounds, moved],
        "seconds": round(sum(line["seconds"] for line in lines), 2),
        "curves": round_curves(record, keys, 4),
        "cells": _cells(trainings),
        "members": {
            str(seed): {name: [outcome["train"], outcome["unseen"]] for name, outcome in by_name.items()}
            for seed, by_name in trainings.items()
        },
        "calibration": _pool_groups(trainings, len(record.manifest["classes"])),
        "diagnostics": diagnostic_ranges(trainings),
        "angles": rotation_angles(record),
        "weights": mean_sentence_weights(record),
        "prompts": prompt_positions(record),
        "tensors": _tensor_list(record),
        "epsilon": _max_epsilon(lines, trainings),
        "outlier_warnings": record.outlier_warnings,
        "outliers": outlier_history(lines),
        "audit": read_audit(record),
        "subgroups": subgroup_tables(record),
        "beside": mean_and_std(compute_columns(record, usual_columns(record))),
        "findings": mean_and_std(compute_columns(record, ["findings"])),
        "channel": {k: v for k, v in record.manifest["identity"]["channel"].items() if channel[k] != v},
    }


def _cells(trainings: Trainings) -> list[dict[str, Any]]:
    """Return the scores of every client's test samples in every training of every seed."""
    cells = []
    for seed, by_name in trainings.items():
        for training, outcome in by_name.items():
            for id, client in outcome["scores"].items():
                if not client["test_rows"] or id not in {*outcome["train"], *outcome["unseen"]}:
                    continue
                cell = {"seed": seed, "training": training, "client": id, "unseen": id in outcome["unseen"]}
                cell |= {"n_samples": client["test_rows"]}
                cell["accuracy"] = round(client["test_hits"] / client["test_rows"], 7)
                cell |= {key: round(client[key], 7) for key in METRICS[1:] if key in client}
                if "recall" in client:
                    cell["recall"] = [part if part is None else round(part, 4) for part in client["recall"]]
                cells.append(cell)
    return cells


def _pool_groups(trainings: Trainings, n_classes: int) -> dict[str, Any]:
    """Pool the test samples of the clients that trained and of the unseen ones, over trainings and seeds."""
    groups = {}
    for group, key in (("clients", "train"), ("unseen", "unseen")):
        outcomes = [outcome for by_name in trainings.values() for outcome in by_name.values()]
        scores = [outcome["scores"].get(id, {}) for outcome in outcomes for id in outcome[key]]
        scores = [client for client in scores if "decision" in client]
        if summary := pool_scores(scores):
            groups[group] = summary
            if all("confusion" in client for client in scores):
                summary["confusion"] = _sum_confusions(scores, n_classes)
    return groups


def _sum_confusions(scores: Sequence[Mapping[str, Any]], n_classes: int) -> list[list[int]]:
    """Return [true, predicted, samples] where there are any."""
    total = np.zeros((n_classes, n_classes), np.int64)
    for client in scores:
        for true, predicted, count in client["confusion"]:
            total[true, predicted] += count
    return [[int(i), int(j), int(total[i, j])] for i, j in np.argwhere(total)]


def _tensor_list(record: Record) -> list[dict[str, Any]]:
    """Describe the tensors that are shared and those that stay at a client."""
    shared, local = record.outcome(record.manifest["trainings"][0])
    return [
        {
            "name": key,
            "shape": list(value.shape),
            "type": str(value.dtype).removeprefix("torch."),
            "bytes": tensors.count_bytes({key: value}),
            "kind": kind,
        }
        for kind, group in (("shared", shared), ("local", next(iter(local.values()), {})))
        for key, value in group.items()
    ]


def _max_epsilon(lines: Sequence[Mapping[str, Any]], trainings: Trainings) -> float | None:
    """Return the most that any client has spent, by the channel's noise or by the method's own."""
    spent: list[float | None] = []
    for line in lines:
        epsilon = line.get("epsilon")
        spent += epsilon.values() if isinstance(epsilon, Mapping) else [epsilon]
    for by_name in trainings.values():
        for outcome in by_name.values():
            spent += [client.get("epsilon") for client in outcome["maps"].values()]
    return max((epsilon for epsilon in spent if epsilon is not None), default=None)


def compare_runs(runs: Sequence[Run], trainings: Sequence[Trainings], columns: Sequence[str]) -> dict[str, Any]:
    """Compare runs by column: with the best run but for pooled ones, and federated methods with each other.

    Only runs of the same samples, clients and seeds can be paired; others, and runs whose record does not say which
    samples are classified correctly, are left out.
    """
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        pairing = {key: run["identity"].get(key) for key in PAIRING_SETTINGS}
        groups.setdefault(dumps([run["rows"], pairing], sort_keys=True), []).append(place)
    group = max(groups.values(), key=len)
    verdicts: dict[str, Any] = {}
    for column in columns:
        correct = {place: _sample_scores(runs[place], trainings[place], column) for place in group}
        comparable = {str(place): samples for place, samples in correct.items() if samples}
        if len(comparable) < 2:
            continue
        pooled = [place for place in comparable if run_kind(runs[int(place)]) == BASELINES["pooled"]]
        verdict = _verdict(*statistics.compare_with_best(comparable, pooled))
        federated = [place for place in comparable if run_kind(runs[int(place)]) == FEDERATED]
        if federated:
            others = [place for place in comparable if place not in federated]
            verdict["federated"] = _verdict(*statistics.compare_with_best(comparable, others))
        verdicts[column] = verdict
    return verdicts


def _verdict(best: str, differences: Mapping[str, statistics.Difference]) -> dict[str, Any]:
    half_widths = [(interval.high - interval.low) / 2 for interval in differences.values()]
    order = sorted(differences, key=lambda place: -differences[place].mean)
    return {
        "best": int(best),
        "widths": [round(width, 5) for width in (min(half_widths), max(half_widths))],
        "differences": {
            place: [round(interval.mean, 5), round(interval.low, 5), round(interval.high, 5)]
            for place, interval in differences.items()
        },
        "similar": [int(place) for place in order if not differences[place].is_significant],
    }


def _sample_scores(run: Run, trainings: Trainings, column: str) -> list[statistics.Contributions]:
    """Return a column sample by sample, one entry per seed; nothing if the record cannot give it."""
    if run["tables"][0].get(column) is None:
        return []
    out = []
    for by_name in trainings.values():
        correct: dict[statistics.Cell, NDArray[np.float64]] = {}
        members: dict[str, tuple[list[str], list[str]]] = {}
        for training, outcome in by_name.items():
            tested = {id: client for id, client in outcome["scores"].items() if client["test_rows"]}
            if any("hits" not in client for client in tested.values()):
                return []
            for id, client in tested.items():
                is_correct = unpack_correct(client["hits"], client["test_rows"])
                correct[training, id] = statistics.sum_by_group(is_correct, client.get("groups"))
            train, unseen = ([id for id in outcome[key] if id in tested] for key in ("train", "unseen"))
            members[training] = (train, unseen)
        weights = protocols.make_protocol(run["identity"]["protocol"]).weights(members, True).get(column)
        if not weights or any(cell not in correct for cell in weights):
            return []
        out.append(statistics.weighted_correct(weights, correct))
    return out


def format_mean(run: Run, column: str) -> str:
    """Format the mean ± standard deviation over seeds, in per cent."""
    return format_cell(*mean_and_std(run["tables"]).get(column, (None, None)), "text")


def result_sentences(runs: Sequence[Run], verdicts: Mapping[str, Any]) -> list[str]:
    """State the result, a sentence per column that has a meaning of its own."""
    meant = [column for column in verdicts if column in COLUMN_MEANINGS or column.startswith(("own, ", "unseen, "))]
    if meant:
        return [_column_sentence(runs, column, verdicts[column]) for column in meant]
    column = next((key for key in runs[0]["tables"][0] if runs[0]["tables"][0][key] is not None), "")
    meaning = COLUMN_MEANINGS.get(column, f"In {column}")
    sentences = [f"{meaning}, {run['name']} reaches {format_mean(run, column)} %." for run in runs[:3]]
    if len(runs) > 1:
        sentences.append("No test of significance: no two runs share samples, clients and seeds.")
    return sentences


def _column_sentence(runs: Sequence[Run], column: str, verdict: Mapping[str, Any]) -> str:
    """State the best federated method, what does not differ from it, and the gaps to the baselines."""
    meaning = COLUMN_MEANINGS.get(column, f"In {column}")
    chosen = verdict.get("federated", verdict)
    best = runs[chosen["best"]]
    is_federated = "federated" in verdict
    places = map(int, chosen["differences"])
    rivals = [place for place in places if (run_kind(runs[place]) == FEDERATED) == is_federated]
    similar = [runs[place] for place in chosen["similar"] if place in rivals]
    worse = len(rivals) - len(similar)
    subject = "the best federated method is" if is_federated else "the highest accuracy is that of"
    out = f"{meaning}, {subject} {best['name']} ({format_mean(best, column)} %)"
    if similar:
        listed = [f"{run['name']} ({format_mean(run, column)})" for run in similar[:3]]
        listed += [f"{len(similar) - 3} more"] if len(similar) > 3 else []
        names = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
        out += f", not significantly different from {names}"
    if worse:
        others = "other" if similar else "federated method" if is_federated else "run"
        out += f"; {worse} {others}{'s are' if worse > 1 else ' is'} significantly worse"
    gaps = []
    for place, (gap, low, high) in chosen["differences"].items():
        if is_federated and run_kind(runs[int(place)]) != FEDERATED:
            significance = "" if low > 0 or high < 0 else " (not significant)"
            gaps.append(f"{runs[int(place)]['name']} {round(-100 * gap, 1) + 0.0:+.1f}{significance}")
    return f"{out}; gap in points to {', '.join(gaps)}." if gaps else f"{out}."


def run_badges(runs: Sequence[Run]) -> list[list[str]]:
    """Return [badge, reason] of what makes numbers weaker than they look."""

    def is_transductive(run: Run) -> bool:
        method = make(**run["identity"]["method"])
        return contract.has_reference(method) and method.traits.training.reference == "target"

    checks: dict[str, tuple[str, Callable[[Run], bool]]] = {
        "SMOKE": ("few samples and rounds: these numbers are no results", lambda run: run["identity"]["smoke"]),
        "ORACLE": ("the round was chosen on test samples", lambda run: run["identity"]["selection"] == "oracle"),
        "TRANSDUCTIVE": ("the method adapts to the test samples", is_transductive),
        "ALLOW-SMALL": (
            "class statistics of few samples were uploaded",
            lambda run: run["identity"].get("allow_small", False),
        ),
        "CHANGED TREE": ("the code had uncommitted changes", lambda run: run["dirty"]),
    }
    badges = []
    for badge, (reason, applies) in checks.items():
        count = sum(bool(applies(run)) for run in runs)
        if count:
            badges.append([badge, reason if count == len(runs) else f"{reason} ({count} of {len(runs)} runs)"])
    return badges


def run_warnings(runs: Sequence[Run]) -> list[str]:
    """Return the notes of the runs, each once and with the names of its runs."""
    names: dict[str, list[str]] = {}
    for run in runs:
        for note in dict.fromkeys(run["notes"] or ()):
            names.setdefault(note, []).append(run["name"])
    prefixes = {note: tuple(f"{name}:" for name in concerned) for note, concerned in names.items()}
    return [n if n.startswith(prefixes[n]) else f"{', '.join(concerned)}: {n}" for n, concerned in names.items()]


def diagnostic_ranges(trainings: Trainings) -> dict[str, list[float]]:
    """Return minimum, mean and maximum of each number that a method reports of its clients' tensors."""
    values_by_key: dict[str, list[float]] = {}
    for by_name in trainings.values():
        for outcome in by_name.values():
            for diagnostics in outcome["maps"].values():
                for key, value in diagnostics.items():
                    values_by_key.setdefault(key, []).append(value)
    return {key: [min(values), fmean(values), max(values)] for key, values in values_by_key.items()}


def rotation_angles(record: Record) -> list[float]:
    """Return quantiles, in degrees, of the angles by which the maps of the first training rotate."""
    shared, local = record.outcome(record.manifest["trainings"][0])
    angles_by_client = []
    for local_tensors in local.values():
        maps = {**shared, **local_tensors}
        if not any(key.startswith("skew") for key in maps):
            return []
        rotation = orthogonal.orthogonal(selected_skew(maps)).double()
        angles_by_client.append(torch.linalg.eigvals(rotation).angle().abs().rad2deg().flatten())
    if not angles_by_client:
        return []
    places = torch.linspace(0, 1, N_ANGLE_QUANTILES, dtype=torch.float64)
    return [round(angle, 3) for angle in torch.cat(angles_by_client).quantile(places).tolist()]


def mean_sentence_weights(record: Record) -> list[float]:
    """Return TOFA's weights of the sentences of a class, the mean over classes, largest first."""
    shared, _ = record.outcome(record.manifest["trainings"][0])
    weights = shared.get("weights")
    if weights is None or weights.ndim != 2 or weights.shape[1] < 2:
        return []
    return [round(weight, 4) for weight in weights.sort(dim=1, descending=True).values.mean(0).tolist()]


def prompt_positions(record: Record) -> dict[str, Any]:
    """Place the local prompts of the first training on a plane; nothing if they are few."""
    prompts = dict(list(local_prompts(record).items())[:MAX_PROMPTS])
    if len(prompts) < MIN_PROMPTS:
        return {}
    try:
        places = plane_positions(list(prompts.values()))
    except SettingsError:  # the map is an extra: without scikit-learn the page has none
        return {}
    return {"clients": list(prompts), "places": places.round(3).tolist()}


def outlier_history(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, by training in which a client was an outlier, the compared rounds and each client's numbers in them."""
    trainings: dict[str, dict[str, Any]] = {}
    for line in lines:
        compared = {id: client for id, client in line["clients"].items() if "far" in client}
        if not compared:
            continue
        history = trainings.setdefault(line["training"], {"rounds": [], "clients": {}})
        for id, client in compared.items():
            numbers = [round(float(client[key]), 2) if key in client else None for key in OUTLIER_KEYS]
            history["clients"].setdefault(id, {})[str(line["round"])] = [int(client["far"]), *numbers]
        history["rounds"].append(line["round"])
    return [
        {"training": name, **history}
        for name, history in trainings.items()
        if any(numbers[0] for by_round in history["clients"].values() for numbers in by_round.values())
    ]
