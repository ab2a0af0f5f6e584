"""The commands that run methods and print their table."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlm.cli.options import Encoder, Force, Quiet, Set, Smoke, Source, TableFormat
from fedvlm.cli.progress import progress

if TYPE_CHECKING:
    from fedvlm.record import Record
    from fedvlm.report.experiment import FinishedExperiment
    from fedvlm.runner.settings import Settings


NoReport = Annotated[bool, typer.Option("--no-report", help="Do not write the report page.")]
Sweep = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=A,B,C", help="Run once per value of a setting; repeat for a grid."),
]


def demo(
    out: Annotated[Path, typer.Option("--output", "-o", help="Folder of the runs.")] = Path("runs/demo"),
    no_report: NoReport = False,
    quiet: Quiet = False,
) -> None:
    """Run the built-in demo (about a minute).

    It compares methods on emoji: at a site nobody has seen, and at sites with different classes.
    """
    for name, folder in (("demo", "unseen"), ("demo-shift", "shift")):
        run(name, out=out / folder, no_report=no_report)


def run(
    file: Annotated[str | None, typer.Argument(help="Experiment name or TOML file.")] = None,
    method: Annotated[str | None, typer.Option(help="Method (default: auto; see `fedvlm list methods`).")] = None,
    data: Annotated[str | None, typer.Option(help="Path of your data or a data set's name (default: demo).")] = None,
    encoder: Encoder = None,
    source: Source = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seed; repeat for several (default: 0).")] = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the run (default: runs/NAME).")] = None,
    smoke: Smoke = False,
    again: Force = False,
    allow_small: Annotated[
        bool, typer.Option("--allow-small", help="Also upload statistics of small classes.")
    ] = False,
    attack: Annotated[
        str | None, typer.Option(help="Simulate an attack: sign-flip, scale, label-flip, noise or collude.")
    ] = None,
    attacker_fraction: Annotated[
        float | None, typer.Option(help="Fraction of malicious clients (default: 0.1).")
    ] = None,
    attack_strength: Annotated[float | None, typer.Option(help="Strength of the attack (default: by kind).")] = None,
    no_report: NoReport = False,
    tune: Annotated[
        list[str] | None,
        typer.Option(help="Setting to tune on validation samples, e.g. lr, or none."),
    ] = None,
    no_baselines: Annotated[
        bool, typer.Option("--no-baselines", help="Leave out chance, zero-shot, alone and pooled.")
    ] = False,
    track: Annotated[
        list[str] | None, typer.Option(help="Log to tensorboard:DIR or mlflow:ADDRESS. Repeatable.")
    ] = None,
    form: TableFormat = "text",
    sweep: Sweep = None,
    on: Annotated[str, typer.Option(help="Cluster to train on: dask or dask://HOST:PORT.")] = "",
    quiet: Quiet = False,
) -> None:
    """Run a method or an experiment and print its table.

    Without --method your own data are run with auto. A finished run is read instead of repeated.
    """
    from fedvlm.errors import SettingsError, unknown_name
    from fedvlm.report.experiment import key_of, load_experiment
    from fedvlm.report.tables import TABLE_FORMS
    from fedvlm.runner.experiment_files import find_experiment

    if not (file or method or data or encoder):
        raise SettingsError("nothing to run; name a TOML file, or --method, or --data DIR for auto")
    if form not in TABLE_FORMS:
        raise unknown_name("table form", form, TABLE_FORMS)
    place = find_experiment(file) if file else None
    set_ = [*(set_ or []), *(f"source.{pair}" for pair in source or [])]
    overrides: dict[str, Any] = {"data": data, "encoder": encoder, "smoke": smoke or None, "seeds": seed or None}
    overrides |= {
        "attack": attack,
        "attacker_fraction": attacker_fraction,
        "attack_strength": attack_strength,
    }
    overrides |= {"allow_small": allow_small or None, "tune": tune if tune != ["none"] else []}
    request = {**overrides, "file": file, "method": method, "no_baselines": no_baselines}
    key = key_of(place, {**request, "set": set_, "sweep": sweep, "tune": tune, "out": str(out)})
    home = out or Path("runs") / (Path(file).stem if file else _data_name(data, encoder))
    earlier_output = None if again or track else load_experiment(home, key)
    if earlier_output is None or not (no_report or (home / "report.html").exists()):
        from fedvlm.runner.experiment_files import read_toml

        values: dict[str, Any] = read_toml(place) if place else {"method": "auto"}
        if method:
            values.pop("methods", None)
            overrides["method"] = method
        values |= {name: value for name, value in overrides.items() if value is not None}
        typed = (set_ or [], sweep or [], file is None and tune is None)
        options = (file, out, again, track or [], no_baselines, no_report, form, key, on)
        _run_and_show(values, typed, *options)
        return
    for record in earlier_output.records[earlier_output.n_baselines :]:
        typer.echo(f"already finished, read from {record.folder}; --force re-runs it", err=True)
    _show(home, earlier_output, form, None if no_report else home / "report.html")


def _run_and_show(
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
    from fedvlm.report.experiment import FinishedExperiment, store_experiment, write_folder
    from fedvlm.report.page.model import build_model
    from fedvlm.report.page.render import write_model
    from fedvlm.runner.experiments import wants_baselines

    written, settings, over = _settings(values, *typed)
    # Bars are of one federation: a sweep over anything but a method's settings has several.
    one_world = all(key.startswith("method.") for key in over)
    with_baselines = wants_baselines(values) and not no_baselines and one_world
    home = out or Path("runs") / _name(file, settings[0])
    results, failed, baselines = _execute_all(settings, over, home, out, with_baselines, again, track, on)
    runs = [*baselines, *results]
    words = {"paper": values.get("paper"), "traffic": values.get("traffic", False)}
    words |= {"extra_columns": over, "chance": with_baselines}
    write_folder(home, {**written, **({"baselines": False} if no_baselines else {})}, runs, **words)
    title = values.get("title") or ""
    command = f"fedvlm run {shlex.quote(file)}" if file else ""
    model = build_model(runs, title, values.get("paper"), command)
    sentences = model["sentences"] if len(runs) > 1 and one_world else []
    output = FinishedExperiment([str(record.folder) for record in runs], len(baselines), words, title, sentences)
    if not failed:
        store_experiment(home, key, output)
    _show(home, output, form, None if no_report else write_model(model, home / "report.html"))
    fail(failed)


def _show(home: Path, output: "FinishedExperiment", form: str, page: Path | None) -> None:
    from fedvlm.report.tables import compare_table

    def echo(text: str) -> None:
        typer.echo(text, err=form != "text")  # then the table is all there is on stdout

    if output.title:
        echo(f"\n{output.title}\n")
    records = output.records
    typer.echo(compare_table(records, form, **output.table_options), nl=False)
    if output.sentences:
        echo("\n".join(output.sentences))
    echo("records: " + ", ".join(str(record.folder) for record in records))
    echo(_next_steps(home, records))
    echo(f"table: {home / 'table.md'}, {home / 'table.json'}; asked: {home / home.name}.toml")
    if page is not None:
        echo(f"report: {page}")


def fail(failed: Sequence[str]) -> None:
    """Names what failed while others were finished, and ends with 1 if anything did."""
    for failure in failed:
        typer.echo(f"fedvlm: {failure}", err=True)
    if failed:
        raise typer.Exit(1)


def _settings(
    values: Mapping[str, Any], assignments: list[str], sweep: Sequence[str], tunes: bool
) -> "tuple[dict[str, Any], list[Settings], list[str]]":
    """What is asked, as it would be written in a file; each run; what is swept over."""
    from fedvlm.runner.experiments import (
        base_runs,
        build_all,
        expand,
        read_grid,
        read_sweep,
        swept_grid,
        to_file_values,
    )
    from fedvlm.runner.tune import with_default_tuning

    typed = read_sweep(sweep)
    values = {**values, "sweep": read_grid(values.get("sweep", {})) | typed}
    assigned_keys = {text: text.partition("=")[0].strip() for text in assignments}
    fixed = [text for text, key in assigned_keys.items() if key not in typed]
    over = swept_grid(values, fixed)
    rows = base_runs(values, fixed)
    settings = build_all(expand(rows, over), list(over))
    if tunes and "tune" not in over:
        tuned = [with_default_tuning(run_settings, [*assigned_keys.values(), *over]) for run_settings in settings]
        if all(run_settings.tune for run_settings in tuned):  # points of a sweep are alike: all race, or none
            settings = tuned
            rows = [{**run_settings, "tune": list(tuned[0].tune)} for run_settings in rows]
    return to_file_values({**values, "sweep": over}, rows), settings, list(over)


def _name(file: str | None, first: "Settings") -> str:
    """An experiment is called as its file, or else as its data."""
    return Path(file).stem if file else _data_name(first.data, first.encoder)


def _data_name(data: str | None, encoder: str | None) -> str:
    from fedvlm.storage.files import data_name

    return data_name(data or "", encoder or "")


def _run_folders(settings: "Sequence[Settings]", home: Path, out: Path | None, sweeps: bool) -> list[Path]:
    """The folder of each run: by its settings, or in a folder that was named by its number.

    A grid may grow, so that the number of a point says nothing.
    """
    from fedvlm.runner.run import default_name

    if out is None or sweeps:
        return [home / default_name(run_settings, None) for run_settings in settings]
    if len(settings) == 1:
        return [out]
    return [out / f"{number}-{run_settings.method.name}" for number, run_settings in enumerate(settings)]


def _execute_all(
    settings: "Sequence[Settings]",
    over: Sequence[str],
    home: Path,
    out: Path | None,
    with_baselines: bool,
    again: bool,
    track: Sequence[str],
    on: str,
) -> "tuple[list[Record], list[str], list[Record]]":
    """The runs, what hindered others, and the bars that stand beside them."""
    from fedvlm.runner.experiments import missing_baselines, run_all
    from fedvlm.runner.run import default_name, execute_all
    from fedvlm.runner.trackers import Trackers

    def log(message: str) -> None:
        typer.echo(message, err=True)

    places = _run_folders(settings, home, out, bool(over))
    names = {place.name: run_settings.method.name for run_settings, place in zip(settings, places, strict=True)}
    baseline_requests: list[tuple[Settings, Path]] = []
    trackers = Trackers(track)
    with progress() as report, closing(trackers):

        def listen(run: str, line: Mapping[str, Any]) -> None:
            report.update_status(names[run], line)
            trackers(run, line)

        def go(all: "Sequence[Settings]", keep_going: bool) -> "Sequence[Record | Exception]":
            requests = list(zip(all, places, strict=True))
            return execute_all(requests, again, None, report, listen, log, keep_going, on)

        results, failed = run_all(settings, over, go)
        for run_settings in missing_baselines(settings, results[0]) if with_baselines else ():
            place = out / "bars" / run_settings.method.name if out else home / default_name(run_settings, None)
            baseline_requests.append((run_settings, place))
        baselines = run_all(
            [run_settings for run_settings, _ in baseline_requests],
            (),
            lambda all, enduring: execute_all(baseline_requests, again, progress=report, on=on),
        )[0]
    for message in trackers.notes:
        log(message)
    return results, failed, baselines


def _next_steps(home: Path, records: "Sequence[Record]") -> str:
    """Three commands that are of use after a run, as they would be typed."""
    folders = [shlex.quote(str(record.folder)) for record in records]
    several = [record for record in records if record.folder == home] == []
    folder, run = shlex.quote(str(home)) if several else " ".join(folders), folders[-1]
    return "\n".join(
        [
            "next:",
            f"  fedvlm compare {folder} --columns balanced,F1,AUC,ECE",
            f"  fedvlm audit {run}",
            f"  fedvlm plot {run}",
        ]
    )


def reproduce(
    item: Annotated[str, typer.Argument(help="Table or figure, e.g. fedot-v1/T1 (see `fedvlm list papers`).")],
    smoke: Smoke = False,
    form: TableFormat = "text",
    data: Annotated[str | None, typer.Option(help="Use other data, e.g. demo.")] = None,
    encoder: Encoder = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the runs.")] = None,
    again: Force = False,
    quiet: Quiet = False,
) -> None:
    """Run a paper's table and compare it with the published one."""
    from fedvlm.report.papers import settings_of_item
    from fedvlm.runner.experiments import run_all
    from fedvlm.runner.forecast import describe_requirements
    from fedvlm.runner.run import default_name, execute_all

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
