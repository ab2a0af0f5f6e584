"""Sentences about the classes, common to all clients or brought by one, and their embeddings."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvlm.data.table import Embedded, clean
from fedvlm.errors import SettingsError, unknown

KEYWORDS = "keywords"  # the word that stands for the sentences that come with the demo
Sentences = list[list[str]]  # by class


def read(common: str, rows: Embedded) -> Sentences:
    """Every class of the data must be in the file, if only with an empty list."""
    path = Path(common)
    if common == KEYWORDS:
        path = Path(__file__).parent / "demo" / "keywords.json"
        if rows.name != "demo":
            raise SettingsError(
                f"descriptions = 'keywords' are those of the demo, and the data are {rows.name}; "
                "name a JSON file of class names with their sentences"
            )
    said = by_class(path, read_file(path), rows.classes)
    for name, one in zip(rows.classes, said, strict=True):
        if one is None:
            raise SettingsError(
                f"{path} says nothing of the class {name!r}; add it, with [] if there is nothing "
                "to say"
            )
    return [one or [] for one in said]


def read_own(path: str, classes: Sequence[str]) -> dict[str, Sentences]:
    """By client; a client need not describe every class."""
    found = read_file(Path(path))
    return {
        id: [one or [] for one in by_class(Path(path), table, classes)]
        for id, table in sorted(found.items())
    }


def read_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"the descriptions {path} cannot be read ({error.strerror}); name a JSON file"
        ) from error
    except ValueError as error:
        raise SettingsError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise SettingsError(f'{path} is no table; write {{"class": ["sentence", ...], ...}}')
    return found


def by_class(path: Path, found: Any, classes: Sequence[str]) -> list[list[str] | None]:
    """The sentences of each class, None where the file does not name it."""
    if not isinstance(found, Mapping):
        raise SettingsError(f'{path} holds {found!r:.60}; write {{"class": ["sentence", ...]}}')
    names = {clean(name): index for index, name in enumerate(classes)}
    out: list[list[str] | None] = [None] * len(classes)
    for name, sentences in found.items():
        if clean(name) not in names:
            raise unknown(f"class of {path}", name, classes)
        sound = isinstance(sentences, list) and all(
            isinstance(one, str) and one.strip() for one in sentences
        )
        if not sound:
            raise SettingsError(
                f"{path}: the sentences of {name!r} are {sentences!r:.60}; they are a list of "
                "strings, none of them empty"
            )
        out[names[clean(name)]] = [" ".join(one.split()) for one in sentences]
    return out


def dealt(texts: Mapping[str, Tensor], ids: Iterable[str]) -> dict[str, Tensor]:
    """Own texts for every client, none of them real where a client brought none: one shape."""
    if not texts:
        return {}
    ids = list(ids)
    for id in texts:
        if id not in ids:
            raise unknown("client", id, ids)
    none = torch.zeros_like(next(iter(texts.values())))
    return {id: texts.get(id, none) for id in ids}
