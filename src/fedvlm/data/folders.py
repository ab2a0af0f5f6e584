"""Read images from folders named after their class, and after a domain, a client or a split above it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedvlm.data import sources
from fedvlm.data.splits import SPLIT_ALIASES
from fedvlm.data.table import UNLABELLED_FOLDER, Dataset, Source, tabulate, to_nfc
from fedvlm.errors import DataError, SettingsError, join_names, suggest_path

LAYOUT_LEVELS = ("class", "domain", "client", "split", "*")


def read_folder(path: str | Path, layout: str | None = None, classes: Sequence[str] | None = None) -> Dataset:
    """A folder or a .zip of `class/image`, `domain/class/image`, `client/class/image`, ...

    The layout names the folders from the top to the images; `*` is a folder without a meaning. Without a layout it is
    guessed: one level is the class, two are domain and class, and a top level of train and test is the split. A single
    folder around everything is skipped. Images in a folder `unlabelled` in place of a class have no label.
    """
    root = Path(path)
    if root.is_dir():
        files, folders = sources.list_folder(root)
    elif root.is_file():
        files, folders = sources.list_archive(root)
    else:
        raise DataError(f"there is no {root}; {suggest_path(root)}name a folder or a .zip of images")
    if not files:
        raise DataError(f"{root} has no images; they end in {', '.join(sources.SUFFIXES)}, in folders of classes")
    depths = sorted({file.count("/") for file in files})
    if len(depths) > 1:
        shallow, deep = (next(file for file in files if file.count("/") == depth) for depth in (depths[0], depths[-1]))
        found = f"{depths[0]} and {depths[-1]} folders deep ({shallow}, {deep})"
        raise DataError(f"{root} has images {found}; put all at one depth, as domain/class/image")
    tops = {_top(file) for file in files}
    levels = _parse(layout, depths[0]) if layout else _guess(root, depths[0], files)
    skipped = depths[0] - len(levels)
    if skipped not in (0, 1) or (skipped == 1 and len(tops) > 1):
        found = f"its images are {depths[0]} folders deep, as {files[0]}"
        problem = f"{root} does not have the layout {'/'.join(levels)}: {found}"
        raise DataError(f"{problem}; name the layout that fits, of {', '.join(LAYOUT_LEVELS)}")
    source: Source = sources.Files(root, files) if root.is_dir() else sources.Archive(root, files)
    names = zip(*(file.split("/")[skipped:-1] for file in files), strict=True)
    columns = dict(zip(levels, names, strict=True))
    if classes is None:
        inside = [folder for folder in folders if not skipped or _top(folder) in tops]
        _check_empty(root, columns["class"], inside, skipped + levels.index("class"))
    optional = (columns.get(level) for level in ("domain", "client", "split"))
    labels = ["" if name == UNLABELLED_FOLDER else name for name in columns["class"]]
    table = tabulate(root.stem, source, labels, classes, *optional)
    notes = _swap_note(root, levels, table, layout is not None)
    notes += _ignored_notes(root, files, folders, levels, skipped)
    return replace(table, notes=tuple(notes))


def _swap_note(root: Path, levels: list[str], table: Dataset, is_given: bool) -> list[str]:
    """Warn if the layout may be the wrong way round: more domains than classes, far more if it was guessed."""
    domains = sorted(set(table.domains.tolist()))
    limit = len(table.classes) if is_given else max(20, 4 * len(table.classes))
    if "domain" not in levels or len(domains) <= limit:
        return []
    swap = {"domain": "class", "class": "domain"}
    return [
        f'with the layout "{"/".join(levels)}" {root} has {len(table.classes)} classes '
        f"({join_names(table.classes, 6)}) and {len(domains)} domains ({join_names(domains, 6)}); if they are "
        f'swapped, set layout = "{"/".join(swap.get(level, level) for level in levels)}"'
    ]


def _ignored_notes(root: Path, files: list[str], folders: list[str], levels: list[str], skipped: int) -> list[str]:
    """List files that are no images, and sites without images."""
    notes = []
    if ignored := sources.list_ignored_files(root):
        notes.append(f"ignored, because they are no images: {join_names(ignored, 3)}")
    site = next((level for level in ("client", "domain") if level in levels), None)
    if site is not None:
        depth = skipped + levels.index(site)
        full = {file.split("/")[depth] for file in files}
        site_names = {folder.split("/")[depth] for folder in folders if folder.count("/") >= depth}
        notes += [f"{site} {name!r} has no images and is left out" for name in sorted(site_names - full)]
    return notes


def _top(path: str) -> str:
    return path.partition("/")[0]


def _parse(layout: str, depth: int) -> list[str]:
    """Split a layout into levels; of several (with | between) take the one of this depth."""
    variants = [variant.strip("/").split("/") for variant in layout.split("|")]
    levels = next((variant for variant in variants if len(variant) == depth), variants[0])
    named = [level for level in levels if level != "*"]
    if set(levels) - set(LAYOUT_LEVELS) or levels.count("class") != 1 or len(set(named)) < len(named):
        raise SettingsError(
            f"layout must name the folders above an image, with class once and any of domain, client, split "
            f'and * (no meaning), as "domain/class"; got {layout!r}'
        )
    return levels


def _guess(root: Path, depth: int, files: list[str]) -> list[str]:
    tops = sorted({_top(file) for file in files})
    if depth == 3 and len(tops) == 1:  # one folder around everything
        depth, tops = 2, sorted({file.split("/")[1] for file in files})
    has_splits = all(top.lower() in SPLIT_ALIASES for top in tops)
    two, three = (["split", "class"], ["split", "domain", "class"]) if has_splits else (["domain", "class"], [])
    guesses = {1: ["class"], 2: two, 3: three}
    if not guesses.get(depth):
        raise DataError(
            f"the layout of {root} cannot be guessed: its images are {depth} folders deep, as "
            f"{files[0]}, and the top folders are {join_names(tops)}; put them in class/ or in "
            'domain/class/, or name the layout, as "client/class"'
        )
    return guesses[depth]


def _check_empty(root: Path, labels: Sequence[str], folders: list[str], depth: int) -> None:
    """Refuse a class folder that is empty in every domain: its images were probably forgotten."""
    full = {to_nfc(label) for label in labels}
    for folder in folders:
        parts = folder.split("/")
        if len(parts) == depth + 1 and to_nfc(parts[depth]) not in full:
            raise DataError(f"{root}: class {parts[depth]!r} has no images (the folder {folder} is empty); add some")
