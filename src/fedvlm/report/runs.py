"""What a run is called in a table, and whether it says anything of unseen clients."""

import json
from collections.abc import Collection, Mapping
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fedvlm.errors import DataError, join_names
from fedvlm.evaluate.metrics import Table
from fedvlm.record import Record
from fedvlm.storage.files import CHECKSUM_KEY

UNSEEN_PREFIXES = ("target ", "unseen")  # how columns of unseen clients begin, beside G and global


def run_label(result: Record, without: Collection[str] = ()) -> str:
    """The method, with the settings in which it differs from its defaults, but for some."""
    settings = dict(result.manifest["identity"]["method"])
    name = settings.pop("name")
    defaults = result.manifest.get("usual") or _defaults(name, settings)
    if allows_small := result.manifest["identity"].get("allow_small", False):
        settings.pop("min_class_samples", None)
    shown_settings = {key: value for key, value in settings.items() if f"method.{key}" not in without}
    differences = [f"{key}={value}" for key, value in shown_settings.items() if defaults["method"][key] != value]
    differences += [key for key in ("descriptions", "texts") if result.manifest["identity"].get(key)]
    if tuned := result.manifest.get("tuned"):
        differences += _describe_tuning(tuned)
    if first := result.manifest["identity"].get("warm_start"):
        differences.append(f"warm start by {first['name']}")
    if result.manifest["identity"].get("centralised"):
        differences.append("centralised")
    elif defaults["centralised"]:
        differences.append("not federated")
    if defaults["reference"] == "target":
        differences = [description for description in differences if description != "reference=target"]
        differences.append("TRANSDUCTIVE: adapts to the test rows")
    default_channel = defaults["channel"]
    channel = result.manifest["identity"].get("channel", default_channel)
    differences += [f"channel.{key}={value}" for key, value in channel.items() if default_channel[key] != value]
    if attack := result.manifest["identity"].get("attack"):
        differences.append(f"ATTACK: {attack} by {result.manifest['identity']['attacker_fraction']:.0%}")
    chosen = result.manifest["identity"]["selection"]
    if chosen == "oracle":
        differences.append("ORACLE: best test round")
    elif chosen == "validation":
        differences.append("best validation round")
    if allows_small:
        differences.append("ALLOW-SMALL")
    if result.manifest["identity"]["smoke"]:
        differences.append("SMOKE")
    return f"{name} ({', '.join(differences)})" if differences else str(name)


def _defaults(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a record that does not say it; to ask the method takes seconds, for it takes torch."""
    from fedvlm.core import make
    from fedvlm.runner.manifest import default_values

    return default_values(make(name, **settings))


def _describe_tuning(tuned: Mapping[str, Any]) -> list[str]:
    """How often a race was run, and what it chose where seeds chose for themselves."""
    if "seeds" not in tuned:
        return [f"tuned on validation rows ({len(tuned['trials'])} trials)"]
    searches = list(tuned["seeds"].values())
    values = {name: join_names([f"{search['chosen'][name]:g}" for search in searches], 5) for name in tuned["asked"]}
    descriptions = [f"{name} by seed {listed}" for name, listed in values.items()]
    return [*descriptions, f"tuned on validation rows ({len(searches[0]['trials'])} trials a seed)"]


def has_unseen_scores(result: Record) -> bool:
    """Whether a run has numbers of unseen clients; a method that shares nothing has none."""
    table = result.tables[0]
    unseen_columns = [key for key in table if key in ("G", "global") or key.startswith(UNSEEN_PREFIXES)]
    return any(table[key] is not None for key in unseen_columns)


Model = dict[str, Any]
PAGE_FORMAT = "fedvlm report 2"
TABLE_FILE = "table.json"  # of an experiment's folder
UNCHECKED_FORMAT = "fedvlm report 1"  # pages that have no checksum


def model_json(model: Model) -> str:
    return json.dumps(model, ensure_ascii=True, separators=(",", ":"))


class PageRecord(Record):
    """A run as a page tells it: enough for a table."""

    def __init__(self, file: Path, run: Mapping[str, Any]) -> None:
        super().__init__(file)
        self.run = run
        self.manifest = dict(run)

    @property
    def tables(self) -> list[Table]:
        return list(self.run["tables"])

    @property
    def traffic(self) -> tuple[int, float]:
        exchanges, moved = self.run["traffic"]
        return exchanges, moved

    def trainings(self, seed: int | None = None) -> Mapping[str, dict[str, Any]]:
        chosen_seed = self.run["identity"]["seeds"][0] if seed is None else seed
        out: dict[str, dict[str, Any]] = {
            training: {"train": train, "unseen": unseen, "scores": {}}
            for training, (train, unseen) in self.run["who"][str(chosen_seed)].items()
        }
        for cell in self.run["cells"]:
            if cell["seed"] == chosen_seed:
                counts = {"test_rows": cell["rows"], "test_hits": cell["accuracy"] * cell["rows"]}
                out[cell["training"]]["scores"][cell["client"]] = {**cell, **counts}
        return out


class _ModelParser(HTMLParser):
    """The text of the element that holds the model."""

    text = ""
    is_inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.is_inside = tag == "script" and ("id", "fedvlm") in attrs

    def handle_endtag(self, tag: str) -> None:
        self.is_inside = False

    def handle_data(self, data: str) -> None:
        if self.is_inside:
            self.text += data


def read_page(path: Path) -> list[Record]:
    """The runs inside a page."""
    try:
        parser = _ModelParser()
        parser.feed(path.read_text("utf-8"))
        model = json.loads(parser.text or "{}")
        if model.get("format") not in (PAGE_FORMAT, UNCHECKED_FORMAT):
            raise ValueError("it has no runs inside")
        seal = model.pop(CHECKSUM_KEY, None)
        if seal != sha256(model_json(model).encode()).hexdigest() and model["format"] != UNCHECKED_FORMAT:
            raise ValueError("it is damaged, its checksum does not fit")
        return [PageRecord(path, run) for run in model["runs"]]
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path} is no page of `fedvlm report` ({error}); name a run directory, or such a page"
        ) from error


def runs_in(folder: Path) -> list[Path]:
    """The finished runs of an experiment's folder: those of its table first; none of another's."""
    if (folder / "manifest.json").exists():
        return []
    result_paths = sorted([*folder.glob("*/result.json"), *folder.glob("bars/*/result.json")])
    folders = [path.parent for path in result_paths]
    try:
        listed = json.loads((folder / TABLE_FILE).read_bytes())["runs"]
        first = [folder / path for path in listed]
    except (OSError, ValueError, KeyError, TypeError):
        first = []
    return sorted(folders, key=lambda path: first.index(path) if path in first else len(first))


def read_runs(path: Path) -> list[Record]:
    """The run of a directory, those of an experiment's, or those of a page."""
    if path.suffix in (".html", ".htm"):
        return read_page(path)
    return [Record(run_path) for run_path in runs_in(path)] or [Record(path)]
