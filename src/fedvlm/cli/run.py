"""Commands that run methods, experiments and the items of papers, and print their tables."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fedvlm.cli.options import Encoder, Force, Import, Quiet, Set, Smoke, Source, TableFormat, echo_error
from fedvlm.cli.progress import progress
from fedvlm.errors import SettingsError, unknown_name

if TYPE_CHECKING:
    from fedvlm.core import Method
    from fedvlm.record import Record
    from fedvlm.report.experiment import FinishedExperiment
    from fedvlm.runner.settings import Settings


NoReport = Annotated[bool, Option("--no-report", help="Do not write the report page.")]
Sweep = Annotated[
    list[str] | None, Option(metavar="KEY=A,B,C", help="Run once per value of a setting; repeat for a grid.")
]


@dataclass(frozen=True)
class _Command:
    """Options of a run's command that are not settings of the run."""

    file: str | None
    out: Path | None
    again: bool
    track: Sequence[str]
    no_baselines: bool
    no_report: bool
    form: str
    on: str
    key: str  # by which the result of the same command is found again


def demo(
    out: Annotated[Path, Option("--output", "-o", help="Folder of the runs.")] = Path("runs/demo"),
    no_report: NoReport = False,
    quiet: Quiet = False,
) -> None:
    """Run the built-in demo (about a minute).

    It compares methods on emoji: at a site nobody has seen, and at sites with different classes.
    """
    for name, folder in (("demo", "unseen"), ("demo-shift", "shift")):
        run(name, out=out / folder, no_report=no_report)


def run(
    file: Annotated[str | None, Argument(help="Experiment name or TOML file.")] = None,
    method: Annotated[str | None, Option(help="Method (default: auto; see `fedvlm list methods`).")] = None,
    data: Annotated[str | None, Option(help="Path of your data or a data set's name (default: demo).")] = None,
    encoder: Encoder = None,
    source: Source = None,
    seed: Annotated[list[int] | None, Option(help="Seed; repeat for several (default: 0).")] = None,
    set_: Set = None,
    out: Annotated[Path | None, Option("--output", "-o", help="Folder of the run (default: runs/NAME).")] = None,
    smoke: Smoke = False,
    again: Force = False,
    allow_small: Annotated[bool, Option("--allow-small", help="Also upload statistics of small classes.")] = False,
    attack: Annotated[
        str | None, Option(help="Simulate an attack: sign-flip, scale, label-flip, noise or collude.")
    ] = None,
    attacker_fraction: Annotated[float | None, Option(help="Fraction of malicious clients (default: 0.1).")] = None,
    attack_strength: Annotated[float | None, Option(help="Strength of the attack (default: by kind).")] = None,
    no_report: NoReport = False,
    tune: Annotated[list[str] | None, Option(help="Setting to tune on validation samples, e.g. lr, or none.")] = None,
    no_baselines: Annotated[
        bool, Option("--no-baselines", help="Leave out chance, zero-shot, alone and pooled.")
    ] = False,
    track: Annotated[list[str] | None, Option(help="Log to tensorboard:DIR or mlflow:ADDRESS. Repeatable.")] = None,
    form: TableFormat = "text",
    sweep: Sweep = None,
    on: Annotated[str, Option(help="Cluster to train on: dask or dask://HOST:PORT.")] = "",
    import_: Import = None,
    quiet: Quiet = False,
) -> None:
    """Run a method or an experiment and print its table.

    Without --method your own data are run with auto. A finished run is read instead of repeated.
    """
    from fedvlm.report.experiment import key_of, load_experiment
    from fedvlm.report.tables import TABLE_FORMS
    from fedvlm.runner.experiment_files import find_experiment, read_toml

    if not (file or method or data or encoder):
        raise SettingsError("nothing to run; name a TOML file, or --method, or --data DIR for auto")
    if form not in TABLE_FORMS:
        raise unknown_name("table form", form, TABLE_FORMS)
    if on:
        from fedvlm.runner.cluster import parse_address

        parse_address(on)
    path = find_experiment(file) if file else None
    assignments = [*(set_ or []), *(f"source.{pair}" for pair in source or [])]
    overrides: dict[str, Any] = {"data": data, "encoder": encoder, "smoke": smoke or None, "seeds": seed or None}
    overrides |= {"attack": attack, "attacker_fraction": attacker_fraction, "attack_strength": attack_strength}
    overrides |= {"allow_small": allow_small or None, "tune": tune if tune != ["none"] else []}
    request = {**overrides, "file": file, "method": method, "no_baselines": no_baselines, "out": str(out)}
    key = key_of(path, {**request, "set": assignments, "sweep": sweep})
    command = _Command(file, out, again, track or [], no_baselines, no_report, form, on, key)
    home = out or Path("runs") / (Path(file).stem if file else _data_name(data, encoder))
    earlier = None if again or track else load_experiment(home, key)
    if earlier is not None and (no_report or (home / "report.html").exists()):  # without importing torch
        for record in earlier.records[earlier.n_baselines :]:
            typer.echo(f"already finished, read from {record.folder}; --force re-runs it", err=True)
        _show(home, earlier, form, None if no_report else home / "report.html")
        return
    values: dict[str, Any] = read_toml(path) if path else {"method": "auto"}
    if method:
        values.pop("methods", None)
        overrides["method"] = method
    values |= {name: value for name, value in overrides.items() if value is not None}
    _run_and_show(values, assignments, sweep or [], command)


def _run_and_show(values: dict[str, Any], assignments: Sequence[str], sweep: Sequence[str], command: _Command) -> None:
    """Execute the runs, show their table, and store it for the same command."""
    from fedvlm.report.experiment import FinishedExperiment, store_experiment, with_earlier_runs, write_folder
    from fedvlm.report.page.model import build_model
    from fedvlm.report.page.render import write_model
    from fedvlm.runner.experiments import wants_baselines

    written, settings, swept = _settings(values, assignments, sweep)
    # Baselines belong to one federation: a sweep over other than a method's settings has several.
    one_federation = all(key.startswith("method.") for key in swept)
    with_baselines = wants_baselines(values) and not command.no_baselines and one_federation
    first = settings[0]
    name = Path(command.file).stem if command.file else _data_name(first.data, first.encoder)
    home = command.out or Path("runs") / name
    results, failed, baselines = _execute(settings, swept, home, with_baselines, command)
    runs = [*baselines, *results]
    options = {"paper": values.get("paper"), "traffic": values.get("traffic", False)}
    options |= {"extra_columns": swept, "chance": with_baselines}
    shown = with_earlier_runs(home, runs)
    write_folder(home, {**written, **({"baselines": False} if command.no_baselines else {})}, shown, **options)
    title = values.get("title") or ""
    reproduced_by = f"fedvlm run {shlex.quote(command.file)}" if command.file else ""
    model = build_model(shown, title, values.get("paper"), reproduced_by)
    compared = model if len(shown) == len(runs) else build_model(runs)
    sentences = compared["sentences"] if len(runs) > 1 and one_federation else []
    output = FinishedExperiment([str(record.folder) for record in runs], len(baselines), options, title, sentences)
    if not failed:
        store_experiment(home, command.key, output)
    _show(home, output, command.form, None if command.no_report else write_model(model, home / "report.html"))
    fail(failed)


def _show(home: Path, output: "FinishedExperiment", form: str, page: Path | None) -> None:
    from fedvlm.report.tables import compare_table

    def echo(text: str) -> None:
        typer.echo(text, err=form != "text")  # stdout then holds the table only

    if output.title:
        echo(f"\n{output.title}\n")
    records = output.records
    typer.echo(compare_table(records, form, **output.table_options), nl=False)
    if output.sentences:
        echo("\n".join(output.sentences))
    echo("records: " + ", ".join(str(record.folder) for record in records))
    echo(_next_steps(home, records))
    echo(f"table: {home / 'table.md'}, {home / 'table.json'}; settings: {home / home.name}.toml")
    if page is not None:
        echo(f"report: {page}")


def fail(failed: Sequence[str]) -> None:
    """Print the failures of some runs and exit with code 1, if there are any."""
    for failure in failed:
        typer.echo(f"fedvlm: {failure}", err=True)
    if failed:
        raise typer.Exit(1)


def _settings(
    values: Mapping[str, Any], assignments: Sequence[str], sweep: Sequence[str]
) -> "tuple[dict[str, Any], list[Settings], list[str]]":
    """Return the request as the values of a file, the settings of each run, and the swept settings."""
    from fedvlm.runner.experiments import (
        base_runs,
        build_all,
        expand,
        lists_to_sweep,
        read_grid,
        read_sweep,
        swept_grid,
        to_file_values,
    )

    typed = read_sweep(sweep)
    values = lists_to_sweep(values)
    values["sweep"] = read_grid(values.get("sweep", {})) | typed
    fixed = [text for text in assignments if text.partition("=")[0].strip() not in typed]
    grid = swept_grid(values, fixed)
    rows = base_runs(values, fixed)
    settings = build_all(expand(rows, grid), list(grid))
    return to_file_values({**values, "sweep": grid}, rows), settings, list(grid)


def _data_name(data: str | None, encoder: str | None) -> str:
    from fedvlm.storage.files import data_name

    return data_name(data or "", encoder or "")


def _execute(
    settings: "Sequence[Settings]", swept: Sequence[str], home: Path, with_baselines: bool, command: _Command
) -> "tuple[list[Record], list[str], list[Record]]":
    """Execute runs and then their baselines; return the records, the failures and the baselines' records."""
    from fedvlm.report.runs import BASELINES_FOLDER
    from fedvlm.runner.experiments import missing_baselines, split_outcomes
    from fedvlm.runner.run import default_name, execute_all
    from fedvlm.runner.trackers import Trackers

    out = command.out
    if out is None or swept:  # a grid may grow, so the number of a point is no name for it
        folders = [home / default_name(run_settings, None) for run_settings in settings]
    elif len(settings) == 1:
        folders = [out]
    else:
        folders = [out / f"{number}-{run_settings.method.name}" for number, run_settings in enumerate(settings)]
    method_of = {folder.name: run_settings.method for run_settings, folder in zip(settings, folders, strict=True)}
    trackers = Trackers(command.track)
    with progress() as report, closing(trackers):

        def on_line(run: str, line: Mapping[str, Any]) -> None:
            report.update_status(method_of[run].name, progress_line(method_of[run], line))
            trackers(run, line)

        options: dict[str, Any] = {"again": command.again, "progress": report, "cluster": command.on}
        requests = list(zip(settings, folders, strict=True))
        outcomes = execute_all(requests, **options, on_line=on_line, log=echo_error, keep_going=bool(swept))
        results, failed = split_outcomes(settings, outcomes, swept)
        missing = missing_baselines(settings, results[0]) if with_baselines else []
        requests = [
            (baseline, out / BASELINES_FOLDER / baseline.method.name if out else home / default_name(baseline, None))
            for baseline in missing
        ]
        baselines, _ = split_outcomes(missing, execute_all(requests, **options))
    for message in trackers.notes:
        echo_error(message)
    return results, failed, baselines


def progress_line(method: "Method", line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a line of the record without accuracies that differ from those reported after adaptation."""
    from fedvlm.parts.bodies import adapts

    return {**line, "validation": None} if adapts(method) else line


def _next_steps(home: Path, records: "Sequence[Record]") -> str:
    """Return three commands to continue with after a run."""
    folders = [shlex.quote(str(record.folder)) for record in records]
    several = [record for record in records if record.folder == home] == []
    folder, run = shlex.quote(str(home)) if several else " ".join(folders), folders[-1]
    columns = "balanced,F1,AUC,ECE"
    return f"next:\n  fedvlm compare {folder} --columns {columns}\n  fedvlm audit {run}\n  fedvlm plot {run}"


def reproduce(
    item: Annotated[str, Argument(help="Table or figure, e.g. fedot-v1/T1 (see `fedvlm list papers`).")],
    smoke: Smoke = False,
    form: TableFormat = "text",
    data: Annotated[str | None, Option(help="Use other data, e.g. demo.")] = None,
    encoder: Encoder = None,
    set_: Set = None,
    out: Annotated[Path | None, Option("--output", "-o", help="Folder of the runs.")] = None,
    again: Force = False,
    quiet: Quiet = False,
) -> None:
    """Run a paper's table and compare it with the published one."""
    from fedvlm.report.papers import settings_of_item
    from fedvlm.runner.experiments import split_outcomes
    from fedvlm.runner.forecast import describe_requirements
    from fedvlm.runner.run import default_name, execute_all

    overrides: dict[str, Any] = {"data": data, "encoder": encoder, "smoke": smoke or None}
    overrides = {key: value for key, value in overrides.items() if value is not None}
    named, settings = settings_of_item(item, overrides, set_ or [])

    echo_error(f"{item} by {', '.join(named)}")
    for line in describe_requirements(settings):
        echo_error(line)

    def folder_of(run_settings: "Settings") -> Path:
        name = default_name(run_settings, None)
        candidates = (Path("runs") / experiment / name for experiment in named)
        existing = next((path for path in candidates if path.exists()), None)  # of `fedvlm run`
        return out / name if out else existing or Path("runs") / name

    with progress() as report:
        requests = [(run_settings, folder_of(run_settings)) for run_settings in settings]
        outcomes = execute_all(requests, again=again, progress=report, log=echo_error, keep_going=True)
    results, failed = split_outcomes(settings, outcomes, keep_going=True)
    typer.echo(table_of(item, results, form), nl=False)
    echo_error("records: " + ", ".join(str(record.folder) for record in results))
    fail(failed)


def table_of(item: str, results: "Sequence[Record]", form: str) -> str:
    """Return the paper's table with our numbers, or only ours if the paper prints none."""
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


def grow(
    run: Annotated[Path, Argument(help="Folder of a finished run.")],
    data: Annotated[str, Argument(help="All images of the new version, or store:TABLE.")],
    out: Annotated[Path, Option("--output", "-o", help="Folder of the new run.")],
) -> None:
    """Run again with new classes, or with new or removed images.

    The change of each class must hide single images. Cards of its classifiers have a history.
    """
    from fedvlm.report.tables import compare_table
    from fedvlm.result import Result
    from fedvlm.runner.run import grow as grow_run

    with progress() as report:
        record = grow_run(run, data, out, report)
    change = record.manifest["history"][-1]
    classes = f", new classes: {', '.join(change['new_classes'])}" if change["new_classes"] else ""
    typer.echo(f"{change['added']} samples added, {change['removed']} removed{classes}")
    typer.echo(compare_table([Result(record.folder)]), nl=False)
