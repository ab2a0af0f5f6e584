"""Tables in three forms say the same."""

import pytest

from fedvlm.errors import SettingsError
from fedvlm.report.tables import compare_table, format_cell, render_table

HEAD = ["method", "G"]
BODY = [["a_b (x=1)", "12.34 ± 0.50"], ["c", "-"]]


def test_text_and_markdown_are_aligned():
    for form in ("text", "markdown"):
        lines = render_table(HEAD, BODY, form).splitlines()
        assert len({len(line) for line in lines if not line.endswith("-")}) <= 2
    assert render_table(HEAD, BODY, "markdown").splitlines()[1] == "| --------- | -----------: |"


def test_what_is_said_below_a_markdown_table_is_no_row_of_it(bad_runs, monkeypatch):
    monkeypatch.setattr(type(bad_runs[0]), "convergence_warnings", ["not there yet"])
    table, below = compare_table(bad_runs[:1], "markdown").split("\n\n")
    assert below == "zero-shot: not there yet\n" and table.count("\n") == 2
    assert "\n\n" not in compare_table(bad_runs[:1])


def test_latex_escapes_what_latex_reads():
    assert r"a\_b" in render_table(HEAD, BODY, "latex")


def test_cells_are_per_cent_with_two_digits():
    assert format_cell(0.12345, None, "text") == "12.35"
    assert format_cell(0.12345, 0.005, "text") == "12.35 ± 0.50"
    assert format_cell(0.12345, 0.005, "latex") == r"12.35 $\pm$ 0.50"
    assert format_cell(None, None, "text") == "-"


def test_an_unknown_form_and_no_runs_are_refused():
    with pytest.raises(SettingsError, match="did you mean 'markdown'"):
        compare_table([], "markdwn")
    with pytest.raises(SettingsError, match="no run is named"):
        compare_table([])
