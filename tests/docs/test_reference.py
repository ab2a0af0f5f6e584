"""The reference is made from the code: all of it is there, and comments of fields are read."""

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

import pytest

from fedvlm.channel.settings import Channel
from fedvlm.core import methods
from fedvlm.data.clients import Clients
from fedvlm.runner.settings import Settings
from tools.security_tests import PAGE, named_tests

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generate():
    sys.path.insert(0, str(DOCS))
    try:
        import generate

        yield generate
    finally:
        sys.path.remove(str(DOCS))


@dataclass
class Parent:
    first: int = 1  # beside
    # above, in
    # two lines
    second: tuple[str, str] = (
        "a",  # within
        "b",
    )
    third: str = "# not a comment"

    def work(self):
        first = 2  # not of the field
        return first


@dataclass
class Child(Parent):
    third: str = "c"  # its own
    lr: float = 0.1


def test_a_field_says_what_its_comments_say(generate):
    comments = generate.comments(Child)
    assert comments["first"] == "beside"
    assert comments["second"] == "above, in two lines within"
    assert comments["third"] == "its own"
    assert generate.comments(Parent)["third"] == ""
    assert comments["lr"] == "learning rate of a step", "words of a setting that engines read stand in"


def test_every_method_is_on_the_page_with_every_setting_explained(generate):
    page = "\n".join(generate.methods_page())
    for name, kind in methods().items():
        section = page[page.index(f"\n## {name}\n") :].split("\n## ")[1]
        rows = {line.split(" | ")[0][3:-1]: line for line in section.splitlines() if "| `" in line}
        assert list(rows) == [field.name for field in fields(kind)], name
        for setting, row in rows.items():
            assert not row.endswith("|  |"), f"{name}.{setting} has no comment in its class"


def test_every_setting_of_a_run_is_explained_with_its_choices(generate):
    rows = {line.split(" | ")[0]: line for line in generate.settings_page() if line.startswith("| `")}
    for kind in (Settings, Clients, Channel):
        for field in fields(kind):
            row = rows[f"| `{field.name}`"]
            assert not row.endswith("|  |"), f"{field.name} has no comment in its class"
            for word in get_args(field.type):
                assert not isinstance(word, str) or repr(word) in row, f"{field.name} = {word!r} is not on the page"


def test_the_appendix_is_made_from_its_tables(generate):
    papers = DOCS / "papers"
    page = (papers / "appendix.md").read_text(encoding="utf-8")
    assert generate.appendix_page(page, papers / "tables") == page, "run: python docs/generate.py"
    named = re.findall(r'"([\w-]+\.csv)"', (papers / "tables" / "index.toml").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(path.name for path in (papers / "tables").glob("*.csv"))


def test_every_command_is_on_the_page(generate):
    page = "\n".join(generate.command_page())
    for command in ("run", "report", "cache verify", "deploy init", "deploy site"):
        assert f"\n## fedvlm {command}\n" in page


def test_pages_are_written_once_and_old_ones_go(generate, tmp_path):
    folder = tmp_path / "generated"
    generate.write(folder)
    (folder / "gone.md").write_text("# Gone\n")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.md")}
    generate.write(folder)
    after = {path: path.stat().st_mtime_ns for path in folder.glob("*.md")}
    assert after == {path: when for path, when in before.items() if path.name != "gone.md"}
    assert {path.stem for path in after} == set(generate.PAGES)


def test_the_privacy_page_has_the_upload_of_every_method(generate):
    page = (DOCS / "security" / "privacy.md").read_text(encoding="utf-8")
    assert generate.with_uploads(page, generate.uploads_table()) == page, "run: python docs/generate.py"


def test_the_tests_that_the_security_page_names_exist():
    rows = named_tests(PAGE.read_text(encoding="utf-8"))
    assert len(rows) > 20
    for against, files in rows:
        assert files, against
        assert [name for name in files if not (PAGE.parents[2] / "tests" / name).exists()] == [], against


def test_every_rule_and_error_code_of_a_site_is_on_its_page(generate):
    page = "\n".join(generate.policy_page())
    for name in (*generate.RULE_TEXTS, *generate.ERROR_MESSAGES):
        assert f"| `{name}` |" in page
    assert {field.name for field in fields(generate.Policy)} == set(generate.RULE_TEXTS)
