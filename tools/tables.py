"""Runs the experiments that pages name and writes their tables into the pages: `make tables`.

A table stands between `<!-- table: EXPERIMENT -->` and `<!-- table ends -->`; with `, text` behind
the name it is what a terminal shows. `--runs DIR` keeps the records there, and a run that is
finished there is not run again; names leave all other tables as they are.
"""

import argparse
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from fedvlm.report.page.model import build_model
from fedvlm.report.tables import compare_table
from fedvlm.runner.experiment_files import find_experiment, read_toml
from fedvlm.runner.experiments import experiment_runs
from fedvlm.runner.run import execute
from fedvlm.runner.settings import build
from fedvlm.storage.files import write_file

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"(?ms)^<!-- table: (?P<name>[\w-]+)(?P<text>, text)? -->\n(?P<body>.*?)^<!-- table ends -->$")


def named(text: str) -> list[str]:
    """The experiments whose tables a page has."""
    return [match["name"] for match in BLOCK.finditer(text)]


def rewritten(text: str, table: Callable[[str, bool], str]) -> str:
    """A page with the tables that `table` gives for a name, and whether as on a terminal."""

    def block(match: re.Match[str]) -> str:
        head = f"<!-- table: {match['name']}{match['text'] or ''} -->"
        return f"{head}\n{table(match['name'], bool(match['text']))}<!-- table ends -->"

    return BLOCK.sub(block, text)


def table_of(name: str, folder: Path, plain: bool) -> str:
    """What the runs of an experiment come to; those that the folder has are read."""
    values = read_toml(find_experiment(name))
    results = []
    for number, run_settings in enumerate(map(build, experiment_runs(values))):
        results.append(execute(run_settings, folder / name / f"{number}-{run_settings.method.name}"))
    words = {"paper": values.get("paper"), "traffic": values.get("traffic", False)}
    if not plain:
        return "\n" + compare_table(results, "markdown", **words) + "\n"
    parts = [values.get("title", name), "", compare_table(results, **words).rstrip("\n")]
    return "\n".join(["```", *parts, *build_model(results)["sentences"], "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="experiments; all that pages name if none")
    parser.add_argument("--runs", type=Path, help="where the records are kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as passing:
        made: dict[tuple[str, bool], str] = {}
        for page in PAGES:
            before = page.read_text(encoding="utf-8")
            bodies = {(match["name"], bool(match["text"])): match["body"] for match in BLOCK.finditer(before)}
            for key, body in bodies.items():
                if args.names and key[0] not in args.names:
                    made[key] = body
                elif key not in made:
                    made[key] = table_of(key[0], args.runs or Path(passing), key[1])
            after = rewritten(before, lambda name, plain: made[name, plain])
            if after != before:
                write_file(page, after.encode())
                print(f"{page.relative_to(ROOT)}: {', '.join(named(after))}")


if __name__ == "__main__":
    main()
