"""A server's folder or a site's kit as one file, and back.

The file holds private keys and is as secret as the folder. It is a plain tar whose first member is
the sealed index of all others; what does not fit its digest is not restored.
"""

import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from fedvlm.errors import DataError, SettingsError
from fedvlm.storage.files import (
    INDEX_FILE,
    atomic_write,
    check_index,
    exclusive_lock,
    explain_os_errors,
    make_private_folder,
    write_index,
)

KIT_FILES = ("server.toml", "site.toml")  # one of them makes a folder a server's or a site's
SQLITE_SIDE_FILES = (".db-wal", ".db-shm")  # of a database that is copied by its own means


def write_backup(folder: Path, file: Path) -> int:
    """Writes the file; how many files are in it. A site must not be running."""
    if not any((folder / name).is_file() for name in KIT_FILES):
        raise SettingsError(f"{folder} is no server's folder and no site's kit; name one")
    if file.exists() or file.resolve().is_relative_to(folder.resolve()):
        raise SettingsError(f"{file} is there already, or inside {folder}; name a new file elsewhere")
    with exclusive_lock(folder / ".lock", f"{folder} is in use; stop the site first"), _snapshot(folder) as copy:
        write_index(copy)
        names = [INDEX_FILE, *sorted(_relative_files(copy) - {INDEX_FILE})]
        with atomic_write(file) as draft_path:
            os.close(os.open(draft_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with tarfile.open(draft_path, "w") as archive:
                for name in names:
                    archive.add(copy / name, name, recursive=False)
    return len(names) - 1


def restore_backup(file: Path, folder: Path) -> int:
    """Writes the folder, which must be new, if all of the file is sound; how many files it has."""
    if folder.exists():
        raise SettingsError(f"{folder} is there already; keys are never overwritten: name a new one")
    with explain_os_errors(folder), tempfile.TemporaryDirectory(dir=folder.parent) as place:
        made = Path(place) / "folder"
        make_private_folder(made)
        try:
            with tarfile.open(file, "r:") as archive:
                archive.extractall(made, filter="data")
            bad = check_index(made)
            extra = _relative_files(made) - {INDEX_FILE}
        except (OSError, tarfile.TarError, DataError, KeyError, TypeError) as error:
            raise DataError(f"{file} is no whole backup ({error}); take another") from error
        if bad:
            name, problem = next(iter(bad.items()))
            raise DataError(f"{file} is damaged: {name} {problem}; take another")
        (made / INDEX_FILE).unlink()
        made.rename(folder)
    return len(extra)


def _relative_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@contextmanager
def _snapshot(folder: Path) -> Iterator[Path]:
    """The files of a folder at one moment; databases by their own means, no locks, no drafts."""
    with tempfile.TemporaryDirectory() as place:
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path.is_symlink() or path.name[0] == ".":
                continue
            if path.name.endswith(SQLITE_SIDE_FILES):
                continue
            target = Path(place) / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".db":
                with closing(sqlite3.connect(path)) as source_db, closing(sqlite3.connect(target)) as two:
                    source_db.backup(two)
                target.chmod(0o600)
            else:
                shutil.copy2(path, target)
        yield Path(place)
