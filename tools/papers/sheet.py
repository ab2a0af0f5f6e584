"""Cells of the papers' tables, as the rows of a csv file; the checks of printed sums."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

BEFORE = ("paper", "version", "item", "row", "data", "method", "settings", "column")
COLUMNS = (*BEFORE, "value", "deviation", "round", "status", "why", "line")
MARKUP = re.compile(r"</?(?:b|i|math)>|\*\*|[$\\{},%]")
NUMBER = re.compile(r"^(-?\d+(?:\.\d+)?)(?:\s*(?:±|pm)\s*(\d+\.\d+))?$")


@dataclass(frozen=True)
class Cell:
    """One printed number. Value and deviation stay text, so that no digit is added or lost."""

    item: str
    row: str  # the method as the table calls it
    data: str
    method: str  # as it is registered here
    settings: Mapping[str, object]  # of the run, with the names that `--set` takes
    column: str  # as our tables call it
    value: str
    line: int
    deviation: str = ""
    round: str = "not said"  # how it was chosen; empty where there is none
    status: str = "ok"
    why: str = ""


@dataclass
class Sheet:
    paper: str
    version: str = ""
    cells: list[Cell] = field(default_factory=list)
    slips: list[str] = field(default_factory=list)  # printed means that their cells do not give

    @property
    def stem(self) -> str:
        return f"{self.paper}-{self.version}" if self.version else self.paper

    def void(self, reason: str, chosen: Iterable[Cell], status: str = "void") -> None:
        """Marks cells that are not to be met; the first reason stays."""
        voided = {id(cell) for cell in chosen}
        if not voided:
            raise ValueError(f"{self.stem}: no cell is left for {reason!r}")
        self.cells = [
            replace(cell, status=status, why=reason) if id(cell) in voided and cell.status == "ok" else cell
            for cell in self.cells
        ]

    def check_mean(self, mean_cell: Cell, parts: Iterable[Cell], weights: Iterable[int] | None = None) -> None:
        """A printed mean that its own cells do not give is void, and says what they give."""
        values = [float(part.value) for part in parts]
        mean = fmean(values, list(weights or [1] * len(values)))
        # Two decimals each: half a unit of the print, and at most half a unit of the parts' mean.
        if abs(float(mean_cell.value) - mean) < 0.0101:
            return
        self.slips.append(f"{mean_cell.item}, line {mean_cell.line}: {mean_cell.value} is {mean:.2f}")
        self.void(f"its own cells give {mean:.2f}", [mean_cell])

    def of(self, *items: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.item in items]

    def text(self) -> str:
        out = io.StringIO()
        write = csv.writer(out, lineterminator="\n")
        write.writerow(COLUMNS)
        for cell in self.cells:
            chosen = "" if cell.method == "zero-shot" else cell.round
            settings = ", ".join(f"{key} = {toml(value)}" for key, value in cell.settings.items())
            fields = {**vars(cell), "paper": self.paper, "version": self.version}
            fields |= {"settings": settings, "round": chosen}
            write.writerow([fields[key] for key in COLUMNS])
        return out.getvalue()


def toml(value: object) -> str:
    """A value of a setting as TOML writes it, with the quotes that csv need not double."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


class Document:
    """The text of a paper; lines are counted from 1, as an editor does."""

    def __init__(self, path: Path) -> None:
        self.lines = path.read_text(encoding="utf-8").split("\n")

    def row(self, line: int) -> list[str]:
        """The cells of a table's line, cleaned of markup; one without its frame."""
        text = self.lines[line - 1]
        if "\t" not in text:
            text = text.strip().removeprefix("|").removesuffix("|").replace("|", "\t")
        return [MARKUP.sub("", cell).strip() for cell in text.split("\t")]

    def numbers(self, line: int) -> list[tuple[str, str]]:
        """Value and deviation of each cell of a line that is a number, in order."""
        matches = (NUMBER.match(cell) for cell in self.row(line))
        return [(match[1], match[2] or "") for match in matches if match]

    def check_numbers(self, line: int, *numbers: str) -> None:
        """Numbers of running text, which are named by hand, do stand in this line."""
        for number in numbers:
            if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", self.lines[line - 1]):
                raise ValueError(f"line {line} does not say {number}")

    def expect(self, line: int, *words: str) -> None:
        """Guards a line number: the line has these words, in this order."""
        if not re.search(".*".join(map(re.escape, words)), self.lines[line - 1]):
            raise ValueError(f"line {line} is not {words}: {self.lines[line - 1][:80]!r}")


def exactly(count: int, numbers: list[tuple[str, str]], line: int) -> list[tuple[str, str]]:
    if len(numbers) != count:
        raise ValueError(f"line {line} has {len(numbers)} numbers and not {count}: {numbers}")
    return numbers
