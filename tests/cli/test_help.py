"""The help of every command is complete at 80 columns, and its examples can be typed."""

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fedvlm.cli import app

WIDTH = 80
# Former or private names of options, and what other tools call them.
UNUSUAL = {"--out", "--form", "--again", "--keep", "--half", "--share"}


def walk(command, path=()):
    """Yield every command and group with the words that call it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


COMMANDS = dict(walk(get_command(app)))
GROUPS = {path: command for path, command in COMMANDS.items() if hasattr(command, "commands")}
LEAVES = {path: command for path, command in COMMANDS.items() if path not in GROUPS}


def spell(path):
    return " ".join(("fedvlm", *path))


def render(path):
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": str(WIDTH)}, prog_name="fedvlm")
    assert done.exit_code == 0
    return done.output


def example_lines(path):
    _, title, text = render(path).rpartition("Example")
    assert title, f"{spell(path)} --help has no example"
    return [line.strip() for line in text.splitlines()[1:] if line.strip()]


@pytest.mark.parametrize("path", COMMANDS, ids=spell)
def test_no_line_of_a_help_is_cut_or_too_long(path):
    for line in render(path).splitlines():
        assert "…" not in line
        assert len(line) <= WIDTH, line


@pytest.mark.parametrize("path", GROUPS, ids=spell)
def test_a_group_shows_each_command_with_its_whole_sentence_on_one_line(path):
    lines = [line.rstrip() for line in render(path).splitlines()]
    for name, command in GROUPS[path].commands.items():
        sentence = command.help.split("\n\n")[0].replace("\n", " ").strip()
        assert any(re.fullmatch(rf"  {name} +{re.escape(sentence.removesuffix('.'))}\.?", line) for line in lines), name


@pytest.mark.parametrize("path", [(), ("deploy",)], ids=spell)
def test_commands_stand_in_sections_by_task(path):
    text = render(path)
    titles = {command.rich_help_panel for command in GROUPS[path].commands.values()}
    assert len(titles) >= 4 and all(f"\n{title}:\n" in text for title in titles)


@pytest.mark.parametrize("path", LEAVES, ids=spell)
def test_every_command_ends_with_examples_that_parse(path):
    lines = example_lines(path)
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert tuple(words[: len(path) + 1]) == ("fedvlm", *path), line
        with LEAVES[path].make_context(spell(path), words[len(path) + 1 :]) as context:
            assert context.params is not None


@pytest.mark.parametrize("path", LEAVES, ids=spell)
def test_every_parameter_has_a_help_and_a_usual_name(path):
    for parameter in LEAVES[path].params:
        assert parameter.help or "--help" in parameter.opts, f"{spell(path)} {parameter.name}"
        assert not UNUSUAL & {*parameter.opts, *parameter.secondary_opts}


def test_the_default_of_an_option_is_shown():
    assert "[default: 8443]" in render(("deploy", "init"))
    assert "[default: text]" in " ".join(render(("compare",)).split())
