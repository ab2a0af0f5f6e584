"""Read finished runs: their names, the settings in which they differ, and their scores by training and client."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm.errors import DataError, join_names, unknown_name
from fedvlm.evaluate.metrics import Table, area_under_curve, curve_points, mean_accuracy, mean_metric
from fedvlm.record import Record
from fedvlm.storage.files import CHECKSUM_KEY, flatten, slug

UNSEEN_PREFIXES = ("target ", "unseen")  # how columns of unseen clients begin, beside G and global
POOLED_CLIENT = "pooled"  # the client that trains on everyone's samples
PAGE_FORMAT = "fedvlm report 3"
TABLE_FILE = "table.json"  # of an experiment's folder
BASELINES_FOLDER = "baselines"  # of an experiment's or a run's folder

Model = dict[str, Any]
Floats = NDArray[np.float64]


def run_label(result: Record, without: Collection[str] = ()) -> str:
    """Name the method with all settings that differ from its defaults, `without` some, and its caveats."""
    identity = result.manifest["identity"]
    settings = dict(identity["method"])
    name = settings.pop("name")
    defaults = result.manifest.get("usual") or _defaults(name, settings)
    if allows_small := identity.get("allow_small", False):
        settings.pop("min_class_samples", None)
    shown = {key: value for key, value in settings.items() if f"method.{key}" not in without}
    details = [f"{key}={value}" for key, value in shown.items() if defaults["method"][key] != value]
    details += [key for key in ("descriptions", "texts") if identity.get(key)]
    if tuned := result.manifest.get("tuned"):
        details += _describe_tuning(tuned)
    if first := identity.get("warm_start"):
        details.append(f"warm start by {first['name']}")
    if identity.get("centralised"):
        details.append("centralised")
    elif defaults["centralised"]:
        details.append("not federated")
    if defaults["reference"] == "target":
        details = [detail for detail in details if detail != "reference=target"]
        details.append("TRANSDUCTIVE: adapts to the test samples")
    if identity.get("transductive"):
        details.append("TRANSDUCTIVE: learns from the test samples, without their labels")
    channel = identity.get("channel", defaults["channel"])
    details += [f"channel.{key}={value}" for key, value in channel.items() if defaults["channel"][key] != value]
    if attack := identity.get("attack"):
        details.append(f"ATTACK: {attack} by {identity['attacker_fraction']:.0%}")
    if identity["selection"] == "oracle":
        details.append("ORACLE: best test round")
    elif identity["selection"] == "validation":
        details.append("best validation round")
    details += ["ALLOW-SMALL"] if allows_small else []
    details += ["SMOKE"] if identity["smoke"] else []
    return _with_details(name, details)


def run_names(
    identities: Sequence[Mapping[str, Any]], without: Collection[str] = (), unique: bool = False
) -> list[str]:
    """Name the methods, with the settings that tell runs of one method apart, `without` some of them."""
    flat = [flatten(identity) for identity in identities]
    names = []
    for settings in flat:
        same = [other for other in flat if other["method.name"] == settings["method.name"]]
        keys = [key for key in differing_settings(same) if key not in without and key in settings]
        details = [f"{key.removeprefix('method.')}={settings[key]}" for key in keys]
        names.append(_with_details(settings["method.name"], details))
    if unique:
        return [f"{name} [{place}]" if names.count(name) > 1 else name for place, name in enumerate(names, 1)]
    return names


def identities_of(results: Sequence[Record]) -> list[Mapping[str, Any]]:
    return [result.manifest["identity"] for result in results]


def differing_settings(flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted names of settings in which runs differ; where the data lie does not count."""
    keys = dict.fromkeys(key for settings in flat for key in settings if not key.startswith("source."))
    return [key for key in keys if len({repr(settings.get(key)) for settings in flat}) > 1]


def _with_details(name: str, details: Sequence[str]) -> str:
    return f"{name} ({', '.join(details)})" if details else name


def _defaults(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the method for its defaults, for a record that lacks them; this imports torch, which takes seconds."""
    from fedvlm.core import make
    from fedvlm.runner.manifest import default_values

    return default_values(make(name, **settings))


def _describe_tuning(tuned: Mapping[str, Any]) -> list[str]:
    """Say how many candidates were tried, and what was chosen where each seed chose for itself."""
    if "seeds" not in tuned:
        return [f"tuned on validation samples ({len(tuned['trials'])} trials)"]
    searches = list(tuned["seeds"].values())
    values = {name: join_names([f"{search['chosen'][name]:g}" for search in searches], 5) for name in tuned["asked"]}
    descriptions = [f"{name} by seed {listed}" for name, listed in values.items()]
    return [*descriptions, f"tuned on validation samples ({len(searches[0]['trials'])} trials a seed)"]


def has_unseen_scores(result: Record) -> bool:
    """Whether a run has numbers of unseen clients; a method that shares nothing has none."""
    table = result.tables[0]
    columns = [key for key in table if key in ("G", "global") or key.startswith(UNSEEN_PREFIXES)]
    return any(table[key] is not None for key in columns)


def read_trainings(record: Record, seed: int) -> dict[str, dict[str, Any]]:
    """Return members and scores of the trainings of a seed, by name.

    A run on pooled samples trains one client without test samples: its members are the clients that a federated run
    trains.
    """
    trainings = {name: dict(outcome) for name, outcome in record.trainings(seed).items()}
    if any(outcome["train"] == [POOLED_CLIENT] for outcome in trainings.values()):
        for training in _federated_trainings(record, seed):
            trainings[training.name] |= {"train": list(training.train), "unseen": list(training.unseen)}
    return trainings


def _federated_trainings(record: Record, seed: int) -> list[Any]:
    from fedvlm.runner.prepare import trainings_of
    from fedvlm.runner.settings import build

    return trainings_of(build(record.manifest["identity"]), record.manifest["domains"], seed)


def find_training(record: Record, name: str | None = None, seed: int | None = None) -> dict[str, Any]:
    """Return members and scores of one training, the first if none is named."""
    trainings = read_trainings(record, record.manifest["identity"]["seeds"][0] if seed is None else seed)
    name = name or record.manifest["trainings"][0]
    if name not in trainings:
        raise unknown_name("training of this run", name, trainings)
    return trainings[name]


def round_curves(record: Record, keys: Sequence[str], digits: int = 12) -> list[dict[str, Any]]:
    """Return a curve per seed and training: values before each round and, as the last, the reported ones.

    Beside them stands what a client has moved so far, in kB.
    """
    by_training: dict[str, list[Mapping[str, Any]]] = {}
    for line in record.iter_lines():
        by_training.setdefault(line["training"], []).append(line)
    curves = []
    trainings = {seed: read_trainings(record, seed) for seed in record.manifest["identity"]["seeds"]}
    for seed in trainings:
        for training in record.manifest["trainings"]:
            lines = by_training.get(f"{seed}-{slug(training)}", [])
            if not lines:
                continue
            curve: dict[str, Any] = {"seed": seed, "training": training, "kB": _kilobytes(lines)}
            for key in keys:
                values = [_round_value(line, key) for line in lines]
                if any(value is not None for value in values):
                    values.append(_final_value(trainings[seed][training], key))
                    rounded = [value if digits is None or value is None else round(value, digits) for value in values]
                    curve[key] = rounded
            curves.append(curve)
    return curves


def _round_value(line: Mapping[str, Any], key: str) -> float | None:
    if key == "C":  # everyone counts the same, seen and unseen
        return mean_accuracy(line["clients"], line["clients"])
    value = line.get(key)
    return value if isinstance(value, float) else None


def _final_value(outcome: Mapping[str, Any], key: str) -> float | None:
    """Return the reported value of a curve; only accuracies and metrics are reported."""
    groups = {"accuracy": outcome["train"], "unseen": outcome["unseen"], "C": outcome["scores"]}
    if key in groups:
        return mean_accuracy(outcome["scores"], groups[key])
    group, _, name = key.partition(" ")
    members = {"clients": outcome["train"], "target": outcome["unseen"]}.get(group)
    return None if members is None else mean_metric(outcome["scores"], members, name)


def _kilobytes(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return what a client had moved before each round and in the end, the mean over those that train."""
    total, out = 0.0, [0.0]
    for line in lines:
        sizes = [client["bytes_up"] + client["bytes_down"] for client in line["clients"].values()]
        moved = [size for size in sizes if size]
        total += fmean(moved) / 1000 if moved else 0.0
        out.append(round(total, 2))
    return out


def pool_scores(clients: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Pool the test samples of clients; nothing if no client has probabilities."""
    scores = [client for client in clients if "decision" in client]
    if not scores:
        return {}
    bins: Floats = np.array([client["reliability"] for client in scores])  # (clients, bins, 3)
    counts = bins[:, :, 0].sum(0)
    confidence, correct = ((bins[:, :, 0] * bins[:, :, i]).sum(0) / counts.clip(1) for i in (1, 2))
    decisions: Floats = np.array([client["decision"] for client in scores])
    weight = np.array([client["test_rows"] for client in scores], float)
    benefit = (weight[:, None] * decisions[:, :, 1]).sum(0) / weight.sum()
    filled, confident = counts > 0, counts[::-1] > 0
    answered = counts[::-1][confident].cumsum()
    wrong = (counts * (1 - correct))[::-1][confident].cumsum()
    summary: dict[str, Any] = {
        "n_samples": int(weight.sum()),
        "ECE": round(float((counts * abs(confidence - correct)).sum() / counts.sum()), 4),
        "reliability": np.stack([confidence, correct], axis=1)[filled].round(4).tolist(),
        "bins": counts[filled].astype(int).tolist(),
        "risk": _distinct(np.stack([answered / answered[-1], wrong / answered], axis=1)),  # the most confident first
        "decision": _distinct(np.stack([decisions[0, :, 0], benefit], axis=1)),
    }
    if all("scores" in client for client in scores):
        pairs = np.array([client["scores"] for client in scores]).sum(0).tolist()
        for kind, area in (("ROC", "AUC"), ("PR", "AP")):
            if points := curve_points(pairs, kind):
                summary[kind] = _distinct(np.array(points))
                summary[area] = round(area_under_curve(points, kind), 4)
    return summary


def _distinct(points: Floats) -> list[list[float]]:
    """Return points of a line, without those that repeat the one before."""
    out: list[list[float]] = []
    for point in points.round(4).tolist():
        if not out or point != out[-1]:
            out.append(point)
    return out


class PageRecord(Record):
    """A run as a page holds it: enough for a table."""

    def __init__(self, file: Path, run: Mapping[str, Any]) -> None:
        super().__init__(file)
        self.run = run
        self.manifest = dict(run)

    @property
    def tables(self) -> list[Table]:
        return list(self.run["tables"])

    @property
    def traffic(self) -> tuple[int, float]:
        rounds, moved = self.run["traffic"]
        return rounds, moved

    def trainings(self, seed: int | None = None) -> Mapping[str, dict[str, Any]]:
        chosen_seed = self.run["identity"]["seeds"][0] if seed is None else seed
        out: dict[str, dict[str, Any]] = {
            training: {"train": train, "unseen": unseen, "scores": {}}
            for training, (train, unseen) in self.run["members"][str(chosen_seed)].items()
        }
        for cell in self.run["cells"]:
            if cell["seed"] == chosen_seed:
                counts = {"test_rows": cell["n_samples"], "test_hits": cell["accuracy"] * cell["n_samples"]}
                out[cell["training"]]["scores"][cell["client"]] = {**cell, **counts}
        return out


def model_json(model: Model) -> str:
    return json.dumps(model, ensure_ascii=True, separators=(",", ":"))


def read_page(path: Path) -> list[Record]:
    """Read the runs inside a page."""
    try:
        element = re.search(r'<script[^>]* id="fedvlm"[^>]*>([^<]*)</script>', path.read_text("utf-8"))
        model = json.loads(element[1] if element else "{}")
        if model.get("format") != PAGE_FORMAT:
            raise ValueError(f"it holds no runs in the format {PAGE_FORMAT!r}")
        if model.pop(CHECKSUM_KEY, None) != sha256(model_json(model).encode()).hexdigest():
            raise ValueError("it is damaged: its checksum does not match")
        return [PageRecord(path, run) for run in model["runs"]]
    except (OSError, ValueError, AttributeError) as error:
        remedy = "name a run directory, or such a page"
        raise DataError(f"{path} is no page of `fedvlm report` ({error}); {remedy}") from error


def runs_in(folder: Path) -> list[Path]:
    """Return the finished runs of an experiment's folder, those of its table first; none if it is a run itself."""
    if (folder / "manifest.json").exists():
        return []
    results = sorted([*folder.glob("*/result.json"), *folder.glob(f"{BASELINES_FOLDER}/*/result.json")])
    listed = listed_runs(folder)
    folders = [path.parent for path in results]
    return sorted(folders, key=lambda path: listed.index(path) if path in listed else len(listed))


def listed_runs(folder: Path) -> list[Path]:
    """Return the runs of a folder's table that are still there."""
    try:
        paths = [folder / path for path in json.loads((folder / TABLE_FILE).read_bytes())["runs"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [path for path in paths if (path / "result.json").exists()]


def read_runs(path: Path) -> list[Record]:
    """Read the run of a directory, those of an experiment's, or those of a page."""
    if path.suffix in (".html", ".htm"):
        return read_page(path)
    return [Record(run_path) for run_path in runs_in(path)] or [finished(Record(path))]


def read_compared_runs(path: Path) -> list[Record]:
    """Read what a page of a folder shows: a run is shown with those that its table compares it with."""
    if (path / "manifest.json").exists() and (listed := listed_runs(path)):
        return [Record(run_path) for run_path in listed]
    return read_runs(path)


def finished(record: Record) -> Record:
    """Return the record of a finished run; an unfinished one is refused with the command that resumes it."""
    if (record.folder / "manifest.json").exists() and not (record.folder / "result.json").exists():
        raise DataError(f"the run in {record.folder} is not finished; `fedvlm resume {record.folder}` continues it")
    return record
