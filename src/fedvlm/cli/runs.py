"""Commands that run methods and show what came out."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlm.cli.progress import progress

if TYPE_CHECKING:
    from fedvlm.record import Record

NoReport = Annotated[bool, typer.Option("--no-report", help="Write no page of the result.")]
COLUMNS = 100  # of a list of methods
Sweep = Annotated[
    list[str] | None, typer.Option(help="a.b=1,2,3: a run for each value; several make a grid.")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="a.b=value over the settings.")]


def demo(
    out: Annotated[Path, typer.Option(help="Where the records go.")] = Path("runs/demo"),
    no_report: NoReport = False,
) -> None:
    """Two questions to the embedded emoji: a site nobody has seen, and sites that differ."""
    for name, folder in (("demo", "unseen"), ("demo-shift", "shift")):
        run(name, out=out / folder, no_report=no_report)


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
    attack: Annotated[
        str | None, typer.Option(help="sign-flip, scale, label-flip, noise or collude: simulated.")
    ] = None,
    attackers: Annotated[float | None, typer.Option(help="Share of the clients.")] = None,
    strength: Annotated[float | None, typer.Option(help="Of the attack.")] = None,
    no_report: NoReport = False,
    tune: Annotated[
        list[str] | None,
        typer.Option(help="Choose rate on validation rows, as own data's methods do; or none."),
    ] = None,
    no_bars: Annotated[
        bool, typer.Option("--no-bars", help="Without chance, zero-shot, alone and pooled.")
    ] = False,
    track: Annotated[
        list[str] | None, typer.Option(help="tensorboard:DIR or mlflow:ADDRESS; several may be.")
    ] = None,
    sweep: Sweep = None,
) -> None:
    """Run a method (auto, if only --data is given) or an experiment, and print its table."""
    from fedvlm.errors import SettingsError
    from fedvlm.report.page.gather import gather
    from fedvlm.report.page.render import write_model
    from fedvlm.report.tables import compare
    from fedvlm.runner.bars import bars, wants_bars
    from fedvlm.runner.experiments import find, runs, swept
    from fedvlm.runner.run import default_name, execute
    from fedvlm.runner.settings import Settings, read_toml
    from fedvlm.runner.sweep import built, grid, read_sweep, run_all
    from fedvlm.runner.track import Trackers
    from fedvlm.runner.tune import by_default

    if not (file or method or data or encoder):
        raise SettingsError("nothing to run; name a TOML file, or --method, or --data DIR for auto")
    values: dict[str, Any] = read_toml(find(file)) if file else {"method": "auto"}
    given: dict[str, Any] = {"data": data, "encoder": encoder, "smoke": smoke or None}
    given |= {"attack": attack, "attackers": attackers, "strength": strength}
    given |= {"allow_small": allow_small or None, "tune": tune if tune != ["none"] else []}
    if method:
        values.pop("methods", None)
        given["method"] = method
    values |= {key: value for key, value in given.items() if value is not None}
    asked = read_sweep(sweep or [])
    values["sweep"] = grid(values.get("sweep", {})) | asked
    fixed = [text for text in set_ or [] if text.partition("=")[0].strip() not in asked]
    over = list(swept(values, fixed))
    settings = built(runs(values, fixed), over)
    if file is None and tune is None:
        said = [text.partition("=")[0].strip() for text in set_ or []]
        settings = [by_default(one, [*said, *over]) for one in settings]
    # Bars are of one federation: a sweep over anything but a method's settings has several.
    one_world = all(key.startswith("method.") for key in over)
    beside = wants_bars(values) and not no_bars and one_world
    marks: list[Record] = []
    trackers = Trackers(track or [])

    def say(note: str) -> None:
        typer.echo(note, err=True)

    with progress() as report:

        def go(number: int, one: Settings) -> "Record":
            name = default_name(one, None) if over else f"{number}-{one.method.name}"
            place = out / name if out and len(settings) > 1 else out
            return execute(one, place, again, None, report, trackers if track else None, say)

        results, failed = run_all(settings, over, go)
        for one in bars(settings, results[0]) if beside else ():
            place = out / "bars" / one.method.name if out else None
            marks.append(execute(one, place, again, progress=report))
    trackers.close()
    for note in trackers.notes:
        say(note)
    shown = [*marks, *results]
    words = {"paper": values.get("paper"), "traffic": values.get("traffic", False)}
    table = compare(shown, **words, asked=over, chance=beside)
    if title := values.get("title"):
        typer.echo(f"\n{title}\n")
    typer.echo(table, nl=False)
    command = f"fedvlm run {shlex.quote(file)}" if file else ""
    model = gather(shown, title or "", values.get("paper"), command)
    if len(shown) > 1 and one_world:
        typer.echo("\n".join(model["sentences"]))
    typer.echo("records: " + ", ".join(str(one.folder) for one in shown))
    typer.echo(next_steps(shown))
    if not no_report:
        typer.echo(f"report: {write_model(model, page_of(results, out))}")
    fail(failed)


def fail(failed: Sequence[str]) -> None:
    """Names what failed while others were finished, and ends with 1 if anything did."""
    for one in failed:
        typer.echo(f"fedvlm: {one}", err=True)
    if failed:
        raise typer.Exit(1)


def next_steps(results: "Sequence[Record]") -> str:
    """Three commands that are of use after a run, as they would be typed."""
    folders = [shlex.quote(str(one.folder)) for one in results]
    return "\n".join(
        [
            "next:",
            f"  fedvlm compare {' '.join(folders)} --columns balanced,F1,AUC,ECE",
            f"  fedvlm audit {folders[-1]}",
            f"  fedvlm plot {folders[-1]}",
        ]
    )


def page_of(results: "Sequence[Record]", out: Path | None) -> Path:
    """Where the page of some runs goes: into the one run's folder, or beside them."""
    first = results[0].folder
    if len(results) == 1:
        return first / "report.html"
    return (out or first.parent) / "report.html"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file.")] = None,
    title: Annotated[str, typer.Option(help="What the page is called.")] = "",
) -> None:
    """Write runs as one page that needs no network: tables, curves, clients, how it was run."""
    from fedvlm.record import Record
    from fedvlm.report.page.render import write_page

    results = [Record(path) for path in runs]
    typer.echo(f"report: {write_page(results, out or page_of(results, None), title)}")


def resume(folder: Path) -> None:
    """Go on with a run that was stopped or killed."""
    from fedvlm.report.tables import compare
    from fedvlm.runner.run import resume as go_on

    with progress() as report:
        result = go_on(folder, report)
    typer.echo(compare([result]), nl=False)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or pages of them.")],
    form: Annotated[str, typer.Option(help="text, markdown, latex or csv")] = "text",
    every: Annotated[bool, typer.Option("--all", help="Also per domain or client.")] = False,
    traffic: Annotated[bool, typer.Option(help="Also exchanges and kilobytes.")] = False,
    columns: Annotated[
        str, typer.Option(help="More of them, as balanced,F1,kappa,worst,method.rate.")
    ] = "",
    paper: Annotated[bool, typer.Option(help="The papers' tables, with ours beside.")] = False,
    item: Annotated[str, typer.Option(help="This table or figure, as fedot-v1/T1.")] = "",
) -> None:
    """Runs side by side: mean ± deviation over seeds, in per cent."""
    from fedvlm.report.page.render import read_runs
    from fedvlm.report.tables import compare as render

    results = [one for path in runs for one in read_runs(path)]
    if paper or item:
        from fedvlm.report.beside import items_of, paper_tables

        typer.echo(paper_tables([item] if item else items_of(results), results, form), nl=False)
        return
    asked = [name.strip() for name in columns.split(",") if name.strip()]
    table = render(results, form, every, traffic=traffic, asked=asked)
    typer.echo(table, nl=False)


def list_(
    what: Annotated[str, typer.Argument(help="methods, encoders, datasets, experiments, papers")],
    name: Annotated[str, typer.Argument(help="One of them, of which all is told.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What there is to choose from."""
    from fedvlm.report.lists import LISTS
    from fedvlm.report.tables import render

    if what not in LISTS:
        from fedvlm.errors import unknown

        raise unknown("list", what, LISTS)
    rows = LISTS[what]()
    if name:
        rows = [row for row in rows if str(next(iter(row.values()))) == name]
        if not rows:
            from fedvlm.errors import unknown

            raise unknown(what, name, [str(next(iter(row.values()))) for row in LISTS[what]()])
    if not rows and not as_json:
        typer.echo(f"there are no {what}")
        return
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    if name:
        for key, value in rows[0].items():
            typer.echo(f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
        return
    head = [key for key, value in rows[0].items() if not isinstance(value, list)]
    body = [[str(row[key]) for key in head] for row in rows]
    if what == "methods":
        head, body = ["method", "what"], _narrow([[row["method"], row["what"]] for row in rows])
    typer.echo(render(head, body, "text", True), nl=False)


def _narrow(body: list[list[str]]) -> list[list[str]]:
    """Two columns that fit a screen; `list methods NAME` has what is cut off."""
    first = max(len("method"), *(len(row[0]) for row in body))
    room = COLUMNS - first - 2
    return [
        [name, what if len(what) <= room else what[: room - 1].rstrip() + "…"]
        for name, what in body
    ]
