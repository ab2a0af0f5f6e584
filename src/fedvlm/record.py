"""Read and write the directory of a run: manifest, one line per round, checksummed tensors, result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from fedvlm.errors import DataError, SettingsError, join_names
from fedvlm.evaluate.metrics import Table, describe_outliers
from fedvlm.storage import files

if TYPE_CHECKING:  # most of a record is read without torch
    from torch import Tensor

    from fedvlm.tensors import Tensors

RECORD_FORMAT = 2  # of what a run leaves on disk; another number is not read
GRADIENT_NORM_KEY = "remaining gradient"  # of a convex fit, as methods report it in `describe`
MAX_CONVERGED_GRADIENT = 1e-5  # a larger one is told; below it scikit-learn predicts the same: auto.md
PLACES_KEY = "places"  # where the file beside has whose local tensors, if they are many
DESCRIPTIONS_FILE = "descriptions.safetensors"  # the file of a run that has some
AUDIT_FILE = "audit.json"  # likewise
CLUSTER_FOLDER = "away"  # folders of trainings that a cluster is at
# of a run's folder; a page, a table and bars may lie there too, and are written anew
RECORD_FILES = ("manifest.json", "result.json", "rounds.jsonl", "trainings", DESCRIPTIONS_FILE, AUDIT_FILE)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run; another format is refused."""
    manifest = dict(files.read_json(folder / "manifest.json"))
    if manifest.get("format") != RECORD_FORMAT:
        wrote = manifest.get("versions", {}).get("fedvlm", "an earlier one")
        raise DataError(
            f"{folder} is a record of format {manifest.get('format', 'none')}, and this fedvlm reads "
            f"format {RECORD_FORMAT}; read it with the fedvlm that wrote it ({wrote}), or run again into "
            "another directory"
        )
    return manifest


def differences(
    recorded: Mapping[str, Any], requested: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, str, str]]:
    """Return name and both values of every setting in which two runs differ."""
    out = []
    for key in {**recorded, **requested}:
        name = key if prefix in ("", "identity") else f"{prefix}.{key}"
        recorded_value, requested_value = recorded.get(key), requested.get(key)
        if isinstance(recorded_value, dict) and isinstance(requested_value, dict):
            out += differences(recorded_value, requested_value, name)
        elif recorded_value != requested_value:
            texts = [repr(v[key]) if key in v else "not set" for v in (recorded, requested)]
            out.append((name, texts[0], texts[1]))
    return out


class Record:
    """The directory of one run."""

    def __init__(self, folder: str | Path, on_line: Callable[[str, Any], None] | None = None) -> None:
        self.folder = Path(folder)
        self.on_line = on_line  # is told of every line that is written

    def start(self, manifest: Mapping[str, Any]) -> None:
        """Start the record, or continue one of the same settings and samples."""
        path = self.folder / "manifest.json"
        if path.exists():
            self.compare({key: manifest[key] for key in ("identity", "encoder", "rows")})
        else:
            files.write_json(path, {"format": RECORD_FORMAT, **manifest})

    def compare(self, requested: Mapping[str, Any]) -> None:
        """Refuse to continue the record of another run."""
        manifest = read_manifest(self.folder)
        compared_pair = ({key: manifest.get(key) for key in requested}, json.loads(json.dumps(requested)))
        if mismatches := differences(*compared_pair):
            lines = [f"  {name}: there {there}, here {here}" for name, there, here in mismatches]
            differing = "\n".join(lines)
            where = f"{self.folder} holds another run, which differs in\n{differing}"
            raise SettingsError(f"{where}\nchoose another directory, or delete that one")

    def clear(self) -> None:
        """Delete everything but the manifest, so that the run starts again."""
        ends = (self.folder / "result.json", self.folder / files.INDEX_FILE, self.folder / AUDIT_FILE)
        for path in (*(self.folder / "trainings").glob("*"), *ends):
            path.unlink(missing_ok=True)
        self.lines_path.unlink(missing_ok=True)
        rmtree(self.folder / CLUSTER_FOLDER, ignore_errors=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the directory for this process; the lock ends with the process."""
        manifest, lock = self.folder / "manifest.json", self.folder / ".lock"
        with files.explain_os_errors(self.folder):
            new = self._create_folder()
            other_files = [path.name for path in self.folder.iterdir() if path.name[0] != "."]
            if other_files and not manifest.exists():
                first = sorted(other_files)[0]
                raise SettingsError(f"{self.folder} is not a run directory: it holds {first}; choose a new one")
        try:
            with files.exclusive_lock(lock, f"another process is working in {self.folder}; wait for it"):
                self._remove_leftovers()
                yield
        finally:
            if new and not manifest.exists():  # refused before anything was written
                lock.unlink(missing_ok=True)
                self.folder.rmdir()

    def _create_folder(self) -> bool:
        """Create the folder; return whether this process did, which may then remove it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.folder.mkdir()
        except FileExistsError:
            if not self.folder.is_dir():
                raise
            return False
        return True

    def _remove_leftovers(self) -> None:
        for folder in (self.folder, self.folder / "trainings"):
            for leftover in folder.glob(".*"):  # drafts of a process that was killed
                if leftover.suffix[1:].isdigit():
                    leftover.unlink()
        if self.lines_path.exists():
            complete, _, torn = self.lines_path.read_bytes().rpartition(b"\n")
            if torn:  # by a kill; the next line must not be written behind it
                files.write_file(self.lines_path, complete + b"\n" if complete else b"")

    @property
    def lines_path(self) -> Path:
        return self.folder / "rounds.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        """Return the complete lines; one that a kill has cut is left out."""
        return list(self.iter_lines())

    def iter_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines one by one, because those of many clients are long."""
        if not self.lines_path.exists():
            return
        with self.lines_path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    return
                try:
                    yield files.decode_json(text, None)
                except files.DamagedError as error:
                    raise DataError(f"line {number} of {self.lines_path} is damaged: {error}; run again") from error

    def drop_lines_after(self, training: str, rounds: int) -> None:
        """Drop lines of a training after its checkpoint; they will be written again."""

        def is_known(line: Mapping[str, Any]) -> bool:
            return bool(line["training"] != training or line["round"] < rounds)

        if not self.lines_path.exists() or not all(map(is_known, self.iter_lines())):
            self._write_lines(list(filter(is_known, self.iter_lines())))

    def sort_lines(self, trainings: Sequence[str]) -> None:
        """Sort the lines by training, after trainings that ran in parallel."""
        place = {name: number for number, name in enumerate(trainings)}
        order = [place[line["training"]] for line in self.iter_lines()]
        if order != sorted(order):
            self._write_lines(sorted(self.lines(), key=lambda line: place[line["training"]]))

    def _write_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        files.write_file(self.lines_path, b"".join(files.encode_json(line, None) for line in lines))

    def add_line(self, line: Mapping[str, Any]) -> None:
        with files.open_for_append(self.lines_path) as file:
            file.write(files.encode_json(line, None))
        if self.on_line is not None:
            self.on_line(self.folder.name, line)

    def result(self) -> Any | None:
        path = self.folder / "result.json"
        return files.read_json(path) if path.exists() else None

    def finish(self, tables: Sequence[Table]) -> None:
        """Write the result and the index for `fedvlm verify`."""
        files.write_json(self.folder / "result.json", {"tables": tables})
        files.write_index(self.folder, RECORD_FILES)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.folder)

    @cached_property
    def descriptions(self) -> Tensor | None:
        """Class descriptions (classes, texts, dim) that all clients share, if there are any."""
        path = self.folder / DESCRIPTIONS_FILE
        return files.read_tensors(path)[0]["common"] if path.exists() else None

    @cached_property
    def tables(self) -> list[Table]:
        """Tables, one per seed in the order of the seeds."""
        return list(files.read_json(self.folder / "result.json")["tables"])

    @property
    def traffic(self) -> tuple[int, float]:
        """Communication rounds of a client, and its bytes both ways over all of them.

        The most of any client, and the mean over clients and trainings. A round's download is what
        it starts from, so the last download stands for the first, which everyone has by `init`.
        """
        moved: dict[tuple[str, str], list[int]] = {}
        for line in self.iter_lines():
            for id, client_line in line["clients"].items():
                if size := client_line["bytes_up"] + client_line["bytes_down"]:
                    moved.setdefault((line["training"], id), []).append(size)
        totals = [sum(sizes) for sizes in moved.values()]
        n_rounds = max(map(len, moved.values()), default=0)
        return n_rounds, sum(totals) / len(totals) if totals else 0.0

    @property
    def outlier_warnings(self) -> list[str]:
        """Warnings about clients that were outliers in most of their rounds."""
        return describe_outliers(self.iter_lines())

    @property
    def convergence_warnings(self) -> list[str]:
        """Warnings about clients whose convex fits did not converge."""
        gradient_norms: dict[str, float] = {}
        for seed in self.manifest["identity"]["seeds"]:
            for training in self.trainings(seed).values():
                for id, described in training.get("maps", {}).items():
                    if (gradient_norm := described.get(GRADIENT_NORM_KEY, 0.0)) > MAX_CONVERGED_GRADIENT:
                        gradient_norms[id] = max(gradient_norm, gradient_norms.get(id, 0.0))
        if not gradient_norms:
            return []
        largest = max(gradient_norms.values())
        return [f"not converged at {join_names(sorted(gradient_norms), 8)} (largest remaining gradient {largest:.0e})"]

    def trainings(self, seed: int | None = None) -> Mapping[str, dict[str, Any]]:
        """Return scores and diagnostics of every training of a seed, the first if none is named."""
        names = self.manifest["trainings"]
        return {training: dict(files.read_json(self.path_of(training, seed, "json"))) for training in names}

    def outcome(self, training: str, seed: int | None = None) -> tuple[Tensors, Mapping[str, Tensors]]:
        """Return the final shared tensors of a training, and the local ones of each client."""
        path = self.path_of(training, seed, "safetensors")
        tensors, about = files.read_tensors(path)
        groups: dict[str, Tensors] = {"shared": {}, "fresh": {}}
        local: dict[str, Tensors] = {id: {} for id in about["train"]}
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if kind in groups:
                groups[kind][rest] = value
            elif kind == "local":
                number, _, key = rest.partition("/")
                local[about["train"][int(number)]][key] = value
        if PLACES_KEY not in tensors:
            return groups["shared"], local
        from fedvlm.storage.large_tensors import SavedClientStates

        clients_path = path.with_suffix(".clients")
        return groups["shared"], SavedClientStates(clients_path, about["train"], groups["fresh"], tensors[PLACES_KEY])

    def local(self, training: str | None = None, seed: int | None = None) -> Mapping[str, Tensors]:
        """Return the local tensors of each client that trained, in the first training if none is named."""
        return self.outcome(training or self.manifest["trainings"][0], seed)[1]

    def path_of(self, training: str, seed: int | None, ending: str) -> Path:
        seeds: Sequence[int] = self.manifest["identity"]["seeds"]
        if seed is not None and seed not in seeds:
            raise SettingsError(f"the run has no seed {seed}; it has {list(seeds)}")
        return self.folder / "trainings" / f"{seeds[0] if seed is None else seed}-{files.slug(training)}.{ending}"
