"""What the papers print, as data: every number of their tables, and a verdict on ours beside it."""

import csv
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from math import hypot, isfinite
from pathlib import Path
from typing import Any, Literal

from fedvlm.errors import DataError, SettingsError
from fedvlm.report.units import plain
from fedvlm.storage.toml import flat

STATUS = ("ok", "void", "copied")
KINDS = ("table", "figure")
ROUNDS = ("", "last", "validation", "oracle", "not said")
LOWER = ("kappa", "minutes", "ECE", "target ECE")  # how columns begin in which less is better
Values = Mapping[str, Any]  # settings by their dotted names, as `--set` has them
Word = Literal["met", "within noise", "differs", "void", "not comparable"]


@dataclass(frozen=True)
class Number:
    """One printed number; values are as printed, accuracies in per cent."""

    paper: str
    version: str
    item: str
    row: str  # the method as the table calls it
    data: str
    method: str  # as it is registered here; empty where there is none
    settings: Values  # in which the run must agree
    column: str  # as our tables call it
    value: float
    deviation: float | None
    round: str  # how it was chosen; empty where there is none
    status: str
    why: str  # a number is void, or where it was copied from
    line: int  # of the document

    @property
    def of_data(self) -> bool:
        return not self.method and self.column.startswith("rows ")  # any run has it

    @property
    def name(self) -> str:
        return f"{stem(self.paper, self.version)}/{self.item}"


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper, and what running it as published takes."""

    paper: str
    version: str
    item: str
    what: str
    kind: str
    numbers: int  # that are printed, in it or of it in the text
    settings: Values  # of all its runs
    wants: tuple[Mapping[str, Any], ...]  # its runs, if they do not follow from its numbers
    needs: tuple[str, ...]  # columns and pictures, as `column:kappa`
    run: str  # where it was run on its own data, if it ever was

    @property
    def name(self) -> str:
        return f"{stem(self.paper, self.version)}/{self.item}"

    @property
    def document(self) -> str:
        return stem(self.paper, self.version)


@dataclass(frozen=True)
class Verdict:
    word: Word
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word} ({self.why})" if self.why else self.word


def stem(paper: str, version: str) -> str:
    return f"{paper}-{version}" if version else paper


def folder() -> Path:
    """In an installed package they lie inside it, in a checkout beside `src`."""
    here = Path(__file__).resolve()
    for place in (here.parents[1] / "paper_files", here.parents[3] / "papers"):
        if (place / "items.csv").is_file():
            return place
    raise DataError("the papers' numbers are not there; install fedvlm again")


def items(place: Path | None = None) -> dict[str, Item]:
    """All tables and figures by name, as fedot-v1/T1; of the files in a folder, or the shipped."""
    return _items(place or folder())


def numbers(place: Path | None = None) -> dict[str, tuple[Number, ...]]:
    """The numbers of each table and figure, in the order of the print; those without have none."""
    return _numbers(place or folder())


def find(name: str) -> Item:
    known = items()
    if name not in known:
        lower = {one.lower(): one for one in known}
        near = [lower[one] for one in get_close_matches(name.lower(), lower, 3, 0.5)]
        nearest = f"the nearest are {', '.join(near)}; " if near else ""
        raise SettingsError(
            f"no table or figure is called {name!r}; {nearest}`fedvlm list papers --json` names all"
        )
    return known[name]


@cache
def _items(place: Path) -> dict[str, Item]:
    read: dict[str, Callable[[str], Any]] = {"numbers": _whole, "settings": settings_of}
    read |= {"wants": _grids, "needs": lambda text: tuple(text.split()), "kind": _one_of(KINDS)}
    found: dict[str, Item] = {}
    for line, values in _lines(place / "items.csv", [one.name for one in fields(Item)], read):
        item = Item(**values)
        if item.name in found:
            raise _broken(place / "items.csv", line, f"{item.name} is there twice")
        found[item.name] = item
    return found


@cache
def _numbers(place: Path) -> dict[str, tuple[Number, ...]]:
    known = _items(place)
    found: dict[str, dict[object, Number]] = {name: {} for name in known}
    read: dict[str, Callable[[str], Any]] = {"value": _number, "line": _whole}
    read |= {"deviation": lambda text: _number(text) if text else None, "settings": settings_of}
    read |= {"status": _one_of(STATUS), "round": _one_of(ROUNDS)}
    for document in dict.fromkeys(item.document for item in known.values()):
        path = place / f"{document}.csv"
        for line, values in _lines(path, [one.name for one in fields(Number)], read):
            one = Number(**values)
            if one.name not in known or one.name.rpartition("/")[0] != document:
                raise _broken(path, line, f"{one.name} is no table or figure of items.csv")
            if one.status != "ok" and not one.why:
                raise _broken(path, line, f"it is {one.status}, and does not say why")
            key = (one.row, one.data, one.method, repr(one.settings), one.column)
            if key in found[one.name]:
                raise _broken(path, line, "this number is there twice")
            found[one.name][key] = one
    return {name: tuple(cells.values()) for name, cells in found.items()}


def _lines(
    path: Path, columns: list[str], read: Mapping[str, Callable[[str], Any]]
) -> Iterable[tuple[int, dict[str, Any]]]:
    """The lines of a file with their numbers; a line that does not fit is refused."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}; install fedvlm again") from error
    if not rows or rows[0][1] != columns:
        raise _broken(path, 1, f"its columns must be {', '.join(columns)}")
    for line, row in rows[1:]:
        if len(row) != len(columns):
            raise _broken(path, line, f"it has {len(row)} cells and not {len(columns)}")
        values: dict[str, Any] = {}
        for key, text in zip(columns, row, strict=True):
            try:
                values[key] = read.get(key, str)(text)
            except ValueError as error:
                raise _broken(path, line, f"{key} = {text!r} does not fit: {error}") from error
        yield line, values


def _broken(path: Path, line: int, says: str) -> DataError:
    return DataError(f"{path}, line {line}: {says}; mend that line, or install fedvlm again")


def _number(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError("it takes a number")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("it takes a whole number")
    return int(text)


def _one_of(known: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"it takes one of {', '.join(map(repr, known))}")
        return text

    return read


@cache
def settings_of(text: str) -> Values:
    """`method.blocks = 4, method.head = 'text'` by dotted names."""
    return flat(tomllib.loads(f"all = {{{text}}}")["all"])


def _grids(text: str) -> tuple[Mapping[str, Any], ...]:
    found = tuple(tomllib.loads(f"all = {text}")["all"]) if text else ()
    for one in found:
        if not isinstance(one, dict) or not {"data"} <= set(one) <= {"data", "methods", "sweep"}:
            raise ValueError("it takes tables of data, methods and sweep")
    return found


def differences(wanted: Values, identity: Mapping[str, Any]) -> list[str]:
    """In which settings a run is not what is wanted; identity is that of its manifest."""
    return apart(wanted, flat(identity))


def apart(wanted: Values, has: Values) -> list[str]:
    """`differences` of an identity by dotted names."""
    out = []
    for key, value in wanted.items():
        mine = has.get(key)
        same = mine == value or (isinstance(mine, tuple) and list(mine) == value)
        if key == "encoder" and isinstance(mine, str):  # a local copy has another path
            same = same or mine.rpartition("/")[2] == str(value).rpartition("/")[2]
        if not same:
            out.append(f"{key} is {mine!r}, not {value!r}")
    return out


def matches(number: Number, identity: Mapping[str, Any]) -> bool:
    """Whether a run is of the method, with its settings, that a number is printed for."""
    if not number.method:
        return number.of_data
    own = {key: value for key, value in number.settings.items() if key.startswith("method.")}
    return not differences({"method.name": number.method, **own}, identity)


def obstacle(number: Number, identity: Mapping[str, Any]) -> str:
    """Why a run cannot be compared with a number; empty if it can."""
    if identity.get("smoke"):
        return "a smoke run"
    wanted = {"data": number.data, **find(number.name).settings, **number.settings}
    if not number.method and not number.of_data:
        return "the paper names no single method"
    wanted |= {"method.name": number.method} if number.method else {}
    return "; ".join(differences(wanted, identity))


def verdict(
    ours: float,
    our_deviation: float | None,
    theirs: float,
    their_deviation: float | None,
    status: str = "ok",
    comparable: bool = True,
    why: str = "",
    *,
    lower: bool = False,
    point: float = 1.0,
) -> Verdict:
    """How our number stands to a printed one, both in its unit.

    `why` says what hinders the comparison, why the number is void, or where it was copied from;
    `lower` that less is better; `point` is the noise of a number without a printed deviation.
    """
    if not comparable:
        return Verdict("not comparable", why)
    if status == "void":
        return Verdict("void", why)
    note = why if status == "copied" else ""
    if (ours <= theirs) if lower else (ours >= theirs):
        return Verdict("met", note)
    noise = point if their_deviation is None else 2 * hypot(our_deviation or 0.0, their_deviation)
    word: Word = "within noise" if abs(ours - theirs) <= noise else "differs"
    return Verdict(word, note)


def judge(
    number: Number, ours: float, deviation: float | None, identity: Mapping[str, Any]
) -> Verdict:
    """The verdict on what a run gives where a number is printed; accuracies in per cent."""
    hinders = obstacle(number, identity)
    return verdict(
        ours,
        deviation,
        number.value,
        number.deviation,
        number.status,
        not hinders,
        hinders or number.why,
        lower=number.column.startswith(LOWER),
        point=abs(number.value) / 100 if plain(number.column) else 1.0,
    )
