"""A paper's table with ours in it: the right run in each cell, a verdict, and nothing left out."""

import csv
import io
from functools import cached_property
from pathlib import Path

import pytest

from fedvlm.errors import SettingsError
from fedvlm.record import Record
from fedvlm.report.paper_tables import compare_with_paper, items_of, paper_table, paper_tables
from fedvlm.report.papers import numbers, runs_by_item
from fedvlm.report.tables import TABLE_FORMS

PRINTED = [name for name, printed in numbers().items() if printed]


class StubRecord(Record):
    """A finished run that says what it is told to."""

    def __init__(self, identity, tables, **manifest):
        super().__init__(Path("runs/told"))
        self.manifest = {"identity": identity, **manifest}
        self.said = tables

    @cached_property
    def tables(self):
        return self.said

    def lines(self):
        return []


def pacs(method="fedot", **settings):
    """The identity of a run as the experiment of PACS has it."""
    for identity in runs_by_item()["fedot-v1/T3"]["pacs"]:
        if identity["method"]["name"] == method and identity["method"].get("head", "text") == "text":
            return {**identity, **settings}
    raise AssertionError


def cell(result, column="G", row="TextEnc", data="pacs"):
    (match,) = (
        cell
        for cell in compare_with_paper("fedot-v1/T3", [result])
        if (cell.number.column, cell.number.row, cell.number.data) == (column, row, data)
    )
    return match


@pytest.mark.parametrize(
    ("measured", "word"), [(0.9468, "met"), (0.9530, "met"), (0.9370, "within noise"), (0.9366, "differs")]
)
def test_a_run_as_published_is_judged_by_its_number(measured, word):
    match = cell(StubRecord(pacs(), [{"G": measured}]))  # the print is 94.68, without a deviation
    assert match.verdict.word == word
    assert match.difference == pytest.approx(100 * measured - 94.68)


def test_ours_is_the_mean_over_seeds_with_its_deviation():
    match = cell(StubRecord(pacs(), [{"G": 0.94}, {"G": 0.96}]))
    assert match.measured == pytest.approx(95)
    assert match.deviation == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"smoke": True}, "a smoke run"),
        ({"data": "demo"}, "data is 'demo', not 'pacs'"),
        ({"encoder": "demo"}, "encoder is 'demo', not"),
    ],
)
def test_a_run_of_other_data_backbone_or_length_is_not_comparable(changes, message):
    match = cell(StubRecord(pacs(**changes), [{"G": 0.99}]))
    assert match.verdict.word == "not comparable"
    assert message in match.verdict.reason


def test_a_void_number_says_why():
    cells = compare_with_paper("fedot-v1/T3", [StubRecord(pacs(data="femnist"), [{"G": 0.99}])])
    void = [cell for cell in cells if cell.number.data == "femnist" and cell.number.status == "void"]
    assert void
    for cell in void:
        if cell.measured is not None:
            assert cell.verdict.word == "void" and cell.verdict.reason == cell.number.reason


def test_of_several_runs_the_one_nearest_to_the_print_is_taken():
    runs = [StubRecord(pacs(data="demo"), [{"G": 0.1}]), StubRecord(pacs(), [{"G": 0.2}])]
    by_data = {
        cell.number.data: cell.measured
        for cell in compare_with_paper("fedot-v1/T3", runs)
        if (cell.number.row, cell.number.column) == ("TextEnc", "G")
    }
    assert by_data["pacs"] == pytest.approx(20)
    assert cell(runs[0]).measured == pytest.approx(10)


def test_a_row_nobody_ran_and_a_column_a_run_lacks_are_said():
    run = StubRecord(pacs(), [{"G": 0.9}])
    assert cell(run, row="RandInit").verdict is None
    lacking = cell(run, column="P")
    assert (lacking.measured, lacking.verdict.word) == (None, "not comparable")
    assert "no column 'P'" in lacking.verdict.reason
    assert "not run" in paper_table("fedot-v1/T3", [run])


def test_a_gain_is_what_a_run_has_more_than_zero_shot_beside_it():
    (identity,) = (
        {k: v for k, v in run.items()}
        for run in runs_by_item()["fedot-v1/F5"]["femnist-cross-device-v1"]
        if run["method"]["name"] == "fedot"
    )
    base = {**identity, "method": {"name": "zero-shot"}}
    runs = [
        StubRecord(base, [{"unseen, n=2": 0.5}, {"unseen, n=2": 0.6}]),
        StubRecord(identity, [{"unseen, n=2": 0.6}, {"unseen, n=2": 0.8}]),
    ]
    measured = {cell.number.column: cell.measured for cell in compare_with_paper("fedot-v1/F5", runs)}
    assert measured["gain, n=2"] == pytest.approx(15)
    alone = {cell.number.column: cell.measured for cell in compare_with_paper("fedot-v1/F5", runs[1:])}
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


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_every_form_has_ours_theirs_difference_and_verdict(form):
    text = paper_table("fedot-v1/T3", [StubRecord(pacs(), [{"G": 0.94}, {"G": 0.96}])], form)
    for part in ("95.0" if form == "json" else "95.00", "1.41", "94.68", "0.32", "met"):
        assert part in text
    if form == "latex":
        assert r"95.00 $\pm$ 1.41" in text and text.startswith("% fedot-v1/T3")


def test_a_figure_without_numbers_says_so():
    assert "nothing is printed" in paper_table("fedot-v1/F2", [])


def test_items_are_those_that_the_manifests_name():
    first = StubRecord(pacs(), [{}], reproduces=["fedot-v1/T1", "fedot-v1/T3"])
    second = StubRecord(pacs(), [{}], reproduces=["fedot-v1/T3", "fedot-v2/T4"])
    assert items_of([first, second]) == ["fedot-v1/T1", "fedot-v1/T3", "fedot-v2/T4"]
    with pytest.raises(SettingsError, match="--item fedot-v1/T1"):
        items_of([StubRecord(pacs(), [{}], reproduces=[])])
    output = paper_tables(["fedot-v1/T3", "fedot-v2/T4"], [first], "csv")
    assert output.count("printed deviation") == 1
    assert len(output.splitlines()) == 61


def test_rows_of_the_data_are_those_of_a_run_of_any_method():
    (identity,) = (
        cell for cell in runs_by_item()["faa-clip/TI"]["office-home-target"] if cell["method"]["name"] == "zero-shot"
    )
    counts = {"Art": {"train": 2000, "test": 427}, "Clipart": {"train": 4000, "test": 300}}
    cells = {cell.number.column: cell for cell in compare_with_paper("faa-clip/TI", [StubRecord(identity, [{}])])}
    assert cells["rows Art"].verdict.reason == "the run has no column 'rows Art'"
    record = StubRecord(identity, [{}], clients=counts)
    cells = {
        cell.number.column: cell
        for cell in compare_with_paper("faa-clip/TI", [record])
        if cell.number.data == "office-home"
    }
    assert (cells["rows Art"].measured, cells["rows Art"].verdict.word) == (2427, "met")
    assert cells["rows Clipart"].verdict.word == "differs"  # 65 of 4365 are missing
    smoke = StubRecord({**identity, "smoke": True}, [{}], clients=counts)
    assert {cell.verdict.reason for cell in compare_with_paper("faa-clip/TI", [smoke])} == {"a smoke run"}
