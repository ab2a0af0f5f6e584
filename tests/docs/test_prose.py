"""Pages are short paragraphs, and every link of a file outside the site leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = 120
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "generated" not in path.relative_to(ROOT).parts)
FRONT = sorted(ROOT.glob("*.md"))


def name(path):
    return str(path.relative_to(ROOT))


def paragraphs(text):
    """Prose and items of lists; code, tables and headings are none."""
    text = re.sub(r"(?ms)^([ ]*)(```+|:::+).*?^\1\2\s*$", "", text)
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if not re.match(r"\s*(\||#)", line)]
        for paragraph in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
            if paragraph.strip():
                yield paragraph


def too_long(text):
    return [
        f"{len(paragraph.split())} words: {' '.join(paragraph.split()[:8])} …"
        for paragraph in paragraphs(text)
        if len(paragraph.split()) > WORDS
    ]


def test_a_long_paragraph_is_found_and_a_long_table_is_none():
    long = "word " * (WORDS + 1)
    assert too_long(f"# Title\n\n{long}\n") and too_long(f"- short\n- {long}\n")
    assert not too_long(f"| {long} |\n\n```\n{long}\n```\n\n- {long[:300]}\n- {long[:300]}\n")


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=name)
def test_no_paragraph_has_more_than_120_words(path):
    assert not too_long(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [*PAGES, *FRONT], ids=name)
def test_every_link_leads_to_a_file(path):
    text = re.sub(r"(?ms)^```.*?^```", "", path.read_text(encoding="utf-8"))
    for goal in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text):
        if "://" not in goal and "generated/" not in goal:
            assert (path.parent / goal).exists(), f"{name(path)} links to {goal}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150
