"""The papers' numbers are whole, obey the sums they print, and name methods and data there are."""

import csv
from collections import Counter
from dataclasses import fields
from math import isfinite
from pathlib import Path
from statistics import fmean

import pytest

from fedvlm.core import check_type, methods
from fedvlm.data.catalogue import catalogue
from fedvlm.errors import SettingsError
from fedvlm.report.papers import differences, find_item, items, numbers, papers_folder
from fedvlm.runner.experiment_files import experiments, read_toml
from fedvlm.runner.settings import build

COUNTS = {  # rows times columns of every table, counted in the documents; and numbers in the text
    "fedot-v1": {"T1": 140, "T2": 60, "T3": 30, "T5": 170, "T6": 255, "T7": 544, "T8": 816}
    | {"T9": 170, "T10": 255, "F5": 4},
    "fedot-v2": {"T1": 9, "T2": 15, "T3": 20, "T4": 30, "F5": 4},
    "faa-clip": {"TI": 20, "TII": 28, "TIII": 140, "TIV": 140, "TV": 140, "TVI": 119, "TVII": 45}
    | {"TVIII": 60, "TIX": 98, "F4": 3, "F8": 4},
    "fedotp": {"T1": 45, "T2": 35, "T3": 10, "T4": 30, "A1": 36, "A2": 60, "A3": 25, "A4": 120} | {"A5": 42},
    "tofa": {"T1": 55, "T2": 10, "T3": 108},
}
ITEMS = {"fedot-v1": 13, "fedot-v2": 9, "faa-clip": 18, "fedotp": 15, "tofa": 5}
ALL_NUMBERS = [number for printed in numbers().values() for number in printed]


def group(name, *keys):
    """The numbers of an item by row, data and settings, each a dict by column."""
    groups = {}
    for number in numbers()[name]:
        key = (number.data, number.row, number.line if "line" in keys else repr(number.settings))
        groups.setdefault(key, {})[number.column] = number
    return groups


def means():
    """Every printed mean with the numbers, and their weights, that it is the mean of."""
    yield from means_of_fedot()
    yield from means_of_others()


def means_of_fedot():
    for name in ("fedot-v1/T1", "fedot-v1/T3", "fedot-v2/T4"):
        for row in group(name).values():
            if "P" in row:
                yield row["C"], [row["G"], *[row["P"]] * 3]
    for name in ("T2", "T5", "T6", "T9", "T10"):
        for row in group(f"fedot-v1/{name}").values():
            for mean, prefix in (("G", "G "), ("C", "C, target "), ("kappa", "kappa, ")):
                if mean in row:
                    yield row[mean], [number for key, number in row.items() if key.startswith(prefix)]
    for name in ("T7", "T8"):
        for row in group(f"fedot-v1/{name}", "line").values():
            (mean,) = (number for key, number in row.items() if key.startswith("P, "))
            yield mean, [number for key, number in row.items() if key.startswith("A[")]
    for general, personal, combined in (("T5", "T7", "T9"), ("T6", "T8", "T10")):
        parts = group(f"fedot-v1/{general}"), group(f"fedot-v1/{personal}")
        for key, row in group(f"fedot-v1/{combined}").items():
            for column, number in row.items():
                unseen = column.removeprefix("C, target ")
                if unseen != column and number.method != "zero-shot":
                    yield (number, [parts[0][key][f"G {unseen}"], *[parts[1][key][f"P, target {unseen}"]] * 3])


def means_of_others():
    for name in ("TIII", "TIV", "TV", "TVI", "TVII", "TIX"):
        for row in group(f"faa-clip/{name}").values():
            for end in ("", " balanced", " F1"):
                if mean := row.get(f"average{end}"):
                    kind = end.strip()
                    yield mean, [number for key, number in row.items() if kind in key and number != mean]
    for name in ("fedotp/T2", "fedotp/A2", "fedotp/A3", "tofa/T3"):
        for row in group(name).values():
            yield row["own"], [number for key, number in row.items() if key != "own"]


@pytest.mark.parametrize("document", COUNTS)
def test_every_table_has_as_many_numbers_as_it_prints(document):
    counts = {key: len(printed) for key, printed in numbers().items() if key.startswith(f"{document}/")}
    assert {key.split("/")[1]: count for key, count in counts.items() if count} == COUNTS[document]
    assert len(counts) == ITEMS[document]
    assert counts == {key: items()[key].numbers for key in counts}


def test_a_printed_mean_is_that_of_its_parts_or_is_not_ok():
    """A slip of a digit would show here: nearly all of the tables stand in some mean."""
    wrong = Counter()
    total = 0
    for mean, parts in means():
        total += 1
        assert len(parts) > 2 or mean.column == "C"
        if abs(mean.value - fmean(number.value for number in parts)) >= 0.0101:
            assert mean.status != "ok", mean
            wrong[mean.name] += 1
    assert total > 1000
    slips = {"fedot-v1/T1": 5, "fedot-v1/T5": 1, "fedot-v1/T7": 4, "fedot-v1/T8": 5}
    slips |= {"fedot-v1/T9": 6, "fedot-v1/T10": 6, "fedot-v2/T4": 1}
    assert wrong == slips | {"faa-clip/TIII": 2, "fedotp/A2": 1}


def test_the_overview_repeats_the_tables_of_the_appendix():
    """FedOT's table 1 names no variants; these are the rows whose numbers it has."""
    first = [number for number in numbers()["fedot-v1/T1"] if number.row not in ("FedOT", "FedOT(+B)")]
    assert {number.column for number in first} > {"G", "C"}
    for number in first:
        general, comprehensive = ("T5", "T9") if number.data in ("femnist", "pacs") else ("T6", "T10")
        if number.column != "P":
            name = f"fedot-v1/{general if number.column == 'G' else comprehensive}"
            (same,) = (
                detailed
                for detailed in numbers()[name]
                if (detailed.data, detailed.method, detailed.settings, detailed.column)
                == (number.data, number.method, number.settings, number.column)
            )
            assert same.value == number.value


def test_numbers_that_experiments_quote_are_among_the_papers():
    """They were typed by hand, before there were files, so that the two check each other."""
    quoted = 0
    for path in experiments().values():
        values = read_toml(path)
        printed = {
            (number.method, number.column, number.value) for number in ALL_NUMBERS if number.data == values.get("data")
        }
        for row, cells in values.get("paper", {}).items():
            method = row.split(" ")[0].rstrip(",")
            assert {(method, column, value) for column, value in cells.items()} <= printed, row
            quoted += len(cells)
    assert quoted > 100


def test_methods_and_settings_of_the_numbers_are_ours():
    known_methods = methods()
    for number in {(number.method, repr(number.settings)): number for number in ALL_NUMBERS}.values():
        settings = {key[7:]: number.settings[key] for key in number.settings if key.startswith("method.")}
        if number.method:
            types = {field.name: field.type for field in fields(known_methods[number.method])}
            for key, value in settings.items():
                check_type(key, value, types[key])
        else:
            assert not settings
    other_settings = {
        repr(extra): extra
        for number in ALL_NUMBERS
        if (extra := {key: number.settings[key] for key in number.settings if key[:7] != "method."})
    }
    assert len(other_settings) > 20
    for number in other_settings.values():
        protocol = "source-target" if "target" in number else "own-test"
        clients = {key[8:]: number[key] for key in number if key.startswith("clients.")}
        rest = {key: number[key] for key in number if not key.startswith("clients.")}
        built = build({"method": "zero-shot", "protocol": protocol, "clients": clients, **rest})
        assert not differences(number, built.identity())


def test_data_of_the_numbers_are_in_the_catalogue():
    assert {number.data for number in ALL_NUMBERS} - {"mean of five"} <= set(catalogue())


def test_a_number_that_is_not_ok_says_why_and_every_one_says_its_line():
    assert all(number.reason for number in ALL_NUMBERS if number.status != "ok")
    assert all(
        number.line > 0 and number.round in ("", "last", "validation", "oracle", "not said") for number in ALL_NUMBERS
    )
    assert all(0 <= number.value <= 100 for number in ALL_NUMBERS if number.column in ("G", "P", "C", "own"))


def test_an_unknown_item_is_refused_with_the_nearest_ones():
    with pytest.raises(SettingsError, match=r"called 'fedot-v1/t1'; the nearest are fedot-v1/T1, "):
        find_item("fedot-v1/t1")
    with pytest.raises(SettingsError, match=r"called 'zzz'; `fedvlm list papers --json` names all"):
        find_item("zzz")


def test_items_and_numbers_are_of_known_kinds_and_there_once():
    assert all(item.kind in ("table", "figure") for item in items().values())
    assert all(set(grid) <= {"data", "methods", "sweep"} for item in items().values() for grid in item.wants)
    assert all(isfinite(number.value) for number in ALL_NUMBERS)
    assert {number.status for number in ALL_NUMBERS} <= {"ok", "void", "copied"}
    assert all(number.name in items() and number.paper == items()[number.name].paper for number in ALL_NUMBERS)
    keys = [(n.name, n.row, n.data, n.method, repr(n.settings), n.column) for n in ALL_NUMBERS]
    assert len(set(keys)) == len(keys)


def test_items_are_listed_once():
    with (papers_folder() / "items.csv").open(encoding="utf-8", newline="") as file:
        assert len(items()) == len(list(csv.DictReader(file)))


def test_papers_and_experiments_are_shipped_in_the_wheel_where_they_are_looked_for():
    import tomllib
    from inspect import getsource

    from fedvlm.runner.experiment_files import experiment_folders

    root = Path(__file__).parents[2]
    made = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    shipped = made["targets"]["wheel"]["force-include"]
    assert shipped == {"experiments": "fedvlm/experiment_files"}
    assert '"experiment_files"' in getsource(experiment_folders)
    assert list((root / "experiments").glob("*.toml")) and list((root / "experiments" / "papers").glob("*.csv"))
    assert papers_folder() == root / "experiments" / "papers"
