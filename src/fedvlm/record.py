"""What a run leaves on disk: a manifest, one line per round, checksummed tensors, a result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from fedvlm.errors import DataError, SettingsError, listing
from fedvlm.evaluate.far import named
from fedvlm.evaluate.scores import Table
from fedvlm.storage.files import alone, appending, disk, slug, write
from fedvlm.storage.sealed import (
    INDEX,
    Damaged,
    read_json,
    read_tensors,
    seal_json,
    unseal_json,
    write_index,
    write_json,
)

if TYPE_CHECKING:  # most of a record is read without torch
    from torch import Tensor

    from fedvlm.tensors import Tensors

FORMAT = 2  # of what a run leaves on disk; another number is not read
SLOPE = "slope left"  # what a method calls the slope at which a convex fit of its ended
SETTLED = 1e-5  # a larger one is told; below it scikit-learn predicts the same: auto.md
PLACES = "places"  # where the file beside has whose local tensors, if they are many
DESCRIPTIONS = "descriptions.safetensors"  # the file of a run that has some
AUDIT = "audit.json"  # likewise
AWAY = "away"  # folders of trainings that a cluster is at
# of a run's folder; a page, a table and bars may lie there too, and are written anew
OWN = ("manifest.json", "result.json", "rounds.jsonl", "trainings", DESCRIPTIONS, AUDIT)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a run's directory says of it, if it is written as this fedvlm reads it."""
    found = dict(read_json(folder / "manifest.json"))
    if found.get("format") != FORMAT:
        wrote = found.get("versions", {}).get("fedvlm", "an earlier one")
        raise DataError(
            f"{folder} is a record of format {found.get('format', 'none')}, and this fedvlm reads "
            f"format {FORMAT}; read it with the fedvlm that wrote it ({wrote}), or run again into "
            "another directory"
        )
    return found


def differences(
    there: Mapping[str, Any], here: Mapping[str, Any], within: str = ""
) -> list[tuple[str, str, str]]:
    """Every setting in which two runs differ: its name as it is written, and both values."""
    out = []
    for key in {**there, **here}:
        name = key if within in ("", "identity") else f"{within}.{key}"
        one, other = there.get(key), here.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            out += differences(one, other, name)
        elif one != other:
            both = [repr(v[key]) if key in v else "not set" for v in (there, here)]
            out.append((name, both[0], both[1]))
    return out


class Record:
    """One run's directory."""

    def __init__(self, folder: Path, listen: Callable[[str, Any], None] | None = None) -> None:
        self.folder = folder
        self.listen = listen  # is told of every line that is written

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Starts the record, or goes on with one of the same identity and the same rows."""
        path = self.folder / "manifest.json"
        if path.exists():
            self.compare({key: manifest[key] for key in ("identity", "encoder", "rows")})
        else:
            write_json(path, {"format": FORMAT, **manifest})

    def compare(self, wanted: Mapping[str, Any]) -> None:
        """Refuses to go on with the record of another run."""
        found = read_manifest(self.folder)
        both = ({key: found.get(key) for key in wanted}, json.loads(json.dumps(wanted)))
        if apart := differences(*both):
            lines = [f"  {name}: there {there}, here {here}" for name, there, here in apart]
            raise SettingsError(
                f"{self.folder} holds another run, which differs in\n"
                + "\n".join(lines)
                + "\nchoose another directory, or delete that one"
            )

    def clear(self) -> None:
        """Forgets all but the manifest, so that the run is run again."""
        ends = (self.folder / "result.json", self.folder / INDEX, self.folder / AUDIT)
        for path in (*(self.folder / "trainings").glob("*"), *ends):
            path.unlink(missing_ok=True)
        self.lines_path.unlink(missing_ok=True)
        rmtree(self.folder / AWAY, ignore_errors=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time works in a run directory; the lock goes with the process."""
        manifest, lock = self.folder / "manifest.json", self.folder / ".lock"
        with disk(self.folder):
            new = self._make()
            others = [path.name for path in self.folder.iterdir() if path.name[0] != "."]
            if others and not manifest.exists():
                raise SettingsError(
                    f"{self.folder} is no run directory and holds {sorted(others)[0]}; "
                    "choose a new or an empty directory"
                )
        try:
            with alone(lock, f"another process is working in {self.folder}; wait for it"):
                self._tidy()
                yield
        finally:
            if new and not manifest.exists():  # refused before anything was written
                lock.unlink(missing_ok=True)
                self.folder.rmdir()

    def _make(self) -> bool:
        """Whether the folder is new: of two that come at once it is for one, who may remove it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.folder.mkdir()
        except FileExistsError:
            if not self.folder.is_dir():
                raise
            return False
        return True

    def _tidy(self) -> None:
        for folder in (self.folder, self.folder / "trainings"):
            for left in folder.glob(".*"):  # drafts of a process that was killed
                if left.suffix[1:].isdigit():
                    left.unlink()
        if self.lines_path.exists():
            whole, _, torn = self.lines_path.read_bytes().rpartition(b"\n")
            if torn:  # by a kill; the next line must not be written behind it
                write(self.lines_path, whole + b"\n" if whole else b"")

    @property
    def lines_path(self) -> Path:
        return self.folder / "rounds.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines; a line torn by a kill is left out."""
        return list(self.each_line())

    def each_line(self) -> Iterator[dict[str, Any]]:
        """The same one by one: those of many clients are long."""
        if not self.lines_path.exists():
            return
        with self.lines_path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    return
                try:
                    yield unseal_json(text, None)
                except Damaged as error:
                    raise DataError(
                        f"line {number} of {self.lines_path} is damaged: {error}; run again, into "
                        "another directory"
                    ) from error

    def keep_lines(self, training: str, rounds: int) -> None:
        """Forgets lines of a training that its checkpoint does not know: they will come again."""

        def known(line: Mapping[str, Any]) -> bool:
            return bool(line["training"] != training or line["round"] < rounds)

        if not self.lines_path.exists() or not all(map(known, self.each_line())):
            self._write_lines(list(filter(known, self.each_line())))

    def sort_lines(self, trainings: Sequence[str]) -> None:
        """In the order of the trainings, whichever of them were side by side."""
        place = {name: number for number, name in enumerate(trainings)}
        order = [place[line["training"]] for line in self.each_line()]
        if order != sorted(order):
            self._write_lines(sorted(self.lines(), key=lambda line: place[line["training"]]))

    def _write_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        write(self.lines_path, b"".join(seal_json(line, None) for line in lines))

    def add_line(self, line: Mapping[str, Any]) -> None:
        with appending(self.lines_path) as file:
            file.write(seal_json(line, None))
        if self.listen is not None:
            self.listen(self.folder.name, line)

    def result(self) -> Any | None:
        path = self.folder / "result.json"
        return read_json(path) if path.exists() else None

    def finish(self, tables: Sequence[Table]) -> None:
        """Writes the result, and the index that `fedvlm verify` goes by."""
        write_json(self.folder / "result.json", {"tables": tables})
        write_index(self.folder, OWN)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.folder)

    @cached_property
    def descriptions(self) -> Tensor | None:
        """(classes, texts, dim) of the sentences that all clients had, if there were any."""
        path = self.folder / DESCRIPTIONS
        return read_tensors(path)[0]["common"] if path.exists() else None

    @cached_property
    def tables(self) -> list[Table]:
        """One table per seed, in the order of the seeds."""
        return list(read_json(self.folder / "result.json")["tables"])

    @property
    def traffic(self) -> tuple[int, float]:
        """Exchanges of a client with the server, and the bytes both ways over all of them.

        The most of any client, and the mean over clients and trainings. A round's download is what
        it starts from, so the last download stands for the first, which everyone has by `init`.
        """
        moved: dict[tuple[str, str], list[int]] = {}
        for line in self.each_line():
            for id, one in line["clients"].items():
                if size := one["bytes_up"] + one["bytes_down"]:
                    moved.setdefault((line["training"], id), []).append(size)
        totals = [sum(sizes) for sizes in moved.values()]
        most = max(map(len, moved.values()), default=0)
        return most, sum(totals) / len(totals) if totals else 0.0

    @property
    def far(self) -> list[str]:
        """Which clients were far from the rest in most of their rounds, in words."""
        return named(self.each_line())

    @property
    def unsettled(self) -> list[str]:
        """Which clients' convex fits were not at their end after all steps, in words."""
        left: dict[str, float] = {}
        for seed in self.manifest["identity"]["seeds"]:
            for one in self.trainings(seed).values():
                for id, described in one.get("maps", {}).items():
                    if (slope := described.get(SLOPE, 0.0)) > SETTLED:
                        left[id] = max(slope, left.get(id, 0.0))
        if not left:
            return []
        most = max(left.values())
        return [f"not converged at {listing(sorted(left), 8)} (largest slope left {most:.0e})"]

    def trainings(self, seed: int | None = None) -> Mapping[str, dict[str, Any]]:
        """Scores and map diagnostics of every training of one seed (the first one if none)."""
        return {
            training: dict(read_json(self.path_of(training, seed, "json")))
            for training in self.manifest["trainings"]
        }

    def outcome(
        self, training: str, seed: int | None = None
    ) -> tuple[Tensors, Mapping[str, Tensors]]:
        """What a training ended with: the shared tensors, and the local ones of each client."""
        path = self.path_of(training, seed, "safetensors")
        tensors, about = read_tensors(path)
        groups: dict[str, Tensors] = {"shared": {}, "fresh": {}}
        local: dict[str, Tensors] = {id: {} for id in about["train"]}
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if kind in groups:
                groups[kind][rest] = value
            elif kind == "local":
                number, _, key = rest.partition("/")
                local[about["train"][int(number)]][key] = value
        if PLACES not in tensors:
            return groups["shared"], local
        from fedvlm.storage.shelf import Saved

        many = path.with_suffix(".clients")
        return groups["shared"], Saved(many, about["train"], groups["fresh"], tensors[PLACES])

    def local(self, training: str | None = None, seed: int | None = None) -> Mapping[str, Tensors]:
        """What each client that trained in a training (the first one if none) keeps at home."""
        return self.outcome(training or self.manifest["trainings"][0], seed)[1]

    def path_of(self, training: str, seed: int | None, ending: str) -> Path:
        seeds: Sequence[int] = self.manifest["identity"]["seeds"]
        if seed is not None and seed not in seeds:
            raise SettingsError(f"the run has no seed {seed}; it has {list(seeds)}")
        return (
            self.folder
            / "trainings"
            / f"{seeds[0] if seed is None else seed}-{slug(training)}.{ending}"
        )
