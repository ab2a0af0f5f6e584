"""The runs of a folder, or of a page read back."""

import json
from collections.abc import Mapping
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fedvlm.errors import DataError
from fedvlm.evaluate.scores import Table
from fedvlm.record import Record
from fedvlm.report.folder import runs_in
from fedvlm.storage.sealed import SEAL

Model = dict[str, Any]
FORMAT = "fedvlm report 2"
BEFORE = "fedvlm report 1"  # pages that have no checksum


def as_text(model: Model) -> str:
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
        wanted = self.run["identity"]["seeds"][0] if seed is None else seed
        out: dict[str, dict[str, Any]] = {
            training: {"train": train, "unseen": unseen, "scores": {}}
            for training, (train, unseen) in self.run["who"][str(wanted)].items()
        }
        for one in self.run["cells"]:
            if one["seed"] == wanted:
                hits = {"test_rows": one["rows"], "test_hits": one["accuracy"] * one["rows"]}
                out[one["training"]]["scores"][one["client"]] = {**one, **hits}
        return out


class _Data(HTMLParser):
    """The text of the element that holds the model."""

    found = ""
    inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag == "script" and ("id", "fedvlm") in attrs

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found += data


def read_page(path: Path) -> list[Record]:
    """The runs inside a page."""
    try:
        parser = _Data()
        parser.feed(path.read_text("utf-8"))
        model = json.loads(parser.found or "{}")
        if model.get("format") not in (FORMAT, BEFORE):
            raise ValueError("it has no runs inside")
        seal = model.pop(SEAL, None)
        if seal != sha256(as_text(model).encode()).hexdigest() and model["format"] != BEFORE:
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
    return [Record(one) for one in runs_in(path)] or [Record(path)]
