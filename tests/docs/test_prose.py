"""Pages are short, in the field's words, and every link of a file outside the site leads somewhere."""

import re
from pathlib import Path

import pytest

from tools import prose

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "generated" not in path.relative_to(ROOT).parts)
FRONT = sorted(ROOT.glob("*.md"))
LIST = ", ".join(["`name`"] * 60)
LONG = "word " * (prose.MAX_PARAGRAPH_WORDS + 1)


def name(path):
    return str(path.relative_to(ROOT))


def test_every_page_passes():
    assert not prose.check(prose.pages())


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (f"# Title\n\n{'Word. ' * 91}\n", "paragraph of 91 words"),
        (f"- short\n- {LONG}\n", "sentence of 91 words"),
        (f"| a | {LONG} |\n|---|---|\n", "sentence of 91 words"),
        ("It has 20 training\nrows.", "write samples"),
        ("The deviation is 3.", "write standard deviation"),
        ("Both bars are [higher](x.md).", "write baselines"),
    ],
)
def test_long_and_private_words_are_found(text, finding):
    assert finding in "\n".join(prose.findings(text))


def test_code_headings_and_the_fields_own_words_pass():
    text = f"# {LONG}\n\n```\n{LONG}\n```\n\nA `hits` column, a standard deviation, a key exchange.\n\n{LIST}\n"
    assert not prose.findings(text)


def test_the_whole_is_counted_without_generated_tables(tmp_path):
    (tmp_path / "docs/generated").mkdir(parents=True)
    (tmp_path / "docs/generated/a.md").write_text(LONG)
    (tmp_path / "docs/b.md").write_text("two words | 2\n\n<!-- table: demo -->\nfour\n<!-- table ends -->\n")
    (tmp_path / "README.md").write_text("other\n")
    assert prose.total_words(prose.pages(tmp_path)) == 3
    too_long = {"docs/a.md": "word. " * (prose.MAX_WORDS + 1)}
    assert any("words by hand" in line for line in prose.check(too_long))


def test_a_page_begins_with_its_reader_and_a_guide_with_its_time():
    for page, text in prose.pages(ROOT).items():
        folder = Path(page).parent.name
        if Path(page).suffix == ".md" and page not in ("README.md", "docs/index.md"):
            opening = text.split("\n\n")[1]
            assert re.fullmatch(r"(?s)\*[^*].*\*", opening), f"{page} does not begin with whom it is for"
            if folder in ("start", "tutorials", "how-to"):
                assert re.search("(?i)minute|hour", opening), f"{page} does not say how long it takes"


@pytest.mark.parametrize("path", [*PAGES, *FRONT], ids=name)
def test_every_link_leads_to_a_file(path):
    text = re.sub(r"(?ms)^```.*?^```", "", path.read_text(encoding="utf-8"))
    for goal in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text):
        if "://" not in goal and "generated/" not in goal:
            assert (path.parent / goal).exists(), f"{name(path)} links to {goal}"
