"""Tables of results are written by a command, and name the experiment they are of."""

import re

import pytest

from fedvlm.runner.experiment_files import experiments, read_toml
from fedvlm.runner.experiments import experiment_runs
from fedvlm.runner.run import execute
from tools.tables import BLOCK, PAGES, named, rewritten, table_of

MARKED = [
    pytest.param(page, match, id=f"{page.stem}-{match['name']}")
    for page in PAGES
    for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
]


def test_tables_are_marked_and_every_mark_has_its_end():
    assert len(MARKED) >= 4
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for mark in ("<!-- table: ", "<!-- table ends -->"):
            assert len(re.findall(f"(?m)^{mark}", text)) == len(named(text)), page.name


@pytest.mark.parametrize(("page", "match"), MARKED)
def test_a_marked_table_is_of_an_experiment_and_has_a_row_for_each_of_its_methods(page, match):
    assert match["name"] in experiments(), f"{page.name} has a table of no experiment"
    methods = [run["method"]["name"] for run in experiment_runs(read_toml(experiments()[match["name"]]))]
    lines = [line.lstrip("| ").split(" ")[0] for line in match["body"].splitlines()]
    assert [line for line in lines if line in methods] == methods


def test_only_what_is_between_the_marks_is_written_anew():
    text = "# A\n\n<!-- table: demo -->\nold\n<!-- table ends -->\n\nold\n"
    once = rewritten(text, lambda name, plain: f"{name} {plain}\n")
    assert once == text.replace("old", "demo False", 1)
    assert rewritten(once, lambda name, plain: f"{name} {plain}\n") == once
    plain = text.replace("demo -->", "demo, text -->")
    assert "demo True" in rewritten(plain, lambda name, plain: f"{name} {plain}\n")


def test_a_table_is_what_the_runs_of_the_experiment_say(tmp_path, monkeypatch, rows_like):
    small = {"title": "small", "methods": [{"name": "zero-shot"}], "seeds": [0]}
    monkeypatch.setattr("tools.tables.read_toml", lambda path: small)
    monkeypatch.setattr("tools.tables.execute", lambda settings, place: execute(settings, place, embedded=rows_like()))
    made = table_of("demo", tmp_path, plain=False)
    assert made.startswith("\n| method ") and made.endswith("|\n\n")
    assert "| zero-shot " in made
    output = table_of("demo", tmp_path, plain=True)
    assert output.startswith("```\nsmall\n\nmethod ") and output.endswith("\n```\n")
