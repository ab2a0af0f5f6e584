"""Commands about images, encoders and the cache."""

import json
import sys
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal

import typer

from fedvlm.cli.progress import progress

cache_app = typer.Typer(no_args_is_help=True, help="Look after the embedding cache.")
Source = Annotated[list[str] | None, typer.Option("--source", help="key=value: how to read DATA.")]


def options(pairs: list[str] | None) -> dict[str, Any]:
    from fedvlm.runner.settings import override

    return override({}, pairs or [])


def embed(
    data: str,
    encoder: Annotated[str, typer.Option(help="`fedvlm list encoders`")] = "demo",
    source: Source = None,
    access: Annotated[
        list[str] | None, typer.Option(help="key=value for the encoder, as token_file=FILE.")
    ] = None,
    patches: Annotated[bool, typer.Option(help="Also the patch embeddings.")] = False,
    half: Annotated[
        bool, typer.Option(help="Keep float16, as a run's precision = 'float16'.")
    ] = False,
) -> None:
    """Encode every image once and keep it in the cache."""
    from fedvlm.runner.load import encode, open_data, reach, skipped

    dataset = open_data(data, options(source))
    begin = monotonic()
    with progress() as report:
        kept: Literal["float16", "float32"] = "float16" if half else "float32"
        opened_encoder, notes = reach(encoder, options(access))
        done = encode(dataset, opened_encoder, patches, kept, report)
    for note in [*notes, *skipped(done)]:
        typer.echo(note, err=True)
    rows, seconds = done.embedded, monotonic() - begin
    typer.echo(
        f"{len(rows.labels)} rows of {rows.x.shape[1]} by {rows.encoder}: "
        f"{done.encoded} encoded now, the others were cached ({seconds:.1f} s)"
    )


def partition(
    data: str,
    source: Source = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="a.b=value, as a run takes it.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The first of `seeds` if left out.")] = None,
    image: Annotated[
        Path | None, typer.Option(dir_okay=False, help="PNG of rows per class and client.")
    ] = None,
    near_duplicates: Annotated[
        bool, typer.Option(help="Also name images that are nearly the same in two parts.")
    ] = False,
) -> None:
    """Rows per class and client, before anything is encoded."""
    from fedvlm.data.federation import Listing, divide, rows_of
    from fedvlm.data.partition import count_table
    from fedvlm.data.table import Embedded
    from fedvlm.encoders.store import open_store
    from fedvlm.errors import SettingsError
    from fedvlm.report.partition import draw
    from fedvlm.report.tables import render
    from fedvlm.runner.load import open_data, sample
    from fedvlm.runner.prepare import whole
    from fedvlm.runner.settings import build, override

    values = {"method": "zero-shot", "data": data, "source": options(source)}
    settings = build(override(values, set_ or []))
    rows: Embedded | Listing
    if settings.data.startswith("store:"):
        if near_duplicates:
            raise SettingsError("near-duplicates are looked for in images; a store has none")
        rows = open_store(settings.data.removeprefix("store:"), **settings.source)
    else:
        dataset = open_data(settings.data, settings.source)
        dataset = sample(dataset) if settings.smoke else dataset
        rows = rows_of(dataset)
    first = settings.seeds[0] if seed is None else seed
    division = divide(rows, settings.clients, first, whole(settings))
    counts = count_table(division, rows)
    ids = list(division.members)
    body = [
        [id, *map(str, row), str(sum(row))] for id, row in zip(ids, counts.tolist(), strict=True)
    ]
    typer.echo(render(["client", *rows.classes, "all"], body, "text"), nl=False)
    if division.dropped:
        typer.echo(f"{division.dropped} duplicate images were dropped from the later split")
    if near_duplicates:
        from fedvlm.encoders.near import near_duplicates as find

        with progress() as report:
            found = find(dataset, division, lambda done, all_: report("comparing", done, all_))
        for one in found:
            typer.echo(
                f"near-duplicate: {one.name} ({one.part}) and {one.other} ({one.other_part}), "
                f"{one.difference:.2f} of 255 apart"
            )
        typer.echo(f"{len(found) or 'no'} near-duplicates between parts; none was dropped")
    if image:
        draw(counts, ids, rows.classes, image)
        typer.echo(f"image: {image}")


def serve_encoder(
    encoder: str,
    port: int = 8765,
    host: str = "127.0.0.1",
    token_file: Annotated[Path | None, typer.Option(help="A secret the callers must send.")] = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> None:
    """Give out embeddings of an encoder, never its weights."""
    import logging

    from fedvlm.encoders import open_encoder
    from fedvlm.encoders.serve import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    serve(
        open_encoder(encoder),
        host=host,
        port=port,
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        ready=lambda url: typer.echo(f"serving {encoder} at {url}"),
    )


@cache_app.command("ls")
def cache_ls(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What is in the cache, one line per encoder."""
    from dataclasses import asdict

    from fedvlm.encoders.cache.folder import directory, ls
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
    from fedvlm.encoders.cache.folder import directory, rm

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
    from fedvlm.encoders.cache.folder import directory, verify

    bad = [
        (name, one) for name, rows in verify(directory(), fingerprint, drop).items() for one in rows
    ]
    for name, one in bad:
        typer.echo(f"{name[:16]} {one.table} row {one.row}: {one.reason}")
    kept = "dropped" if drop else "still there; --drop lets go of them"
    typer.echo(f"{len(bad)} damaged rows, {kept}" if bad else "every row is sound")
    if bad and not drop:
        sys.exit(1)
