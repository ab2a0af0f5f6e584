"""Images in folders named after their class, and after a domain, a client or a split above it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedvlm.data import sources
from fedvlm.data.table import SPLIT_ALIASES, Dataset, Source, tabulate, to_nfc
from fedvlm.errors import DataError, SettingsError, join_names, suggest_path

LAYOUT_LEVELS = ("class", "domain", "client", "split", "*")


def read_folder(path: str | Path, layout: str | None = None, classes: Sequence[str] | None = None) -> Dataset:
    """A folder or a .zip of `class/image`, `domain/class/image`, `client/class/image`, ...

    The layout names the folders from the top to the images; `*` is a folder that says nothing.
    Without one it is guessed: one level is the class, two are domain and class, and a top level
    of train and test is the split. One folder around everything is looked through.
    """
    root = Path(path)
    if root.is_dir():
        files, folders = sources.list_folder(root)
    elif root.is_file():
        files, folders = sources.list_archive(root)
    else:
        raise DataError(f"there is no {root}; {suggest_path(root)}name a folder or a .zip of images")
    if not files:
        raise DataError(
            f"{root} has no images; they end in {', '.join(sources.SUFFIXES)}, in folders named after their class"
        )
    depths = sorted({file.count("/") for file in files})
    if len(depths) > 1:
        shallow, deep = (next(file for file in files if file.count("/") == depth) for depth in (depths[0], depths[-1]))
        raise DataError(
            f"{root} has images {depths[0]} and {depths[-1]} folders deep ({shallow}, {deep}); "
            "put all at one depth, as domain/class/image"
        )
    tops = {_top(file) for file in files}
    words = _parse(layout, depths[0]) if layout else _guess(root, depths[0], files)
    skipped = depths[0] - len(words)
    if skipped not in (0, 1) or (skipped == 1 and len(tops) > 1):
        raise DataError(
            f"{root} does not have the layout {'/'.join(words)}: its images are {depths[0]} "
            f"folders deep, as {files[0]}; name the layout that fits, of {', '.join(LAYOUT_LEVELS)}"
        )
    source: Source = sources.Files(root, files) if root.is_dir() else sources.Archive(root, files)
    named = zip(*(_folders(file)[skipped:] for file in files), strict=True)
    levels = dict(zip(words, named, strict=True))
    if classes is None:
        inside = [folder for folder in folders if not skipped or _top(folder) in tops]
        _check_empty(root, levels["class"], inside, skipped + words.index("class"))
    table = tabulate(
        root.stem,
        source,
        levels["class"],
        classes,
        levels.get("domain"),
        levels.get("client"),
        levels.get("split"),
    )
    return replace(table, notes=_notes(root, files, folders, words, skipped))


def _notes(root: Path, files: list[str], folders: list[str], words: list[str], skipped: int) -> tuple[str, ...]:
    """Files that are no images, and sites without one."""
    notes = []
    if ignored := sources.list_ignored_files(root):
        notes.append(f"passed over, as they are no images: {join_names(ignored, 3)}")
    site = next((word for word in ("client", "domain") if word in words), None)
    if site is not None:
        level = skipped + words.index(site)
        full = {file.split("/")[level] for file in files}
        site_names = {name.split("/")[level] for name in folders if name.count("/") >= level}
        notes += [f"{site} {name!r} has no images and is left out" for name in sorted(site_names - full)]
    return tuple(notes)


def _folders(file: str) -> list[str]:
    return file.split("/")[:-1]


def _top(path: str) -> str:
    return path.partition("/")[0]


def _parse(layout: str, depth: int) -> list[str]:
    """The words of a layout, or of the one of several (with | between) that is as deep."""
    several = [variant.strip("/").split("/") for variant in layout.split("|")]
    words = next((variant for variant in several if len(variant) == depth), several[0])
    named = [word for word in words if word != "*"]
    if set(words) - set(LAYOUT_LEVELS) or words.count("class") != 1 or len(set(named)) < len(named):
        raise SettingsError(
            f"layout = {layout!r} does not fit; it names the folders above an image, with class "
            'once and any of domain, client, split and * (says nothing), as "domain/class"'
        )
    return words


def _guess(root: Path, depth: int, files: list[str]) -> list[str]:
    tops = sorted({_top(file) for file in files})
    if depth == 3 and len(tops) == 1:  # one folder around everything
        depth, tops = 2, sorted({_folders(file)[1] for file in files})
    split = all(top.lower() in SPLIT_ALIASES for top in tops)
    guesses = {
        1: ["class"],
        2: ["split", "class"] if split else ["domain", "class"],
        3: ["split", "domain", "class"] if split else [],
    }
    if not guesses.get(depth):
        raise DataError(
            f"the layout of {root} cannot be guessed: its images are {depth} folders deep, as "
            f"{files[0]}, and the top folders are {join_names(tops)}; put them in class/ or in "
            'domain/class/, or name the layout, as "client/class"'
        )
    return guesses[depth]


def _check_empty(root: Path, labels: Sequence[str], folders: list[str], level: int) -> None:
    """A folder where a class should be, without an image in any domain, is a class forgotten."""
    full = {to_nfc(label) for label in labels}
    for folder in folders:
        parts = folder.split("/")
        if len(parts) == level + 1 and to_nfc(parts[level]) not in full:
            raise DataError(
                f"{root}: class {parts[level]!r} has no images (the folder {folder} is empty); "
                "add some or remove the folder"
            )
