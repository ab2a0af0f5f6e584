"""A paper's table with ours in it: the right run in each cell, a verdict, and nothing left out."""

import csv
import io
from functools import cached_property
from pathlib import Path

import pytest

from fedvlm.errors import SettingsError
from fedvlm.record import Record
from fedvlm.report.beside import beside, items_of, paper_table, paper_tables
from fedvlm.report.coverage import reproducing
from fedvlm.report.papers import numbers
from fedvlm.report.tables import FORMS

PRINTED = [name for name, many in numbers().items() if many]


class Told(Record):
    """A finished run that says what it is told to."""

    def __init__(self, identity, tables, **more):
        super().__init__(Path("runs/told"))
        self.manifest = {"identity": identity, **more}
        self.said = tables

    @cached_property
    def tables(self):
        return self.said

    def lines(self):
        return []


def pacs(method="fedot", **settings):
    """The identity of a run as the experiment of PACS has it."""
    for one in reproducing()["fedot-v1/T3"]["pacs"]:
        if one["method"]["name"] == method and one["method"].get("head", "text") == "text":
            return {**one, **settings}
    raise AssertionError


def cell(result, column="G", row="TextEnc", data="pacs"):
    (found,) = (
        one
        for one in beside("fedot-v1/T3", [result])
        if (one.number.column, one.number.row, one.number.data) == (column, row, data)
    )
    return found


@pytest.mark.parametrize(
    ("ours", "word"),
    [(0.9468, "met"), (0.9530, "met"), (0.9370, "within noise"), (0.9366, "differs")],
)
def test_a_run_as_published_is_judged_by_its_number(ours, word):
    found = cell(Told(pacs(), [{"G": ours}]))  # the print is 94.68, without a deviation
    assert found.verdict.word == word
    assert found.difference == pytest.approx(100 * ours - 94.68)


def test_ours_is_the_mean_over_seeds_with_its_deviation():
    found = cell(Told(pacs(), [{"G": 0.94}, {"G": 0.96}]))
    assert found.ours == pytest.approx(95)
    assert found.deviation == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"smoke": True}, "a smoke run"),
        ({"data": "demo"}, "data is 'demo', not 'pacs'"),
        ({"encoder": "demo"}, "encoder is 'demo', not"),
    ],
)
def test_a_run_of_other_data_backbone_or_length_is_not_comparable(other, says):
    found = cell(Told(pacs(**other), [{"G": 0.99}]))
    assert found.verdict.word == "not comparable"
    assert says in found.verdict.why


def test_a_void_number_says_why():
    found = beside("fedot-v1/T3", [Told(pacs(data="femnist"), [{"G": 0.99}])])
    void = [one for one in found if one.number.data == "femnist" and one.number.status == "void"]
    assert void
    for one in void:
        if one.ours is not None:
            assert one.verdict.word == "void" and one.verdict.why == one.number.why


def test_of_several_runs_the_one_nearest_to_the_print_is_taken():
    runs = [Told(pacs(data="demo"), [{"G": 0.1}]), Told(pacs(), [{"G": 0.2}])]
    by_data = {
        one.number.data: one.ours
        for one in beside("fedot-v1/T3", runs)
        if (one.number.row, one.number.column) == ("TextEnc", "G")
    }
    assert by_data["pacs"] == pytest.approx(20)
    assert cell(runs[0]).ours == pytest.approx(10)


def test_a_row_nobody_ran_and_a_column_a_run_lacks_are_said():
    run = Told(pacs(), [{"G": 0.9}])
    assert cell(run, row="RandInit").verdict is None
    lacking = cell(run, column="P")
    assert (lacking.ours, lacking.verdict.word) == (None, "not comparable")
    assert "no column 'P'" in lacking.verdict.why
    assert "not run" in paper_table("fedot-v1/T3", [run])


def test_a_gain_is_what_a_run_has_more_than_zero_shot_beside_it():
    (one,) = (
        {k: v for k, v in run.items()}
        for run in reproducing()["fedot-v1/F5"]["femnist-cross-device-v1"]
        if run["method"]["name"] == "fedot"
    )
    base = {**one, "method": {"name": "zero-shot"}}
    runs = [
        Told(base, [{"unseen, n=2": 0.5}, {"unseen, n=2": 0.6}]),
        Told(one, [{"unseen, n=2": 0.6}, {"unseen, n=2": 0.8}]),
    ]
    found = {cell.number.column: cell.ours for cell in beside("fedot-v1/F5", runs)}
    assert found["gain, n=2"] == pytest.approx(15)
    alone = {cell.number.column: cell.ours for cell in beside("fedot-v1/F5", runs[1:])}
    assert alone["gain, n=2"] is None


@pytest.mark.parametrize("name", PRINTED)
def test_every_printed_number_has_its_place_in_the_layout_once(name):
    lines = paper_table(name, []).splitlines()[1:]
    cells = [
        text
        for line in lines
        if " printed " in f" {line} "
        for text in line.partition("printed")[2].split("  ")
        if text.strip() not in ("", "-")
    ]
    assert len(cells) == len(numbers()[name])
    assert max(map(len, lines)) < 260


@pytest.mark.parametrize("name", PRINTED)
def test_a_csv_has_a_line_per_number(name):
    rows = list(csv.DictReader(io.StringIO(paper_table(name, [], "csv"))))
    assert len(rows) == len(numbers()[name])
    assert {row["verdict"] for row in rows} == {"not run"}
    assert all(row["item"] == name for row in rows)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_ours_theirs_difference_and_verdict(form):
    text = paper_table("fedot-v1/T3", [Told(pacs(), [{"G": 0.94}, {"G": 0.96}])], form)
    for part in ("95.0" if form == "json" else "95.00", "1.41", "94.68", "0.32", "met"):
        assert part in text
    if form == "latex":
        assert r"95.00 $\pm$ 1.41" in text and text.startswith("% fedot-v1/T3")


def test_a_figure_without_numbers_says_so():
    assert "nothing is printed" in paper_table("fedot-v1/F2", [])


def test_items_are_those_that_the_manifests_name():
    first = Told(pacs(), [{}], reproduces=["fedot-v1/T1", "fedot-v1/T3"])
    other = Told(pacs(), [{}], reproduces=["fedot-v1/T3", "fedot-v2/T4"])
    assert items_of([first, other]) == ["fedot-v1/T1", "fedot-v1/T3", "fedot-v2/T4"]
    with pytest.raises(SettingsError, match="--item fedot-v1/T1"):
        items_of([Told(pacs(), [{}], reproduces=[])])
    both = paper_tables(["fedot-v1/T3", "fedot-v2/T4"], [first], "csv")
    assert both.count("printed deviation") == 1
    assert len(both.splitlines()) == 61


def test_rows_of_the_data_are_those_of_a_run_of_any_method():
    (identity,) = (
        one
        for one in reproducing()["faa-clip/TI"]["office-home-target"]
        if one["method"]["name"] == "zero-shot"
    )
    counts = {"Art": {"train": 2000, "test": 427}, "Clipart": {"train": 4000, "test": 300}}
    found = {one.number.column: one for one in beside("faa-clip/TI", [Told(identity, [{}])])}
    assert found["rows Art"].verdict.why == "the run has no column 'rows Art'"
    told = Told(identity, [{}], clients=counts)
    found = {
        one.number.column: one
        for one in beside("faa-clip/TI", [told])
        if one.number.data == "office-home"
    }
    assert (found["rows Art"].ours, found["rows Art"].verdict.word) == (2427, "met")
    assert found["rows Clipart"].verdict.word == "differs"  # 65 of 4365 are missing
    smoke = Told({**identity, "smoke": True}, [{}], clients=counts)
    assert {one.verdict.why for one in beside("faa-clip/TI", [smoke])} == {"a smoke run"}
