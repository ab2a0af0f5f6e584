"""What people search for stands in a heading, which the site's search ranks first."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("differential privacy", "tutorials/epsilon.md"),
        ("epsilon", "tutorials/epsilon.md"),
        ("GPU", "how-to/devices.md"),
        ("cite", "index.md"),
        ("multi-label", "how-to/data.md"),
        ("proxy", "how-to/deploy.md"),
    ],
)
def test_a_search_finds_the_page(query, page):
    headings = re.findall(r"(?m)^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"))
    assert [title for title in headings if query.lower() in title.lower()], f"{page} has no heading with {query!r}"
