"""Tables in three forms say the same."""

import pytest

from fedvlm.errors import SettingsError
from fedvlm.report.tables import cell, compare, render

HEAD = ["method", "G"]
BODY = [["a_b (x=1)", "12.34 ± 0.50"], ["c", "-"]]


def test_text_and_markdown_are_aligned():
    for form in ("text", "markdown"):
        lines = render(HEAD, BODY, form).splitlines()
        assert len({len(line) for line in lines if not line.endswith("-")}) <= 2
    assert render(HEAD, BODY, "markdown").splitlines()[1] == "| --------- | -----------: |"


def test_what_is_said_below_a_markdown_table_is_no_row_of_it(bad_runs, monkeypatch):
    monkeypatch.setattr(type(bad_runs[0]), "unsettled", ["not there yet"])
    table, below = compare(bad_runs[:1], "markdown").split("\n\n")
    assert below == "zero-shot: not there yet\n" and table.count("\n") == 2
    assert "\n\n" not in compare(bad_runs[:1])


def test_latex_escapes_what_latex_reads():
    assert r"a\_b" in render(HEAD, BODY, "latex")


def test_cells_are_per_cent_with_two_digits():
    assert cell(0.12345, None, "text") == "12.35"
    assert cell(0.12345, 0.005, "text") == "12.35 ± 0.50"
    assert cell(0.12345, 0.005, "latex") == r"12.35 $\pm$ 0.50"
    assert cell(None, None, "text") == "-"


def test_an_unknown_form_and_no_runs_are_refused():
    with pytest.raises(SettingsError, match="did you mean 'markdown'"):
        compare([], "markdwn")
    with pytest.raises(SettingsError, match="no run is named"):
        compare([])
