"""The commands that put our numbers beside those of the papers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlm.cli.progress import progress
from fedvlm.cli.run import Set, fail

if TYPE_CHECKING:
    from fedvlm.record import Record
    from fedvlm.runner.settings import Settings


def reproduce(
    item: Annotated[str, typer.Argument(help="A table or figure, as fedot-v1/T1.")],
    smoke: Annotated[bool, typer.Option(help="Short runs on few rows.")] = False,
    form: Annotated[str, typer.Option(help="text, markdown, latex; csv, json")] = "text",
    data: Annotated[str | None, typer.Option(help="Other data, as demo.")] = None,
    encoder: Annotated[str | None, typer.Option(help="`fedvlm list encoders`")] = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the records.")] = None,
    again: Annotated[bool, typer.Option(help="Also what is finished.")] = False,
) -> None:
    """Run a paper's table or figure, and print it with our numbers beside the printed ones."""
    from fedvlm.report.reproduce import settings_of_item
    from fedvlm.runner.forecast import needs
    from fedvlm.runner.run import default_name, together
    from fedvlm.runner.sweep import run_all

    given: dict[str, Any] = {"data": data, "encoder": encoder, "smoke": smoke or None}
    given = {key: value for key, value in given.items() if value is not None}
    named, settings = settings_of_item(item, given, set_ or [])

    def say(note: str) -> None:
        typer.echo(note, err=True)

    say(f"{item} by {', '.join(named)}")
    for line in needs(settings):
        say(line)
    with progress() as report:

        def place(one: "Settings") -> Path:
            name = default_name(one, None)
            there = (Path("runs") / experiment / name for experiment in named)
            begun = next((path for path in there if path.exists()), None)  # by `fedvlm run`
            return out / name if out else begun or Path("runs") / name

        def go(all: "Sequence[Settings]", enduring: bool) -> "Sequence[Record | Exception]":
            asked = [(one, place(one)) for one in all]
            return together(asked, again, None, report, None, say, enduring)

        results, failed = run_all(settings, (), go, enduring=True)
    typer.echo(table_of(item, results, form), nl=False)
    say("records: " + ", ".join(str(one.folder) for one in results))
    fail(failed)


def table_of(item: str, results: "Sequence[Record]", form: str) -> str:
    """The paper's table; of an item in which nothing is printed, ours with what it shows."""
    from fedvlm.report import long
    from fedvlm.report.beside import paper_table
    from fedvlm.report.columns import COLUMNS
    from fedvlm.report.papers import find, numbers
    from fedvlm.report.tables import compare

    if numbers()[item]:
        return paper_table(item, results, form)
    needed = [need.removeprefix("column:") for need in find(item).needs]
    ours = compare(results, form, asked=[name for name in needed if name in COLUMNS])
    return ours if form in long.FORMS else paper_table(item, results, form) + ours
