"""Compare, report, plot, explain, audit and verify runs; list what can be run."""

import json
import sys
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer
from typer import Argument, Option

from fedvlm.cli.options import Import, Json, Quiet, Seed, TableFormat, Training, output_file
from fedvlm.cli.progress import progress
from fedvlm.errors import SettingsError, unknown_name

COLUMNS = 100  # of a list of methods


def report(
    runs: Annotated[list[Path], Argument(help="Folders of runs or experiments.")],
    out: Annotated[Path | None, output_file("HTML file (default: report.html in the folder).")] = None,
    title: Annotated[str, Option(help="Title of the page.")] = "",
) -> None:
    """Write one offline HTML page about one or more runs."""
    from fedvlm.report.page.render import write_page
    from fedvlm.report.runs import read_compared_runs

    results = [result for path in runs for result in read_compared_runs(path)]
    only = runs[0] if len(runs) == 1 else runs[0].parent
    typer.echo(f"report: {write_page(results, out or only / 'report.html', title)}")


def resume(
    folder: Annotated[Path, Argument(help="Folder of the run.")], import_: Import = None, quiet: Quiet = False
) -> None:
    """Resume a run that was stopped or killed."""
    from fedvlm.report.tables import compare_table
    from fedvlm.runner.run import resume as go_on

    with progress() as report:
        result = go_on(folder, report)
    typer.echo(compare_table([result]), nl=False)


def compare(
    runs: Annotated[list[Path], Argument(help="Folders of runs or experiments, or report pages.")],
    form: TableFormat = "text",
    all_columns: Annotated[bool, Option("--all", help="Add a column for each domain or client.")] = False,
    traffic: Annotated[bool, Option("--traffic", help="Add rounds and kilobytes per client.")] = False,
    columns: Annotated[str, Option(help="More columns, e.g. balanced,F1,AUC,worst,method.lr.")] = "",
    subgroups: Annotated[
        str, Option(help="Print AUC, or the metric of --columns, by this column of subgroups, e.g. sex.")
    ] = "",
    paper: Annotated[bool, Option("--paper", help="Compare with the published tables.")] = False,
    item: Annotated[str, Option(help="Compare with this table or figure, e.g. fedot-v1/T1.")] = "",
) -> None:
    """Print runs side by side, as mean ± std over seeds.

    Numbers are in per cent.
    """
    from fedvlm.report.runs import read_runs
    from fedvlm.report.tables import compare_table

    results = [run for path in runs for run in read_runs(path)]
    if paper or item:
        from fedvlm.report.paper_tables import items_of, paper_tables

        typer.echo(paper_tables([item] if item else items_of(results), results, form), nl=False)
        return
    column_names = [name.strip() for name in columns.split(",") if name.strip()]
    if subgroups:
        from fedvlm.report.subgroups import compare_subgroups

        typer.echo(compare_subgroups(results, subgroups, column_names, form), nl=False)
        return
    table = compare_table(results, form, column_names, all_columns=all_columns, traffic=traffic)
    typer.echo(table, nl=False)


def list_(
    kind: Annotated[
        str, Argument(help="One of methods, encoders, data, datasets, metrics, protocols, experiments, papers.")
    ],
    name: Annotated[str, Argument(help="Show all details of this entry.")] = "",
    as_json: Json = False,
) -> None:
    """List methods, data sets, encoders, experiments or papers."""
    from fedvlm.report.lists import LISTS
    from fedvlm.report.tables import render_table

    if kind not in LISTS:
        raise unknown_name("list", kind, LISTS)
    rows = LISTS[kind]()
    if name:
        rows = [row for row in rows if str(next(iter(row.values()))) == name]
        if not rows:
            raise unknown_name(kind, name, [str(next(iter(row.values()))) for row in LISTS[kind]()])
    if not rows and not as_json:
        typer.echo(f"there are no {kind}")
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
    if kind == "methods":
        head, body = ["method", "what"], _narrow([[row["method"], row["what"]] for row in rows])
    typer.echo(render_table(head, body, "text", True), nl=False)


def _narrow(body: list[list[str]]) -> list[list[str]]:
    """Wrap the second column, so that both fit on a screen."""
    first = max(len("method"), *(len(row[0]) for row in body))
    wrapped = [(name, wrap(summary, COLUMNS - first - 2)) for name, summary in body]
    return [[name if i == 0 else "", line] for name, lines in wrapped for i, line in enumerate(lines)]


def audit(
    run: Annotated[Path, Argument(help="Folder of the run.")],
    training: Training = None,
    seed: Seed = None,
    form: Annotated[str, Option("--format", help="Output format: text, markdown, latex or csv.")] = "text",
    as_json: Json = False,
    save: Annotated[bool, Option("--save", help="Save the result in the run's folder, for its report.")] = False,
) -> None:
    """Estimate what uploads reveal about the training samples.

    The table has each client's uploads and the AUC of a membership inference attack on them.
    """
    from fedvlm.record import Record
    from fedvlm.report.tables import audit_table, write_audit
    from fedvlm.runner.audit import audit as look

    with progress() as report:
        lines = look(run, training, seed, progress=report)
    if save:
        write_audit(Record(run), lines)
    if as_json:
        typer.echo(json.dumps(lines, indent=1, ensure_ascii=False))
    else:
        typer.echo(audit_table(lines, form), nl=False)


def export_data(
    run: Annotated[Path, Argument(help="Folder of the run.")],
    out: Annotated[Path | None, Option("--output", "-o", help="Folder of the tables (default: RUN/data).")] = None,
    form: Annotated[str, Option("--format", help="Output format: parquet or csv.")] = "parquet",
    import_: Import = None,
    quiet: Quiet = False,
) -> None:
    """Export embeddings, splits and test predictions as tables."""
    from fedvlm.runner.data_export import export_data as write

    with progress() as report:
        paths = write(run, out or run / "data", form, report)
    for path in paths:
        typer.echo(str(path))


def explain(
    run: Annotated[Path, Argument(help="Folder of the run.")],
    image: Annotated[Path | None, Option(help="Image to explain.")] = None,
    name: Annotated[str | None, Option("--class", help="Class to explain (default: the predicted class).")] = None,
    client: Annotated[str | None, Option(help="Client whose local prompt is used (default: the first).")] = None,
    gamma: Annotated[list[float] | None, Option(help="γ of the transport plan, in (0, 1]. Repeatable.")] = None,
    prompts: Annotated[bool, Option("--prompts", help="Draw a map of all local prompts instead.")] = False,
    seed: Seed = None,
    out: Annotated[Path | None, output_file("PNG file (default: in the run's folder).")] = None,
) -> None:
    """Draw which parts of an image a run's prompts attend to."""
    from fedvlm.report import explain as explaining
    from fedvlm.report.plots import draw_explanation, draw_prompt_map

    if (image is None) == (not prompts):
        raise SettingsError("explain draws one thing: give --image FILE, or --prompts")
    if prompts:
        path = draw_prompt_map(explaining.prompt_map(run, seed), out or run / "prompts.png")
        typer.echo(f"image: {path}")
        return
    assert image is not None
    explained = explaining.explain(run, image, name=name, client=client, gammas=gamma, seed=seed)
    probability = f"probability of {explained.name} is {explained.probability:.1%}"
    typer.echo(f"client {explained.client}: {probability}, predicted class is {explained.likeliest}")
    typer.echo(f"image: {draw_explanation(explained, out or run / f'explain-{image.stem}.png')}")


def plot(
    runs: Annotated[list[Path], Argument(help="Folders of runs.")],
    kind: Annotated[
        str,
        Option(
            help="Kind of plot: rounds, sweep, bars, reliability, roc, decision, partition, kite, tsne, heat or "
            "subgroups "
            "(default: reliability, decision curve and rounds of one run)."
        ),
    ] = "",
    columns: Annotated[str, Option(help="One panel per column, e.g. C,AUC (rounds, sweep and bars).")] = "",
    over: Annotated[str, Option("--x-axis", help="Setting on the x axis, e.g. method.blocks (sweep and bars).")] = "",
    training: Training = None,
    seed: Seed = None,
    image: Annotated[Path | None, Option(help="Image to explain (heat).")] = None,
    name: Annotated[str | None, Option("--class", help="Class to explain (heat).")] = None,
    client: Annotated[str | None, Option(help="Client whose local prompt is used (heat).")] = None,
    out: Annotated[Path | None, output_file("PNG or SVG file (default: in the run's folder).")] = None,
) -> None:
    """Plot one run, or several in one figure."""
    from fedvlm.report.plots import draw_diagrams, draw_runs
    from fedvlm.report.runs import read_runs

    results = [result for path in runs for result in read_runs(path)]
    if not kind:
        if len(results) != 1:
            raise SettingsError("several runs are drawn as one --kind, as rounds or bars")
        path = draw_diagrams(results[0], out or runs[0] / "diagrams.png", training, seed)
    else:
        folder = runs[0] if len(runs) == 1 else runs[0].parent
        names = [column.strip() for column in columns.split(",") if column.strip()]
        of = {"training": training, "seed": seed, "image": image, "class_name": name, "client": client}
        path = draw_runs(kind, results, out or folder / f"{kind}.png", columns=names, over=over, **of)
    typer.echo(f"image: {path}")


def verify(target: Annotated[str, Argument(help="Run, exported classifier, table of embeddings, or `cache`.")]) -> None:
    """Check files against their checksums.

    The exit code is 1 if a file is damaged.
    """
    from fedvlm.report.verify import verify_files

    checked, problems = verify_files(target)
    for name, problem in problems:
        typer.echo(f"{name}: {problem}")
    typer.echo(f"{checked} checked, {len(problems) or 'none'} damaged")
    if problems:
        sys.exit(1)
