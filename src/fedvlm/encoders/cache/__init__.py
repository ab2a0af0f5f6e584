"""The cache of embeddings on disk: one entry per encoder, in which every image and sentence is encoded once.

`DIR/<encoder fingerprint>/` holds `meta.json` and tables of rows (see rows.py), keyed by the SHA-256 of an image's
bytes or of a sentence. The locks are outside the entries, so that an entry can be removed while its locks are held.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvlm.encoders.cache.rows import Claims, DamagedRow, RowFile, explain_write_errors, file_lock
from fedvlm.errors import DataError, SettingsError
from fedvlm.storage import files

FORMAT = 1


def cache_directory() -> Path:
    """Return FEDVLM_CACHE, or `fedvlm` in the user's cache directory."""
    if configured := os.environ.get("FEDVLM_CACHE"):
        return Path(configured).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "fedvlm"


class Entry:
    """The cached tables of one encoder."""

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.fingerprint, self.folder = fingerprint, root / fingerprint
        self._lock = _lock(root, fingerprint, "append")
        self.claims_path = _lock(root, fingerprint, "claims")

    def meta(self) -> dict[str, Any]:
        path = self.folder / "meta.json"
        try:
            meta = json.loads(path.read_text())
            tables = {str(k): (str(d), [int(n) for n in s]) for k, (d, s) in meta["tables"].items()}
            parsed = {"encoder": str(meta["encoder"]), "tables": tables}
            if meta["format"] == FORMAT:
                return parsed
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            reason = f"format {meta['format']}, not {FORMAT}"
        raise DataError(f"cannot read {path} ({reason}); `fedvlm cache rm {self.fingerprint[:16]}` removes the entry")

    def tables(self) -> dict[str, RowFile]:
        tables = self.meta()["tables"].items()
        return {name: RowFile(self.folder / name, self._lock, dtype, tuple(shape)) for name, (dtype, shape) in tables}

    def table(self, name: str, dtype: str, shape: tuple[int, ...] | None) -> RowFile | None:
        """Return a table by name; create it if `shape` is given, otherwise return None if it does not exist."""
        with file_lock(self._lock):
            meta = self.meta()
            if name not in meta["tables"]:
                if shape is None:
                    return None
                meta["tables"][name] = dtype, list(shape)
                self._write(meta)
            stored_dtype, stored_shape = meta["tables"][name]
        if shape is not None and (stored_dtype, tuple(stored_shape)) != (dtype, shape):
            held = f"{name} of shape {tuple(stored_shape)} for {meta['encoder']}, which now has {shape}"
            raise DataError(f"the cache holds {held}; remove it with `fedvlm cache rm {self.fingerprint[:16]}`")
        return RowFile(self.folder / name, self._lock, stored_dtype, tuple(stored_shape))

    def ensure_table(self, name: str, dtype: str, shape: tuple[int, ...]) -> RowFile:
        table = self.table(name, dtype, shape)
        assert table is not None  # it is created with this shape
        return table

    def make(self, encoder: str) -> None:
        with file_lock(self._lock):
            if not self.folder.exists():
                with explain_write_errors(self.folder):
                    self.folder.mkdir(mode=0o700)
            if not (self.folder / "meta.json").exists():
                self._write({"encoder": encoder, "tables": {}})

    def _write(self, meta: dict[str, Any]) -> None:
        text = json.dumps({"format": FORMAT, **meta}, indent=1)
        files.write_file(self.folder / "meta.json", text.encode())


@contextmanager
def lock_entry(root: Path, fingerprint: str, encoder: str) -> Iterator[tuple[Entry, Claims]]:
    """Open an entry to read and append to, created if missing; it cannot be removed meanwhile."""
    if not re.fullmatch("[0-9a-f]{16,64}", fingerprint):
        raise SettingsError(f"{fingerprint!r} is no fingerprint of an encoder; a fingerprint has 16 to 64 hex digits")
    files.make_private_folder(root)
    with explain_write_errors(root):
        (root / "locks").mkdir(parents=True, exist_ok=True, mode=0o700)
    entry = Entry(root, fingerprint)
    with file_lock(_lock(root, fingerprint, "use"), shared=True):
        entry.make(encoder)
        claims = Claims(entry.claims_path)
        try:
            yield entry, claims
        finally:
            claims.close()


@dataclass(frozen=True)
class EntrySummary:
    """One line of `fedvlm cache ls`."""

    encoder: str
    fingerprint: str
    rows: int  # images with a pooled embedding
    patches: int  # images with patch embeddings
    bytes: int
    problem: str = ""  # why the entry cannot be used


def list_entries(root: Path) -> list[EntrySummary]:
    return [_listed(entry) for entry in _entries(root)]


def _listed(entry: Entry) -> EntrySummary:
    size = sum(file.stat().st_size for file in entry.folder.iterdir() if file.is_file())
    try:
        name, tables = entry.meta()["encoder"], entry.tables()
    except DataError as error:
        return EntrySummary("?", entry.fingerprint, 0, 0, size, str(error))
    count = {name: len(table) for name, table in tables.items()}
    pooled = max((count.get(name, 0) for name in ("pooled.float32", "pooled.float16")), default=0)
    return EntrySummary(name, entry.fingerprint, pooled, count.get("patches.float16", 0), size)


def remove_entry(root: Path, prefix: str) -> EntrySummary:
    """Remove the entry whose fingerprint begins with `prefix`; return its summary."""
    entry = find_entry(root, prefix)
    with _lock_exclusively(root, entry):
        listed = _listed(entry)
        with explain_write_errors(entry.folder):
            # renamed first, so that a kill never leaves half an entry under its name
            entry.folder.rename(root / f".removed-{entry.fingerprint}-{os.getpid()}")
            for doomed in root.glob(".removed-*"):
                shutil.rmtree(doomed)
    return listed


def verify(root: Path, prefix: str = "", drop: bool = False) -> dict[str, list[DamagedRow]]:
    """Return the damaged rows of each entry whose fingerprint begins with `prefix`; `drop` removes them."""
    entries = [find_entry(root, prefix)] if prefix else _entries(root)
    return {entry.fingerprint: _verify(root, entry, drop) for entry in entries}


def _verify(root: Path, entry: Entry, drop: bool) -> list[DamagedRow]:
    damaged = []
    for table in entry.tables().values():
        bad = list(table.verify())
        if bad and drop:
            with _lock_exclusively(root, entry):
                table.refresh()
                table.drop({bytes.fromhex(row.digest) for row in bad})
        damaged += bad
    return damaged


def _entries(root: Path) -> list[Entry]:
    folders = sorted(root.iterdir()) if root.is_dir() else []
    names = [folder.name for folder in folders if re.fullmatch("[0-9a-f]{16,64}", folder.name)]
    return [Entry(root, name) for name in names]


def find_entry(root: Path, prefix: str) -> Entry:
    """Return the only entry whose fingerprint begins with `prefix`."""
    matches = [entry for entry in _entries(root) if entry.fingerprint.startswith(prefix)]
    if len(matches) != 1:
        names = ", ".join(entry.fingerprint[:16] for entry in matches or _entries(root)) or "none"
        raise DataError(f"{len(matches)} entries of the cache at {root} begin with {prefix!r}; give more of: {names}")
    return matches[0]


@contextmanager
def _lock_exclusively(root: Path, entry: Entry) -> Iterator[None]:
    try:
        with file_lock(_lock(root, entry.fingerprint, "use"), wait=False):
            yield
    except BlockingIOError:
        raise DataError(f"the cache entry {entry.fingerprint[:16]} is in use by another process; wait for it") from None


def _lock(root: Path, fingerprint: str, purpose: str) -> Path:
    return root / "locks" / f"{fingerprint}.{purpose}"
