"""The command that says what has left the clients of a run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedvlm.cli.progress import progress


def audit(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    training: Annotated[str | None, typer.Option(help="Of several trainings, which one.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of several seeds, which one.")] = None,
    form: Annotated[str, typer.Option(help="text, markdown, latex or csv")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="In the run's folder, for its report.")] = False,
) -> None:
    """What each client uploaded, and how well it tells who was in the training rows (AUC)."""
    from fedvlm.record import Record
    from fedvlm.report.tables import audit_table
    from fedvlm.report.tables import write_audit as store
    from fedvlm.runner.audit import audit as look

    with progress() as report:
        lines = look(run, training, seed, progress=report)
    if keep:
        store(Record(run), lines)
    if as_json:
        typer.echo(json.dumps(lines, indent=1, ensure_ascii=False))
    else:
        typer.echo(audit_table(lines, form), nl=False)
