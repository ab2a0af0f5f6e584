"""Verify the files of a run, an exported classifier, a table of embeddings or the cache by their checksums."""

from pathlib import Path

from fedvlm.encoders.cache import cache_directory, list_entries, verify
from fedvlm.encoders.store import open_store
from fedvlm.errors import DataError
from fedvlm.record import Record
from fedvlm.storage.files import INDEX_FILE, check_index, read_json, read_tensors

Problems = list[tuple[str, str]]  # the name of a file or row, and what is wrong with it


def verify_files(target: str) -> tuple[int, Problems]:
    """Return how many files (rows of the cache) were checked, and the problems by name."""
    path = Path(target).expanduser()
    if target == "cache" and not path.exists():
        return _verify_cache(cache_directory())
    if path.is_file():
        open_store(path)  # refuses by name
        return 1, []
    if (path / INDEX_FILE).exists():
        problems = check_index(path)
        return len(read_json(path / INDEX_FILE)["files"]), list(problems.items())
    if (path / "manifest.json").exists():
        return _verify_unfinished(path)
    if (path / "locks").is_dir():
        return _verify_cache(path)
    raise DataError(f"{path} is no run, export, store or cache of fedvlm; name one of these")


def _verify_cache(root: Path) -> tuple[int, Problems]:
    damaged = [(name, entry) for name, rows in verify(root).items() for entry in rows]
    problems = [(f"{name[:16]} {entry.table} row {entry.row}", entry.reason) for name, entry in damaged]
    return sum(entry.rows + entry.patches for entry in list_entries(root)), problems


def _verify_unfinished(folder: Path) -> tuple[int, Problems]:
    """A run without an index yet: every file by its own seal."""
    problems: Problems = []
    names = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name[0] != "."]
    for path in names:
        try:
            if path.suffix == ".json":
                read_json(path)
            elif path.suffix == ".safetensors":
                read_tensors(path)
            elif path == Record(folder).lines_path:
                Record(folder).lines()
        except DataError as error:
            problems.append((str(path.relative_to(folder)), str(error)))
    return len(names), problems
