"""The one reader of tables: names, types and ranges, with the place in the refusal."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

import fedvlm
from fedvlm.core.schema import (
    COUNT,
    FRACTION,
    NON_NEGATIVE,
    OPEN_FRACTION,
    POSITIVE_FRACTION,
    list_field,
    ranged_field,
    read_table,
)
from fedvlm.errors import SettingsError


@dataclass(frozen=True)
class Oven:
    folder: str
    name: str
    temperature: float = ranged_field(0.5, FRACTION)
    loaves: int | None = ranged_field(None, COUNT)
    bound: float | Literal["median"] = ranged_field(0.0, NON_NEGATIVE)
    grains: tuple[str, ...] = list_field()
    rows: tuple[str, ...] = ()
    lr: float = 0.1  # held to the range of its name


def read(**values):
    return read_table(Oven, "a/oven.toml", {"name": "east", **values}, ": ", folder="a")


def test_lists_become_tuples_and_one_may_stand_for_several():
    assert read(grains="rye").grains == ("rye",)
    assert read(grains=["rye", "oat"], rows=["x"]).rows == ("x",)
    assert read(bound="median", loaves=3) == Oven("a", "east", loaves=3, bound="median")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temprature": 1}, r"no setting of a/oven.toml is called 'temprature'; did you mean 'temperature'"),
        ({"folder": "b"}, r"no setting of a/oven.toml is called 'folder'"),
        ({"temperature": "hot"}, r"^a/oven.toml: temperature must be a number, got 'hot'"),
        ({"temperature": 1}, r"^a/oven.toml: temperature must be at least 0 and below 1, got 1"),
        ({"temperature": float("nan")}, r"temperature must be finite and at least 0 and below 1, got nan"),
        ({"loaves": 0}, r"loaves must be at least 1, got 0"),
        ({"loaves": True}, r"loaves must be .*, got True"),
        ({"bound": "medan"}, r"must be a number or 'median', got 'medan'; did you mean 'median'\?"),
        ({"bound": float("inf")}, r"bound must be finite and at least 0, got inf"),
        ({"rows": "x"}, r"rows must be names, as \['a', 'b'\], got 'x'"),
        ({"rows": [1]}, r"rows must be .*, got 1"),
        ({"lr": 0}, r"lr must be above 0 and at most 1000, got 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(values, message):
    with pytest.raises(SettingsError, match=message):
        read(**values)


def test_what_is_missing_is_named_and_what_is_no_table_too():
    with pytest.raises(SettingsError, match="a/oven.toml: name is missing; add it"):
        read_table(Oven, "a/oven.toml", {}, ": ", folder="a")
    with pytest.raises(SettingsError, match=r"oven = 3; write a table"):
        read_table(Oven, "oven", 3, folder="a")


@pytest.mark.parametrize(
    ("range", "inside", "outside"),
    [
        (NON_NEGATIVE, [0, 2.5], [-1, float("inf")]),
        (COUNT, [1], [0]),
        (FRACTION, [0, 0.9], [1]),
        (POSITIVE_FRACTION, [0.1, 1], [0, 1.1]),
        (OPEN_FRACTION, [0.5], [0, 1]),
    ],
)
def test_a_range_has_its_ends(range, inside, outside):
    assert all(number in range for number in inside)
    assert not any(number in range for number in [*outside, float("nan")])


def test_nobody_else_reads_tables():
    """Only the schema compares the names of a table with the fields of a class and their types."""
    home = Path(fedvlm.__file__).parent
    allowed = {"core/schema.py", "core/registry.py", "runner/experiments.py"}  # traits; a single value
    readers = set()
    for path in home.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check_type":
                readers.add(path.relative_to(home).as_posix())
    assert readers <= allowed
