"""What a run leaves on disk: a manifest, one line per round, checksummed tensors, a result."""

import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

import fedvlm
from fedvlm.channel.wire import Damaged, opened, seal
from fedvlm.core import Tensors
from fedvlm.engines.rounds import State
from fedvlm.errors import DataError, SettingsError
from fedvlm.files import alone, disk, write


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DataError(f"there is no {path}; is {path.parent} a run directory?") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is damaged ({error}); delete it, or the run, and run again"
        ) from error


def write_tensors(path: Path, tensors: Tensors, about: Mapping[str, Any]) -> None:
    write(path, seal(tensors, about))


def read_tensors(path: Path) -> tuple[Tensors, Any]:
    """The tensors and what was said about them; a single flipped bit is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            note = (file.metadata() or {})["fedvlm"]
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DataError(f"there is no {path}") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a whole safetensors file ({error}); delete it") from error
    try:
        return tensors, opened(note, tensors)
    except Damaged as error:
        raise DataError(f"{path} is damaged: {error}; delete it and resume") from error


def pack(state: State) -> tuple[Tensors, dict[str, Any]]:
    """A state as flat tensors, with the names of clients and tensors kept apart."""
    groups = {
        "shared": {"": state.shared},
        "local": state.local,
        "best_shared": {"": state.best_shared or {}},
        "best_local": state.best_local or {},
        "channel": state.channel,
    }
    flat: Tensors = {}
    index: dict[str, list[tuple[str, str]]] = {}
    for group, by_id in groups.items():
        index[group] = [(id, key) for id, one in by_id.items() for key in one]
        for number, (id, key) in enumerate(index[group]):
            flat[f"{group}/{number}"] = by_id[id][key]
    about = {
        "round": state.round,
        "best": state.best,
        "best_round": state.best_round,
        "chosen": state.best_shared is not None,
        "ids": {key: list(groups[key]) for key in ("local", "best_local", "channel")},
        "index": index,
    }
    return flat, about


def unpack(flat: Tensors, about: Mapping[str, Any]) -> State:
    def group(name: str) -> dict[str, Tensors]:
        out: dict[str, Tensors] = {id: {} for id in about["ids"].get(name, [""])}
        for number, (id, key) in enumerate(about["index"][name]):
            out[id][key] = flat[f"{name}/{number}"]
        return out

    chosen = about["chosen"]
    return State(
        about["round"],
        group("shared")[""],
        group("local"),
        about["best"],
        about["best_round"],
        group("best_shared")[""] if chosen else None,
        group("best_local") if chosen else None,
        group("channel"),
    )


class Record:
    """One run's directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Starts the record, or goes on with one of the same identity and the same rows."""
        path = self.folder / "manifest.json"
        if path.exists():
            self.compare({key: manifest[key] for key in ("identity", "encoder", "rows")})
        else:
            write_json(path, manifest)

    def compare(self, wanted: Mapping[str, Any]) -> None:
        """Refuses to go on with the record of another run."""
        found = read_json(self.folder / "manifest.json")
        for key, value in wanted.items():
            there, here = found.get(key), json.loads(json.dumps(value))
            if there == here:
                continue
            if isinstance(there, dict) and isinstance(here, dict):
                key = next(k for k in {**there, **here} if there.get(k) != here.get(k))
                there, here = there.get(key), here.get(key)
            raise SettingsError(
                f"{self.folder} holds another run: its {key} is {there!r}, here it is {here!r}; "
                "choose another directory, or delete that one"
            )

    def clear(self) -> None:
        """Forgets all but the manifest, so that the run is run again."""
        for path in (*(self.folder / "jobs").glob("*"), self.folder / "result.json"):
            path.unlink(missing_ok=True)
        self.lines_path.unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time works in a run directory; the lock goes with the process."""
        manifest, lock = self.folder / "manifest.json", self.folder / ".lock"
        new = not self.folder.exists()
        with disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
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

    def _tidy(self) -> None:
        for folder in (self.folder, self.folder / "jobs"):
            for left in folder.glob(".*"):  # drafts of a process that was killed
                if left.suffix[1:].isdigit():
                    left.unlink()

    @property
    def lines_path(self) -> Path:
        return self.folder / "rounds.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines; a line torn by a kill is left out."""
        if not self.lines_path.exists():
            return []
        out = []
        for text in self.lines_path.read_bytes().split(b"\n")[:-1]:
            with suppress(json.JSONDecodeError):
                out.append(json.loads(text))
        return out

    def keep_lines(self, job: str, rounds: int) -> None:
        """Forgets lines of a job that the checkpoint does not know of: they will come again."""
        kept = [line for line in self.lines() if line["job"] != job or line["round"] < rounds]
        write(self.lines_path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def add_line(self, line: Mapping[str, Any]) -> None:
        with disk(self.lines_path), open(self.lines_path, "ab") as file:
            file.write((json.dumps(line) + "\n").encode())

    def result(self) -> Any | None:
        path = self.folder / "result.json"
        return read_json(path) if path.exists() else None


def provenance() -> dict[str, Any]:
    """When a run was started, and by which versions of this code and of what it stands on."""
    return {
        "versions": {
            "fedvlm": fedvlm.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", "transformers")},
        },
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **commit(),
    }


def commit() -> dict[str, Any]:
    """The commit of this code and whether it was changed since; nothing if it is not a checkout."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=5
        ).stdout.strip()

    try:
        if not git("ls-files", "--", "__init__.py"):
            return {"commit": None, "dirty": None}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
