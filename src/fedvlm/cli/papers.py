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
    from fedvlm.report.papers import settings_of_item
    from fedvlm.runner.forecast import describe_requirements
    from fedvlm.runner.run import default_name, execute_all
    from fedvlm.runner.sweep import run_all

    overrides: dict[str, Any] = {"data": data, "encoder": encoder, "smoke": smoke or None}
    overrides = {key: value for key, value in overrides.items() if value is not None}
    named, settings = settings_of_item(item, overrides, set_ or [])

    def log(message: str) -> None:
        typer.echo(message, err=True)

    log(f"{item} by {', '.join(named)}")
    for line in describe_requirements(settings):
        log(line)
    with progress() as report:

        def place(run_settings: "Settings") -> Path:
            name = default_name(run_settings, None)
            candidates = (Path("runs") / experiment / name for experiment in named)
            existing = next((path for path in candidates if path.exists()), None)  # by `fedvlm run`
            return out / name if out else existing or Path("runs") / name

        def go(all: "Sequence[Settings]", keep_going: bool) -> "Sequence[Record | Exception]":
            requests = [(run_settings, place(run_settings)) for run_settings in all]
            return execute_all(requests, again, None, report, None, log, keep_going)

        results, failed = run_all(settings, (), go, keep_going=True)
    typer.echo(table_of(item, results, form), nl=False)
    log("records: " + ", ".join(str(record.folder) for record in results))
    fail(failed)


def table_of(item: str, results: "Sequence[Record]", form: str) -> str:
    """The paper's table; of an item in which nothing is printed, ours with what it shows."""
    from fedvlm.report import tables
    from fedvlm.report.columns import COLUMNS
    from fedvlm.report.paper_tables import paper_table
    from fedvlm.report.papers import find_item, numbers
    from fedvlm.report.tables import compare_table

    if numbers()[item]:
        return paper_table(item, results, form)
    column_names = [requirement.removeprefix("column:") for requirement in find_item(item).needs]
    table = compare_table(results, form, extra_columns=[name for name in column_names if name in COLUMNS])
    return table if form in tables.TIDY_FORMS else paper_table(item, results, form) + table
