"""The commands that run methods and print their table."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlm.cli.progress import progress

if TYPE_CHECKING:
    from fedvlm.record import Record
    from fedvlm.report.shown import Shown
    from fedvlm.runner.settings import Settings

NoReport = Annotated[bool, typer.Option("--no-report", help="Write no page of the result.")]
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
    out: Annotated[Path | None, typer.Option(help="Instead of runs/NAME.")] = None,
    smoke: Annotated[bool, typer.Option(help="A short run on few rows.")] = False,
    again: Annotated[bool, typer.Option(help="Also if it is finished.")] = False,
    allow_small: Annotated[
        bool, typer.Option("--allow-small", help="Upload statistics of few rows too.")
    ] = False,
    attack: Annotated[
        str | None, typer.Option(help="sign-flip, scale, label-flip, noise or collude: simulated.")
    ] = None,
    attacker_fraction: Annotated[float | None, typer.Option(help="Share of the clients.")] = None,
    attack_strength: Annotated[float | None, typer.Option(help="Of the attack.")] = None,
    no_report: NoReport = False,
    tune: Annotated[
        list[str] | None,
        typer.Option(help="Choose lr on validation rows, as own data's methods do; or none."),
    ] = None,
    no_baselines: Annotated[
        bool, typer.Option("--no-baselines", help="Without chance, zero-shot, alone and pooled.")
    ] = False,
    track: Annotated[
        list[str] | None, typer.Option(help="tensorboard:DIR or mlflow:ADDRESS; several may be.")
    ] = None,
    form: Annotated[str, typer.Option(help="text, markdown, latex; csv, json")] = "text",
    sweep: Sweep = None,
    on: Annotated[
        str, typer.Option(help="A cluster for the trainings: dask, dask://HOST:PORT.")
    ] = "",
) -> None:
    """Run a method (auto, if only --data is given) or an experiment, and print its table."""
    from fedvlm.errors import SettingsError, unknown
    from fedvlm.report.shown import key_of, remembered
    from fedvlm.report.tables import FORMS
    from fedvlm.runner.named import find

    if not (file or method or data or encoder):
        raise SettingsError("nothing to run; name a TOML file, or --method, or --data DIR for auto")
    if form not in FORMS:
        raise unknown("table form", form, FORMS)
    place = find(file) if file else None
    given: dict[str, Any] = {"data": data, "encoder": encoder, "smoke": smoke or None}
    given |= {
        "attack": attack,
        "attacker_fraction": attacker_fraction,
        "attack_strength": attack_strength,
    }
    given |= {"allow_small": allow_small or None, "tune": tune if tune != ["none"] else []}
    asked = {**given, "file": file, "method": method, "no_baselines": no_baselines}
    key = key_of(place, {**asked, "set": set_, "sweep": sweep, "tune": tune, "out": str(out)})
    home = out or Path("runs") / (Path(file).stem if file else _data_name(data, encoder))
    shown = None if again or track else remembered(home, key)
    if shown is None or not (no_report or (home / "report.html").exists()):
        from fedvlm.runner.settings import read_toml

        values: dict[str, Any] = read_toml(place) if place else {"method": "auto"}
        if method:
            values.pop("methods", None)
            given["method"] = method
        values |= {name: value for name, value in given.items() if value is not None}
        typed = (set_ or [], sweep or [], file is None and tune is None)
        options = (file, out, again, track or [], no_baselines, no_report, form, key, on)
        _run(values, typed, *options)
        return
    for one in shown.records[shown.bars :]:
        typer.echo(f"already finished, read from {one.folder}; --again runs it", err=True)
    _show(home, shown, form, None if no_report else home / "report.html")


def _run(
    values: dict[str, Any],
    typed: tuple[list[str], list[str], bool],  # assignments, sweep, whether a rate is tuned
    file: str | None,
    out: Path | None,
    again: bool,
    track: Sequence[str],
    no_baselines: bool,
    no_report: bool,
    form: str,
    key: str,
    on: str,
) -> None:
    """What was not shown before: runs it, shows it and remembers that."""
    from fedvlm.report.folder import write_folder
    from fedvlm.report.page.gather import gather
    from fedvlm.report.page.render import write_model
    from fedvlm.report.shown import Shown, remember
    from fedvlm.runner.bars import wants_bars

    written, settings, over = _settings(values, *typed)
    # Bars are of one federation: a sweep over anything but a method's settings has several.
    one_world = all(key.startswith("method.") for key in over)
    beside = wants_bars(values) and not no_baselines and one_world
    home = out or Path("runs") / _name(file, settings[0])
    results, failed, marks = _all(settings, over, home, out, beside, again, track, on)
    runs = [*marks, *results]
    words = {"paper": values.get("paper"), "traffic": values.get("traffic", False)}
    words |= {"asked": over, "chance": beside}
    write_folder(home, {**written, **({"baselines": False} if no_baselines else {})}, runs, **words)
    title = values.get("title") or ""
    command = f"fedvlm run {shlex.quote(file)}" if file else ""
    model = gather(runs, title, values.get("paper"), command)
    sentences = model["sentences"] if len(runs) > 1 and one_world else []
    shown = Shown([str(one.folder) for one in runs], len(marks), words, title, sentences)
    if not failed:
        remember(home, key, shown)
    _show(home, shown, form, None if no_report else write_model(model, home / "report.html"))
    fail(failed)


def _show(home: Path, shown: "Shown", form: str, page: Path | None) -> None:
    from fedvlm.report.tables import compare

    def say(text: str) -> None:
        typer.echo(text, err=form != "text")  # then the table is all there is on stdout

    if shown.title:
        say(f"\n{shown.title}\n")
    records = shown.records
    typer.echo(compare(records, form, **shown.words), nl=False)
    if shown.sentences:
        say("\n".join(shown.sentences))
    say("records: " + ", ".join(str(one.folder) for one in records))
    say(_next_steps(home, records))
    say(f"table: {home / 'table.md'}, {home / 'table.json'}; asked: {home / home.name}.toml")
    if page is not None:
        say(f"report: {page}")


def fail(failed: Sequence[str]) -> None:
    """Names what failed while others were finished, and ends with 1 if anything did."""
    for one in failed:
        typer.echo(f"fedvlm: {one}", err=True)
    if failed:
        raise typer.Exit(1)


def _settings(
    values: Mapping[str, Any], assignments: list[str], sweep: Sequence[str], tunes: bool
) -> "tuple[dict[str, Any], list[Settings], list[str]]":
    """What is asked, as it would be written in a file; each run; what is swept over."""
    from fedvlm.runner.experiments import swept, unswept, whole
    from fedvlm.runner.sweep import built, expand, grid, read_sweep
    from fedvlm.runner.tune import by_default

    typed = read_sweep(sweep)
    values = {**values, "sweep": grid(values.get("sweep", {})) | typed}
    said = {text: text.partition("=")[0].strip() for text in assignments}
    fixed = [text for text, key in said.items() if key not in typed]
    over = swept(values, fixed)
    rows = unswept(values, fixed)
    settings = built(expand(rows, over), list(over))
    if tunes and "tune" not in over:
        raced = [by_default(one, [*said.values(), *over]) for one in settings]
        if all(one.tune for one in raced):  # points of a sweep are alike: all race, or none
            settings = raced
            rows = [{**one, "tune": list(raced[0].tune)} for one in rows]
    return whole({**values, "sweep": over}, rows), settings, list(over)


def _name(file: str | None, first: "Settings") -> str:
    """An experiment is called as its file, or else as its data."""
    return Path(file).stem if file else _data_name(first.data, first.encoder)


def _data_name(data: str | None, encoder: str | None) -> str:
    from fedvlm.storage.files import data_name

    return data_name(data or "", encoder or "")


def _places(
    settings: "Sequence[Settings]", home: Path, out: Path | None, sweeps: bool
) -> list[Path]:
    """The folder of each run: by its settings, or in a folder that was named by its number.

    A grid may grow, so that the number of a point says nothing.
    """
    from fedvlm.runner.run import default_name

    if out is None or sweeps:
        return [home / default_name(one, None) for one in settings]
    if len(settings) == 1:
        return [out]
    return [out / f"{number}-{one.method.name}" for number, one in enumerate(settings)]


def _all(
    settings: "Sequence[Settings]",
    over: Sequence[str],
    home: Path,
    out: Path | None,
    beside: bool,
    again: bool,
    track: Sequence[str],
    on: str,
) -> "tuple[list[Record], list[str], list[Record]]":
    """The runs, what hindered others, and the bars that stand beside them."""
    from fedvlm.runner.bars import bars
    from fedvlm.runner.run import default_name, together
    from fedvlm.runner.sweep import run_all
    from fedvlm.runner.track import Trackers

    def say(note: str) -> None:
        typer.echo(note, err=True)

    places = _places(settings, home, out, bool(over))
    names = {place.name: one.method.name for one, place in zip(settings, places, strict=True)}
    levels: list[tuple[Settings, Path]] = []
    trackers = Trackers(track)
    with progress() as report, closing(trackers):

        def listen(run: str, line: Mapping[str, Any]) -> None:
            report.hear(names[run], line)
            trackers(run, line)

        def go(all: "Sequence[Settings]", enduring: bool) -> "Sequence[Record | Exception]":
            asked = list(zip(all, places, strict=True))
            return together(asked, again, None, report, listen, say, enduring, on)

        results, failed = run_all(settings, over, go)
        for one in bars(settings, results[0]) if beside else ():
            place = out / "bars" / one.method.name if out else home / default_name(one, None)
            levels.append((one, place))
        marks = run_all(
            [one for one, _ in levels],
            (),
            lambda all, enduring: together(levels, again, progress=report, on=on),
        )[0]
    for note in trackers.notes:
        say(note)
    return results, failed, marks


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
