"""Commands that run methods and show what came out."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedvlm.cli.progress import progress

if TYPE_CHECKING:
    from fedvlm.record import Record

Set = Annotated[list[str] | None, typer.Option("--set", help="a.b=value over the settings.")]


def demo(
    out: Annotated[Path, typer.Option(help="Where the records go.")] = Path("runs/demo"),
) -> None:
    """Leave-one-domain-out on the embedded emoji: who generalises, who personalises."""
    run("demo", out=out)


def run(
    file: Annotated[str | None, typer.Argument(help="A TOML file or an experiment's name.")] = None,
    method: Annotated[str | None, typer.Option(help="`fedvlm list methods`")] = None,
    data: Annotated[str | None, typer.Option(help="`fedvlm list datasets`, or a path.")] = None,
    encoder: Annotated[str | None, typer.Option(help="`fedvlm list encoders`")] = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the record.")] = None,
    smoke: Annotated[bool, typer.Option(help="A short run on few rows.")] = False,
    again: Annotated[bool, typer.Option(help="Also if it is finished.")] = False,
    allow_small: Annotated[
        bool, typer.Option("--allow-small", help="Upload statistics of few rows too.")
    ] = False,
) -> None:
    """Run a method, or an experiment of several, and print its table."""
    from fedvlm.errors import SettingsError
    from fedvlm.report.tables import compare
    from fedvlm.runner.experiments import find, runs
    from fedvlm.runner.run import execute
    from fedvlm.runner.settings import build, override, read_toml

    if file is None and method is None:
        raise SettingsError("nothing to run; name a TOML file, or --method (`fedvlm list methods`)")
    values = read_toml(find(file)) if file else {}
    given = {"data": data, "encoder": encoder, "smoke": smoke or None}
    given["allow_small"] = allow_small or None
    if method:
        values.pop("methods", None)
        given["method"] = method
    values |= {key: value for key, value in given.items() if value is not None}
    every = runs(values)
    settings = [build(override(one, set_ or [])) for one in every]
    results: list[Record] = []
    with progress() as told:
        for number, one in enumerate(settings):
            place = out / f"{number}-{one.method.name}" if out and len(settings) > 1 else out
            results.append(execute(one, place, again, progress=told))
    for result in results:
        for note in result.manifest["notes"]:
            typer.echo(note, err=True)
    table = compare(results, paper=values.get("paper"), traffic=values.get("traffic", False))
    typer.echo(table, nl=False)
    typer.echo("records: " + ", ".join(str(one.folder) for one in results))


def resume(folder: Path) -> None:
    """Go on with a run that was stopped or killed."""
    from fedvlm.report.tables import compare
    from fedvlm.runner.run import resume as go_on

    with progress() as told:
        result = go_on(folder, told)
    typer.echo(compare([result]), nl=False)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    form: Annotated[str, typer.Option(help="text, markdown, latex or csv")] = "text",
    every: Annotated[bool, typer.Option("--all", help="Also per domain or client.")] = False,
    traffic: Annotated[bool, typer.Option(help="Also exchanges and kilobytes.")] = False,
) -> None:
    """Runs side by side: mean ± deviation over seeds, in per cent."""
    from fedvlm.record import Record
    from fedvlm.report.tables import compare as render

    table = render([Record(path) for path in runs], form, every, traffic=traffic)
    typer.echo(table, nl=False)


def plot(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    job: Annotated[str | None, typer.Option(help="One of its trainings; the first.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the run; its first.")] = None,
    out: Annotated[Path | None, typer.Option(help="The PNG file.")] = None,
) -> None:
    """Draw a run's reliability, its decision curve and its curves over the rounds."""
    from fedvlm.record import Record
    from fedvlm.report.diagrams import draw_diagrams

    path = draw_diagrams(Record(run), out or run / "diagrams.png", job, seed)
    typer.echo(f"picture: {path}")


def list_(
    what: Annotated[str, typer.Argument(help="methods, encoders, datasets, experiments, papers")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What there is to choose from."""
    from fedvlm.report.lists import LISTS
    from fedvlm.report.tables import render

    if what not in LISTS:
        from fedvlm.errors import unknown

        raise unknown("list", what, LISTS)
    rows = LISTS[what]()
    if not rows and not as_json:
        typer.echo(f"there are no {what}")
        return
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    head = [key for key, value in rows[0].items() if not isinstance(value, list)]
    typer.echo(
        render(head, [[str(row[key]) for key in head] for row in rows], "text", True), nl=False
    )
