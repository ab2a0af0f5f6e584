"""The page of benchmarks is written from the file of figures, and from nothing else."""

import json
import os
import re
import subprocess
import sys

import pytest

from tools import bench

SMALL = {
    "transport": {
        "day": "2026-01-02",
        "machine": "a made machine",
        "load": [0.1, 1.0],
        "rows": [
            {"what": "first", "figures": {"ms": 12.345, "off": 0.0}},
            {"what": "other", "figures": {"ratio": 1234.5}},
            {"what": "second", "figures": {"ms": 0.5, "off": 3.21e-7}},
            {"what": "a peer: skipped, pip: no", "figures": {}},
        ],
    }
}


def test_a_page_has_a_table_for_rows_with_the_same_figures():
    text = bench.page(SMALL)
    assert "|  | ms | off |\n| --- | --- | --- |\n| first | 12.3 | 0 |\n| second | 0.5 | 3e-07 |\n" in text
    assert "|  | ratio |\n| --- | --- |\n| other | 1,234 |\n" in text
    assert "\na peer: skipped, pip: no.\n" in text


def test_a_section_names_its_script_the_machine_and_its_load():
    text = bench.page(SMALL)
    assert "## transport\nWhat a transport plan costs beside the plain ways" in text
    assert "2026-01-02, a made machine; load 0.1 before and 1.0 after." in text


def test_the_page_in_the_docs_is_of_the_figures_beside_the_scripts():
    assert bench.PAGE.read_text(encoding="utf-8") == bench.page(json.loads(bench.RESULTS.read_text(encoding="utf-8")))


def test_a_line_is_printed_and_its_figures_are_kept(tmp_path):
    code = "from figures import report; report('a line', 'what', ms=1.5); report('more', 'other')"
    env = {**os.environ, "PYTHONPATH": str(bench.SCRIPTS), "FEDVLM_FIGURES": str(tmp_path / "f")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "a line\nmore\n"
    rows = [json.loads(line) for line in (tmp_path / "f").read_text().splitlines()]
    assert rows == [{"what": "what", "figures": {"ms": 1.5}}, {"what": "other", "figures": {}}]


@pytest.mark.parametrize("name", bench.scripts())
def test_every_benchmark_hands_its_figures_over(name):
    text = (bench.SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    assert re.search(r"^from figures import .*\breport\b", text, re.M) and "report(" in text


def test_the_quick_ones_are_benchmarks():
    assert set(bench.QUICK) <= set(bench.scripts())
