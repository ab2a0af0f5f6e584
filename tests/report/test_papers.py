"""The papers' numbers are whole, obey the sums they print, and name methods and data there are."""

import shutil
from collections import Counter
from dataclasses import fields
from pathlib import Path
from statistics import fmean

import pytest

from fedvlm.core import check_type, methods
from fedvlm.data.catalogue import catalogue
from fedvlm.errors import DataError, SettingsError
from fedvlm.report.papers import (
    ROUNDS,
    differences,
    find,
    folder,
    items,
    numbers,
)
from fedvlm.runner.named import experiments
from fedvlm.runner.settings import build, read_toml

COUNTS = {  # rows times columns of every table, counted in the documents; and numbers in the text
    "fedot-v1": {"T1": 140, "T2": 60, "T3": 30, "T5": 170, "T6": 255, "T7": 544, "T8": 816}
    | {"T9": 170, "T10": 255, "F5": 4},
    "fedot-v2": {"T1": 9, "T2": 15, "T3": 20, "T4": 30, "F5": 4},
    "faa-clip": {"TI": 20, "TII": 28, "TIII": 140, "TIV": 140, "TV": 140, "TVI": 119, "TVII": 45}
    | {"TVIII": 60, "TIX": 98, "F4": 3, "F8": 4},
    "fedotp": {"T1": 45, "T2": 35, "T3": 10, "T4": 30, "A1": 36, "A2": 60, "A3": 25, "A4": 120}
    | {"A5": 42},
    "tofa": {"T1": 55, "T2": 10, "T3": 108},
}
ITEMS = {"fedot-v1": 13, "fedot-v2": 9, "faa-clip": 18, "fedotp": 15, "tofa": 5}
EVERY = [one for many in numbers().values() for one in many]


def group(name, *keys):
    """The numbers of an item by row, data and settings, each a dict by column."""
    found = {}
    for one in numbers()[name]:
        key = (one.data, one.row, one.line if "line" in keys else repr(one.settings))
        found.setdefault(key, {})[one.column] = one
    return found


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
            for whole, each in (("G", "G "), ("C", "C, target "), ("kappa", "kappa, ")):
                if whole in row:
                    yield row[whole], [one for key, one in row.items() if key.startswith(each)]
    for name in ("T7", "T8"):
        for row in group(f"fedot-v1/{name}", "line").values():
            (whole,) = (one for key, one in row.items() if key.startswith("P, "))
            yield whole, [one for key, one in row.items() if key.startswith("A[")]
    for general, personal, both in (("T5", "T7", "T9"), ("T6", "T8", "T10")):
        parts = group(f"fedot-v1/{general}"), group(f"fedot-v1/{personal}")
        for key, row in group(f"fedot-v1/{both}").items():
            for column, one in row.items():
                unseen = column.removeprefix("C, target ")
                if unseen != column and one.method != "zero-shot":
                    yield (
                        one,
                        [parts[0][key][f"G {unseen}"], *[parts[1][key][f"P, target {unseen}"]] * 3],
                    )


def means_of_others():
    for name in ("TIII", "TIV", "TV", "TVI", "TVII", "TIX"):
        for row in group(f"faa-clip/{name}").values():
            for end in ("", " balanced", " F1"):
                if whole := row.get(f"average{end}"):
                    kind = end.strip()
                    yield whole, [one for key, one in row.items() if kind in key and one != whole]
    for name in ("fedotp/T2", "fedotp/A2", "fedotp/A3", "tofa/T3"):
        for row in group(name).values():
            yield row["own"], [one for key, one in row.items() if key != "own"]


@pytest.mark.parametrize("document", COUNTS)
def test_every_table_has_as_many_numbers_as_it_prints(document):
    found = {key: len(many) for key, many in numbers().items() if key.startswith(f"{document}/")}
    assert {key.split("/")[1]: count for key, count in found.items() if count} == COUNTS[document]
    assert len(found) == ITEMS[document]
    assert found == {key: items()[key].numbers for key in found}


def test_a_printed_mean_is_that_of_its_parts_or_is_not_ok():
    """A slip of a digit would show here: nearly all of the tables stand in some mean."""
    wrong = Counter()
    total = 0
    for whole, parts in means():
        total += 1
        assert len(parts) > 2 or whole.column == "C"
        if abs(whole.value - fmean(one.value for one in parts)) >= 0.0101:
            assert whole.status != "ok", whole
            wrong[whole.name] += 1
    assert total > 1000
    slips = {"fedot-v1/T1": 5, "fedot-v1/T5": 1, "fedot-v1/T7": 4, "fedot-v1/T8": 5}
    slips |= {"fedot-v1/T9": 6, "fedot-v1/T10": 6, "fedot-v2/T4": 1}
    assert wrong == slips | {"faa-clip/TIII": 2, "fedotp/A2": 1}


def test_the_overview_repeats_the_tables_of_the_appendix():
    """FedOT's table 1 names no variants; these are the rows whose numbers it has."""
    first = [one for one in numbers()["fedot-v1/T1"] if one.row not in ("FedOT", "FedOT(+B)")]
    assert {one.column for one in first} > {"G", "C"}
    for one in first:
        general, comprehensive = ("T5", "T9") if one.data in ("femnist", "pacs") else ("T6", "T10")
        if one.column != "P":
            name = f"fedot-v1/{general if one.column == 'G' else comprehensive}"
            (same,) = (
                other
                for other in numbers()[name]
                if (other.data, other.method, other.settings, other.column)
                == (one.data, one.method, one.settings, one.column)
            )
            assert same.value == one.value


def test_numbers_that_experiments_quote_are_among_the_papers():
    """They were typed by hand, before there were files, so that the two check each other."""
    quoted = 0
    for path in experiments().values():
        values = read_toml(path)
        printed = {
            (one.method, one.column, one.value) for one in EVERY if one.data == values.get("data")
        }
        for row, cells in values.get("paper", {}).items():
            method = row.split(" ")[0].rstrip(",")
            assert {(method, column, value) for column, value in cells.items()} <= printed, row
            quoted += len(cells)
    assert quoted > 100


def test_methods_and_settings_of_the_numbers_are_ours():
    known = methods()
    for one in {(one.method, repr(one.settings)): one for one in EVERY}.values():
        own = {key[7:]: one.settings[key] for key in one.settings if key.startswith("method.")}
        if one.method:
            types = {field.name: field.type for field in fields(known[one.method])}
            for key, value in own.items():
                check_type(key, value, types[key])
        else:
            assert not own
    others = {
        repr(found): found
        for one in EVERY
        if (found := {key: one.settings[key] for key in one.settings if key[:7] != "method."})
    }
    assert len(others) > 20
    for one in others.values():
        protocol = "source-target" if "target" in one else "own-test"
        clients = {key[8:]: one[key] for key in one if key.startswith("clients.")}
        rest = {key: one[key] for key in one if not key.startswith("clients.")}
        built = build({"method": "zero-shot", "protocol": protocol, "clients": clients, **rest})
        assert not differences(one, built.identity())


def test_data_of_the_numbers_are_in_the_catalogue():
    assert {one.data for one in EVERY} - {"mean of five"} <= set(catalogue())


def test_a_number_that_is_not_ok_says_why_and_every_one_says_its_line():
    assert all(one.why for one in EVERY if one.status != "ok")
    assert all(one.line > 0 and one.round in ROUNDS for one in EVERY)
    assert all(0 <= one.value <= 100 for one in EVERY if one.column in ("G", "P", "C", "own"))


def test_an_unknown_item_is_refused_with_the_nearest_ones():
    with pytest.raises(SettingsError, match=r"called 'fedot-v1/t1'; the nearest are fedot-v1/T1, "):
        find("fedot-v1/t1")
    with pytest.raises(SettingsError, match=r"called 'zzz'; `fedvlm list papers --json` names all"):
        find("zzz")


@pytest.mark.parametrize(
    ("file", "line", "old", "new", "says"),
    [
        ("fedot-v2.csv", 2, "78.53", "7b.53", "value = '7b.53' does not fit"),
        ("fedot-v2.csv", 2, "78.53", "nan", "value = 'nan' does not fit"),
        ("fedot-v2.csv", 3, "fedot", "fedot,", "it has 15 cells and not 14"),
        ("tofa.csv", 9, ",T1,", ",T11,", "tofa/T11 is no table or figure"),
        ("tofa.csv", 9, ",ok,", ",fine,", "status = 'fine' does not fit: it takes one of"),
        ("tofa.csv", 9, ",ok,", ",void,", "it is void, and does not say why"),
        ("tofa.csv", 9, "clients.shots = 16", "shots 16", "settings = 'shots 16' does not fit"),
        ("tofa.csv", 1, "why", "because", "its columns must be paper, version"),
        ("items.csv", 4, ",table,", ",picture,", "kind = 'picture' does not fit"),
        ("items.csv", 4, ",30,", ",many,", "numbers = 'many' does not fit"),
        ("items.csv", 11, "data =", "dta =", "it takes tables of data, methods and sweep"),
    ],
)
def test_a_broken_line_is_refused_with_its_file_and_number(tmp_path, file, line, old, new, says):
    place = tmp_path / "papers"
    shutil.copytree(folder(), place)
    text = (place / file).read_text().splitlines(keepends=True)
    assert old in text[line - 1]
    text[line - 1] = text[line - 1].replace(old, new, 1)
    (place / file).write_text("".join(text))
    with pytest.raises(DataError) as refused:
        numbers(place)
    told = str(refused.value)
    assert f"{file}, line {line}: " in told
    assert says in told


def test_a_number_that_is_there_twice_is_refused(tmp_path):
    place = tmp_path / "papers"
    shutil.copytree(folder(), place)
    with (place / "tofa.csv").open("a") as file:
        file.write((place / "tofa.csv").read_text().splitlines()[5] + "\n")
    with pytest.raises(DataError, match=r"tofa\.csv, line 175: this number is there twice"):
        numbers(place)


def test_a_missing_file_of_a_paper_is_refused(tmp_path):
    place = tmp_path / "papers"
    shutil.copytree(folder(), place)
    (place / "fedotp.csv").unlink()
    with pytest.raises(DataError, match=r"fedotp\.csv cannot be read"):
        numbers(place)


def test_papers_and_experiments_are_shipped_in_the_wheel_where_they_are_looked_for():
    import tomllib

    root = Path(__file__).parents[2]
    made = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    shipped = made["targets"]["wheel"]["force-include"]
    assert shipped == {"experiments": "fedvlm/experiment_files", "papers": "fedvlm/paper_files"}
    for place, code in (("papers", "report/papers.py"), ("experiments", "runner/named.py")):
        assert any((root / place).iterdir())
        name = shipped[place].removeprefix("fedvlm/")
        assert f'"{name}"' in (root / "src/fedvlm" / code).read_text()
