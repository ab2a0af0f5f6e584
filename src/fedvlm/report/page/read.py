"""The runs of a folder, or of a page read back."""

import json
from collections.abc import Mapping
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fedvlm.errors import DataError
from fedvlm.evaluate.metrics import Table
from fedvlm.record import Record
from fedvlm.report.folder import runs_in
from fedvlm.storage.sealed import CHECKSUM_KEY

Model = dict[str, Any]
PAGE_FORMAT = "fedvlm report 2"
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


def read_runs(path: Path) -> list[Record]:
    """The run of a directory, those of an experiment's, or those of a page."""
    if path.suffix in (".html", ".htm"):
        return read_page(path)
    return [Record(run_path) for run_path in runs_in(path)] or [Record(path)]
