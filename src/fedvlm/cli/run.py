"""The commands that run methods and print their table."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlm.cli.progress import progress

if TYPE_CHECKING:
    from fedvlm.record import Record
    from fedvlm.runner.settings import Settings

NoReport = Annotated[bool, typer.Option("--no-report", help="Write no page of the result.")]
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
    out: Annotated[Path | None, typer.Option(help="Instead of runs/NAME.")] = None,
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
    form: Annotated[str, typer.Option(help="text, markdown, latex; csv, json")] = "text",
) -> None:
    """Run a method (auto, if only --data is given) or an experiment, and print its table."""
    from fedvlm.errors import SettingsError, unknown
    from fedvlm.report.folder import write_folder
    from fedvlm.report.page.gather import gather
    from fedvlm.report.page.render import write_model
    from fedvlm.report.tables import FORMS, compare
    from fedvlm.runner.bars import wants_bars
    from fedvlm.runner.experiments import find, whole
    from fedvlm.runner.settings import read_toml

    if not (file or method or data or encoder):
        raise SettingsError("nothing to run; name a TOML file, or --method, or --data DIR for auto")
    if form not in FORMS:
        raise unknown("table form", form, FORMS)
    values: dict[str, Any] = read_toml(find(file)) if file else {"method": "auto"}
    given: dict[str, Any] = {"data": data, "encoder": encoder, "smoke": smoke or None}
    given |= {"attack": attack, "attackers": attackers, "strength": strength}
    given |= {"allow_small": allow_small or None, "tune": tune if tune != ["none"] else []}
    if method:
        values.pop("methods", None)
        given["method"] = method
    values |= {key: value for key, value in given.items() if value is not None}
    every, settings = _settings(values, set_ or [], file is None and tune is None)
    beside = wants_bars(values) and not no_bars
    home = out or Path("runs") / _name(file, settings[0])
    results, marks = _all(settings, home, out, beside, again, track or [])
    shown = [*marks, *results]
    words = {"paper": values.get("paper"), "traffic": values.get("traffic", False)}
    asked = {**whole(values, every), **({"bars": False} if no_bars else {})}
    write_folder(home, asked, shown, **words, chance=beside)

    def say(text: str) -> None:
        typer.echo(text, err=form != "text")  # then the table is all there is on stdout

    if title := values.get("title"):
        say(f"\n{title}\n")
    typer.echo(compare(shown, form, **words, chance=beside), nl=False)
    command = f"fedvlm run {shlex.quote(file)}" if file else ""
    model = gather(shown, title or "", values.get("paper"), command)
    if len(shown) > 1:
        say("\n".join(model["sentences"]))
    say("records: " + ", ".join(str(one.folder) for one in shown))
    say(_next_steps(home, shown))
    say(f"table: {home / 'table.md'}, {home / 'table.json'}; asked: {home / home.name}.toml")
    if not no_report:
        say(f"report: {write_model(model, home / 'report.html')}")


def _settings(
    values: Mapping[str, Any], assignments: list[str], tunes: bool
) -> "tuple[list[dict[str, Any]], list[Settings]]":
    """Each run as it would be written in a file, and as it is."""
    from fedvlm.runner.experiments import runs
    from fedvlm.runner.settings import build, override
    from fedvlm.runner.tune import by_default

    every = [override(one, assignments) for one in runs(values)]
    settings = [build(one) for one in every]
    if tunes:
        said = [text.partition("=")[0].strip() for text in assignments]
        settings = [by_default(one, said) for one in settings]
        for one, built in zip(every, settings, strict=True):
            if built.tune:
                one["tune"] = list(built.tune)
    return every, settings


def _name(file: str | None, first: "Settings") -> str:
    """An experiment is called as its file, or else as its data."""
    from fedvlm.runner.run import data_name

    return Path(file).stem if file else data_name(first)


def _places(settings: "Sequence[Settings]", home: Path, out: Path | None) -> list[Path]:
    """The folder of each run: by its settings, or in a folder that was named by its number."""
    from fedvlm.runner.run import default_name

    if out is None:
        return [home / default_name(one, None) for one in settings]
    if len(settings) == 1:
        return [out]
    return [out / f"{number}-{one.method.name}" for number, one in enumerate(settings)]


def _all(
    settings: "Sequence[Settings]",
    home: Path,
    out: Path | None,
    beside: bool,
    again: bool,
    track: Sequence[str],
) -> "tuple[list[Record], list[Record]]":
    """The runs, and the bars that stand beside them."""
    from fedvlm.runner.bars import bars
    from fedvlm.runner.run import default_name, execute
    from fedvlm.runner.track import Trackers

    def say(note: str) -> None:
        typer.echo(note, err=True)

    results: list[Record] = []
    marks: list[Record] = []
    trackers = Trackers(track)
    with progress() as report:

        def listen(run: str, line: Mapping[str, Any]) -> None:
            report.hear(run, line)
            trackers(run, line)

        for one, place in zip(settings, _places(settings, home, out), strict=True):
            results.append(execute(one, place, again, None, report, listen, say))
        for one in bars(settings, results[0]) if beside else ():
            place = out / "bars" / one.method.name if out else home / default_name(one, None)
            marks.append(execute(one, place, again, progress=report))
    trackers.close()
    for note in trackers.notes:
        say(note)
    return results, marks


def _next_steps(home: Path, shown: "Sequence[Record]") -> str:
    """Three commands that are of use after a run, as they would be typed."""
    folders = [shlex.quote(str(one.folder)) for one in shown]
    several = [one for one in shown if one.folder == home] == []
    folder, run = shlex.quote(str(home)) if several else " ".join(folders), folders[-1]
    return "\n".join(
        [
            "next:",
            f"  fedvlm compare {folder} --columns balanced,F1,AUC,ECE",
            f"  fedvlm audit {run}",
            f"  fedvlm plot {run}",
        ]
    )
