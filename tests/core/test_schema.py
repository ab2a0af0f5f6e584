"""The one reader of tables: names, types and ranges, with the place in the refusal."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

import fedvlm
from fedvlm.core.schema import AMOUNT, COUNT, INSIDE, PART, SHARE, read_table, several, within
from fedvlm.errors import SettingsError


@dataclass(frozen=True)
class Oven:
    folder: str
    name: str
    heat: float = within(0.5, SHARE)
    loaves: int | None = within(None, COUNT)
    bound: float | Literal["median"] = within(0.0, AMOUNT)
    grains: tuple[str, ...] = several()
    rows: tuple[str, ...] = ()
    lr: float = 0.1  # held to the range of its name


def read(**values):
    return read_table(Oven, "a/oven.toml", {"name": "east", **values}, ": ", folder="a")


def test_lists_become_tuples_and_one_may_stand_for_several():
    assert read(grains="rye").grains == ("rye",)
    assert read(grains=["rye", "oat"], rows=["x"]).rows == ("x",)
    assert read(bound="median", loaves=3) == Oven("a", "east", loaves=3, bound="median")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"haet": 1}, r"no setting of a/oven.toml is called 'haet'; did you mean 'heat'"),
        ({"folder": "b"}, r"no setting of a/oven.toml is called 'folder'"),
        ({"heat": "hot"}, r"^a/oven.toml: heat = 'hot' does not fit; it takes a number"),
        ({"heat": 1}, r"^a/oven.toml: heat must be at least 0 and below 1, got 1"),
        ({"heat": float("nan")}, r"heat must be finite and at least 0 and below 1, got nan"),
        ({"loaves": 0}, r"loaves must be at least 1, got 0"),
        ({"loaves": True}, r"loaves = True does not fit"),
        ({"bound": "medan"}, r"did you mean 'median'\? it takes a number or 'median'"),
        ({"bound": float("inf")}, r"bound must be finite and at least 0, got inf"),
        ({"rows": "x"}, r"rows = 'x' does not fit; it takes names, as \['a', 'b'\]"),
        ({"rows": [1]}, r"rows = 1 does not fit"),
        ({"lr": 0}, r"lr must be above 0 and at most 1000, got 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(values, said):
    with pytest.raises(SettingsError, match=said):
        read(**values)


def test_what_is_missing_is_named_and_what_is_no_table_too():
    with pytest.raises(SettingsError, match="a/oven.toml: name is missing; add it"):
        read_table(Oven, "a/oven.toml", {}, ": ", folder="a")
    with pytest.raises(SettingsError, match=r"oven = 3; write a table"):
        read_table(Oven, "oven", 3, folder="a")


@pytest.mark.parametrize(
    ("range", "inside", "outside"),
    [
        (AMOUNT, [0, 2.5], [-1, float("inf")]),
        (COUNT, [1], [0]),
        (SHARE, [0, 0.9], [1]),
        (PART, [0.1, 1], [0, 1.1]),
        (INSIDE, [0.5], [0, 1]),
    ],
)
def test_a_range_has_its_ends(range, inside, outside):
    assert all(one in range for one in inside)
    assert not any(one in range for one in [*outside, float("nan")])


def test_nobody_else_reads_tables():
    """Only the schema compares the names of a table with the fields of a class and their types."""
    home = Path(fedvlm.__file__).parent
    allowed = {"core/schema.py", "core/registry.py", "runner/bars.py"}  # traits; a single value
    found = set()
    for path in home.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check_type":
                found.add(path.relative_to(home).as_posix())
    assert found <= allowed
