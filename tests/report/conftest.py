"""Two small runs whose names are as bad as names get, and their page."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedvlm
from fedvlm.report.page.render import write_page
from tests.helpers.browser import chrome  # noqa: F401

CLASSES = ("<script>window.broken=1</script>", "\"'&<b>", "قطة سوداء", "long " * 40)
DOMAINS = {
    "art": "</script><script>window.broken=2</script>",
    "photo": '" onload="window.broken=3" x=\'',
    "sketch": "ص" * 200,
}


@pytest.fixture(scope="session")
def bad_runs(rows_like, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rows = rows_like()
    domains = np.array([DOMAINS[domain] for domain in rows.domains])
    rows = replace(rows, classes=CLASSES, domains=domains, name="<i>toy</i> & co", fingerprint="bad")
    settings = {"embedded": rows, "seeds": [0, 1]}
    return [
        fedvlm.run("zero-shot", out=folder / "0", **settings),
        fedvlm.run({"name": "fedavg", "rounds": 5, "lr": 0.1}, out=folder / "1", **settings),
        fedvlm.run({"name": "fedot", "rounds": 3}, out=folder / "2", **settings),
    ]


@pytest.fixture(scope="session")
def bad_page(bad_runs) -> Path:
    return write_page(bad_runs, bad_runs[0].folder.parent / "page.html")
