"""Every command of the pages for beginners runs as it is written."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from typer.main import get_command

from fedvlm import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for kind in ("start", "tutorials") for path in (ROOT / "docs" / kind).glob("*.md"))
FIRST = {"hospitals": 1}  # how many blocks of "your own images" a page stands on
SERVERS = ("hospitals", "3-first-federation", "chest-films")  # with real processes
SHOWN = [("researcher", "researcher"), ("hospitals", "hospital")]
SHOWN += [("scikit-learn", "from_scikit_learn"), ("epsilon", "given_epsilon"), ("chest-films", "chest_films")]
LIMIT = 900  # seconds; most of a page with servers is waiting


def blocks(page):
    """Language and text of each fenced block."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"(?ms)^```(\S*)\n(.*?)^```$", text)


def marks(page):
    """All are in `make test-all`; pages with servers one after the other."""
    kind = [pytest.mark.slow]
    kind += [pytest.mark.deployed] if page.stem in SERVERS else []
    return [*kind, pytest.mark.timeout(LIMIT + 60)]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_pages_have_commands_and_no_block_that_is_not_run():
    assert len(PAGES) >= 5
    for page in PAGES:
        assert {kind for kind, _ in blocks(page)} == {"sh"}, page.name


@pytest.mark.parametrize(("page", "script"), SHOWN)
def test_a_tutorial_shows_the_script_that_it_runs(page, script):
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
    assert f":::{{literalinclude}} ../../examples/{script}.py\n" in text
    commands = [part for _, part in blocks(ROOT / "docs" / "tutorials" / f"{page}.md")]
    assert {f"python examples/{script}.py\n", f"python examples/{script}.py .\n"} & {*commands}
    starts = re.findall(r"(?m)^:start-at: (.*)$", text)
    source = (ROOT / "examples" / f"{script}.py").read_text(encoding="utf-8")
    assert [source.count(start) for start in starts] == [1], "where the shown part begins is not clear"
    assert f"docs/tutorials/{page}.md" in source


@pytest.mark.parametrize("page", [pytest.param(p, marks=marks(p), id=p.stem) for p in PAGES])
def test_commands_run_as_written(page, tmp_path):
    commands = [text for _, text in blocks(ROOT / "docs" / "start" / "2-own-images.md")]
    lines = [*commands[: FIRST.get(page.stem, 0)], *(text for _, text in blocks(page))]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    setting = {**os.environ, "PATH": path, "PORT": str(free_port())}
    command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
    log = tmp_path / "said"
    with log.open("w") as out:
        script = subprocess.Popen(command, cwd=tmp_path, env=setting, stdout=out, stderr=out, start_new_session=True)
        try:
            code = script.wait(LIMIT)
        finally:
            end_group(script.pid)
    assert code == 0, log.read_text()[-3000:]


@pytest.mark.slow
def test_examples_of_the_readme_run_as_they_stand(tmp_path):
    [shell] = [text for kind, text in blocks(ROOT / "README.md") if kind == "sh"]
    [python] = [text for kind, text in blocks(ROOT / "README.md") if kind == "python"]
    images = blocks(ROOT / "docs" / "start" / "2-own-images.md")[0][1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = f"{images}\n{shell}\npython -c '{python}'\n"
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "images/north/circle/0.png," in done.stdout
    assert (tmp_path / "classifiers" / "noto" / "classifier.safetensors").exists()


def end_group(pid):
    """What a page left running, servers too, ends with it."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)


def shown_commands():
    """Every `fedvlm …` of a fenced block of any page, with the page's name."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for _, text in blocks(page):
            joined = re.sub(r"\\\n\s*", "", text)
            for line in re.findall(r"(?m)^(?:\$ |[A-Z_]+=\S+ )*(fedvlm .*)$", joined):
                yield page.name, line.partition("  #")[0]


def test_every_command_of_every_page_exists_with_its_options():
    app = get_command(cli.app)
    shown = list(shown_commands())
    assert len(shown) > 100
    for page, line in shown:
        command, words = app, line.split()[1:]
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{page}: {line}"
            command = command.commands[words.pop(0)]
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            option = word.partition("=")[0]
            if option.startswith("--"):
                assert option in {*options, "--help"}, f"{page}: {line}"
