"""The command line: the only module that talks to a person."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedvlm.result import Result

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Adapt a frozen vision-language model across sites whose images may not leave them.",
)
cache_app = typer.Typer(no_args_is_help=True, help="Look after the embedding cache.")
app.add_typer(cache_app, name="cache")

Out = Annotated[Path | None, typer.Option(help="Directory of the record; made from the settings.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="a.b=value over the settings.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Smoke = Annotated[bool, typer.Option(help="A short run on few rows.")]
Again = Annotated[bool, typer.Option(help="Run again even if it is finished.")]
Encoder = Annotated[str, typer.Option(help="As `fedvlm list encoders` names it.")]
Layout = Annotated[list[str] | None, typer.Option("--source", help="key=value: how to read DATA.")]


def main() -> None:
    """Entry point: an error a person can put right is said in a few lines, with exit code 2."""
    from fedvlm.errors import FedVLMError

    try:
        app()
    except FedVLMError as error:
        typer.echo(f"fedvlm: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("fedvlm: stopped; `fedvlm resume` goes on where a run was", err=True)
        sys.exit(130)


@contextmanager
def progress() -> Iterator[Any]:
    """A bar with an ETA for whatever takes more than two seconds; silent if nobody watches."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=False)
    tasks: dict[str, Any] = {}
    begins: dict[str, tuple[float, int]] = {}

    def told(what: str, done: int, total: int) -> None:
        now = monotonic()
        begin, first = begins.setdefault(what, (now, done))
        if now - begin < 2:
            return
        if not bar.live.is_started:
            bar.start()
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total, rate="")
        rate = f"{(done - first) / (now - begin):.1f}/s"
        bar.update(tasks[what], completed=done, total=total, rate=rate)

    try:
        yield told
    finally:
        bar.stop()


def options(pairs: list[str] | None) -> dict[str, Any]:
    from fedvlm.settings import override

    return override({}, pairs or [])


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the records go.")] = Path("runs/demo"),
) -> None:
    """Leave-one-domain-out on the embedded emoji: who generalises, who personalises."""
    run("demo", out=out)


@app.command()
def run(
    file: Annotated[str | None, typer.Argument(help="A TOML file or an experiment's name.")] = None,
    method: Annotated[str | None, typer.Option(help="`fedvlm list methods`")] = None,
    data: Annotated[str | None, typer.Option(help="`fedvlm list datasets`, or a path.")] = None,
    encoder: Annotated[str | None, typer.Option(help="`fedvlm list encoders`")] = None,
    set_: Set = None,
    out: Out = None,
    smoke: Smoke = False,
    again: Again = False,
) -> None:
    """Run a method, or an experiment of several, and print its table."""
    from fedvlm.errors import SettingsError
    from fedvlm.experiments import find, runs
    from fedvlm.report.tables import compare
    from fedvlm.runner import execute
    from fedvlm.settings import build, override, read_toml

    if file is None and method is None:
        raise SettingsError("nothing to run; name a TOML file, or --method (`fedvlm list methods`)")
    values = read_toml(find(file)) if file else {}
    given = {"data": data, "encoder": encoder, "smoke": smoke or None}
    if method:
        values.pop("methods", None)
        given["method"] = method
    values |= {key: value for key, value in given.items() if value is not None}
    every = runs(values)
    settings = [build(override(one, set_ or [])) for one in every]
    results: list[Result] = []
    with progress() as told:
        for number, one in enumerate(settings):
            place = out / f"{number}-{one.method.name}" if out and len(settings) > 1 else out
            results.append(execute(one, place, again, progress=told))
    typer.echo(compare(results, paper=values.get("paper")), nl=False)
    typer.echo("records: " + ", ".join(str(one.folder) for one in results))


@app.command()
def resume(folder: Path) -> None:
    """Go on with a run that was stopped or killed."""
    from fedvlm.report.tables import compare
    from fedvlm.runner import resume as go_on

    with progress() as told:
        result = go_on(folder, told)
    typer.echo(compare([result]), nl=False)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    form: Annotated[str, typer.Option(help="text, markdown, latex or csv")] = "text",
    every: Annotated[bool, typer.Option("--all", help="Also per domain or client.")] = False,
) -> None:
    """Runs side by side: mean ± deviation over seeds, in per cent."""
    from fedvlm.report.tables import compare as render
    from fedvlm.result import Result

    typer.echo(render([Result(path) for path in runs], form, every), nl=False)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, encoders, datasets, experiments")],
    as_json: Json = False,
) -> None:
    """What there is to choose from."""
    from fedvlm.report.lists import LISTS
    from fedvlm.report.tables import render

    if what not in LISTS:
        from fedvlm.errors import unknown

        raise unknown("list", what, LISTS)
    rows = LISTS[what]()
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    head = list(rows[0])
    typer.echo(render(head, [[str(row[key]) for key in head] for row in rows], "text"), nl=False)


@app.command()
def embed(
    data: str,
    encoder: Encoder = "demo",
    source: Layout = None,
    patches: Annotated[bool, typer.Option(help="Also the patch embeddings.")] = False,
) -> None:
    """Encode every picture once and keep it in the cache."""
    from fedvlm.load import encode, opened

    dataset = opened(data, options(source))
    begin = monotonic()
    with progress() as told:
        done = encode(dataset, encoder, patches, told)
    for name, reason in done.skipped:
        typer.echo(f"skipped {name}: {reason}", err=True)
    rows, seconds = done.embedded, monotonic() - begin
    typer.echo(
        f"{len(rows.labels)} rows of {rows.x.shape[1]} by {rows.encoder}: "
        f"{done.encoded} encoded now, the others were cached ({seconds:.1f} s)"
    )


@app.command()
def partition(
    data: str,
    source: Layout = None,
    set_: Set = None,
    seed: int = 0,
    picture: Annotated[Path | None, typer.Option(help="PNG of rows per class and client.")] = None,
) -> None:
    """Rows per class and client, before anything is encoded."""
    from fedvlm.data import open_dataset
    from fedvlm.data.federation import divide, rows_of
    from fedvlm.data.partition import count_table, draw
    from fedvlm.report.tables import render
    from fedvlm.settings import clients_of, override

    rows = rows_of(open_dataset(data, **options(source)))
    clients = clients_of(override({}, set_ or []).get("clients", {}))
    division = divide(rows, clients, seed)
    counts = count_table(division, rows)
    ids = list(division.members)
    body = [
        [id, *map(str, row), str(sum(row))] for id, row in zip(ids, counts.tolist(), strict=True)
    ]
    typer.echo(render(["client", *rows.classes, "all"], body, "text"), nl=False)
    if division.dropped:
        typer.echo(f"{division.dropped} duplicate pictures were dropped from the later split")
    if picture:
        draw(counts, ids, rows.classes, picture)
        typer.echo(f"picture: {picture}")


@app.command("serve-encoder")
def serve_encoder(
    encoder: str,
    port: int = 8350,
    host: str = "127.0.0.1",
    token_file: Annotated[Path | None, typer.Option(help="A secret the callers must send.")] = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> None:
    """Give out embeddings of an encoder, never its weights."""
    from fedvlm.encoders import open_encoder
    from fedvlm.encoders.serve import serve

    serve(
        open_encoder(encoder),
        host=host,
        port=port,
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )


@cache_app.command("ls")
def cache_ls(as_json: Json = False) -> None:
    """What is in the cache, one line per encoder."""
    from dataclasses import asdict

    from fedvlm.encoders.cache import directory, ls
    from fedvlm.report.tables import render

    found = [asdict(one) for one in ls(directory())]
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    elif found:
        rows = [[str(value) for value in one.values()] for one in found]
        typer.echo(render(list(found[0]), rows, "text"), nl=False)
    else:
        typer.echo(f"nothing is cached in {directory()}")


@cache_app.command("rm")
def cache_rm(fingerprint: str) -> None:
    """Remove what one encoder has in the cache."""
    from fedvlm.encoders.cache import directory, rm

    gone = rm(directory(), fingerprint)
    typer.echo(f"removed {gone.rows} rows of {gone.encoder} ({gone.bytes / 1e6:.1f} MB)")


@cache_app.command("verify")
def cache_verify(
    fingerprint: Annotated[str, typer.Argument(help="One encoder's; all if left out.")] = "",
    drop: Annotated[
        bool, typer.Option(help="Let go of damaged rows; they are encoded anew.")
    ] = False,
) -> None:
    """Check every cached row against its checksum."""
    from fedvlm.encoders.cache import directory, verify

    bad = [
        (name, one) for name, rows in verify(directory(), fingerprint, drop).items() for one in rows
    ]
    for name, one in bad:
        typer.echo(f"{name[:16]} {one.table} row {one.row}: {one.reason}")
    kept = "dropped" if drop else "still there; --drop lets go of them"
    typer.echo(f"{len(bad)} damaged rows, {kept}" if bad else "every row is sound")
    if bad and not drop:
        sys.exit(1)


if __name__ == "__main__":
    main()
