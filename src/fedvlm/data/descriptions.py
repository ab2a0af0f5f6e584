"""Sentences about the classes, common to all clients or brought by one, and their embeddings."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvlm.data.table import EmbeddedTable, readable_name
from fedvlm.errors import SettingsError, unknown_name

KEYWORDS = "keywords"  # the word that stands for the sentences that come with the demo
Sentences = list[list[str]]  # by class


def read_common_descriptions(common: str, rows: EmbeddedTable) -> Sentences:
    """Every class of the data must be in the file, if only with an empty list."""
    path = Path(common)
    if common == KEYWORDS:
        path = Path(__file__).parent / "demo" / "keywords.json"
        if rows.name != "demo":
            raise SettingsError(
                f"descriptions = 'keywords' are those of the demo, and the data are {rows.name}; "
                "name a JSON file of class names with their sentences"
            )
    class_sentences = match_sentences(path, read_file(path), rows.classes)
    for name, sentences in zip(rows.classes, class_sentences, strict=True):
        if sentences is None:
            raise SettingsError(
                f"{path} says nothing of the class {name!r}; add it, with [] if there is nothing to say"
            )
    return [sentences or [] for sentences in class_sentences]


def read_client_descriptions(path: str, classes: Sequence[str]) -> dict[str, Sentences]:
    """By client; a client need not describe every class."""
    tables = read_file(Path(path))
    return {
        id: [sentences or [] for sentences in match_sentences(Path(path), table, classes)]
        for id, table in sorted(tables.items())
    }


def read_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"the descriptions {path} cannot be read ({error.strerror}); name a JSON file") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f'{path} is no table; write {{"class": ["sentence", ...], ...}}')
    return content


def match_sentences(path: Path, table: Any, classes: Sequence[str]) -> list[list[str] | None]:
    """The sentences of each class, None where the file does not name it."""
    if not isinstance(table, Mapping):
        raise SettingsError(f'{path} holds {table!r:.60}; write {{"class": ["sentence", ...]}}')
    names = {readable_name(name): index for index, name in enumerate(classes)}
    out: list[list[str] | None] = [None] * len(classes)
    for name, sentences in table.items():
        if readable_name(name) not in names:
            raise unknown_name(f"class of {path}", name, classes)
        sound = isinstance(sentences, list) and all(
            isinstance(sentence, str) and sentence.strip() for sentence in sentences
        )
        if not sound:
            raise SettingsError(
                f"{path}: the sentences of {name!r} are {sentences!r:.60}; they are a list of "
                "strings, none of them empty"
            )
        out[names[readable_name(name)]] = [" ".join(sentence.split()) for sentence in sentences]
    return out


def texts_by_client(texts: Mapping[str, Tensor], ids: Iterable[str]) -> dict[str, Tensor]:
    """Own texts for every client, none of them real where a client brought none: one shape."""
    if not texts:
        return {}
    ids = list(ids)
    for id in texts:
        if id not in ids:
            raise unknown_name("client", id, ids)
    none = torch.zeros_like(next(iter(texts.values())))
    return {id: texts.get(id, none) for id in ids}
