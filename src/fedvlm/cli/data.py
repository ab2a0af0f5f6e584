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
    access: Annotated[list[str] | None, typer.Option(help="key=value for the encoder, as token_file=FILE.")] = None,
    patches: Annotated[bool, typer.Option(help="Also the patch embeddings.")] = False,
    half: Annotated[bool, typer.Option(help="Keep float16, as a run's precision = 'float16'.")] = False,
) -> None:
    """Encode every image once and keep it in the cache."""
    from fedvlm.runner.load import encode, open_data, open_encoder_with_notes, skipped_messages

    dataset = open_data(data, options(source))
    started = monotonic()
    with progress() as report:
        precision: Literal["float16", "float32"] = "float16" if half else "float32"
        opened_encoder, notes = open_encoder_with_notes(encoder, options(access))
        done = encode(dataset, opened_encoder, patches, precision, report)
    for message in [*notes, *skipped_messages(done)]:
        typer.echo(message, err=True)
    rows, seconds = done.embedded, monotonic() - started
    typer.echo(
        f"{len(rows.labels)} rows of {rows.x.shape[1]} by {rows.encoder}: "
        f"{done.encoded} encoded now, the others were cached ({seconds:.1f} s)"
    )


def partition(
    data: str,
    source: Source = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="a.b=value, as a run takes it.")] = None,
    seed: Annotated[int | None, typer.Option(help="The first of `seeds` if left out.")] = None,
    image: Annotated[Path | None, typer.Option(dir_okay=False, help="PNG of rows per class and client.")] = None,
    near_duplicates: Annotated[
        bool, typer.Option(help="Also name images that are nearly the same in two parts.")
    ] = False,
) -> None:
    """Rows per class and client, before anything is encoded."""
    from fedvlm.data.partition import SampleList, count_table, list_samples, make_partition
    from fedvlm.data.table import EmbeddedTable
    from fedvlm.encoders.store import open_store
    from fedvlm.errors import SettingsError
    from fedvlm.report.plots import draw_partition
    from fedvlm.report.tables import render_table
    from fedvlm.runner.load import open_data, smoke_dataset
    from fedvlm.runner.prepare import undivided_targets
    from fedvlm.runner.settings import build, override

    values = {"method": "zero-shot", "data": data, "source": options(source)}
    settings = build(override(values, set_ or []))
    rows: EmbeddedTable | SampleList
    if settings.data.startswith("store:"):
        if near_duplicates:
            raise SettingsError("near-duplicates are looked for in images; a store has none")
        rows = open_store(settings.data.removeprefix("store:"), **settings.source)
    else:
        dataset = open_data(settings.data, settings.source)
        dataset = smoke_dataset(dataset) if settings.smoke else dataset
        rows = list_samples(dataset)
    first = settings.seeds[0] if seed is None else seed
    client_partition = make_partition(rows, settings.clients, first, undivided_targets(settings))
    counts = count_table(client_partition, rows)
    ids = list(client_partition.clients)
    body = [[id, *map(str, row), str(sum(row))] for id, row in zip(ids, counts.tolist(), strict=True)]
    typer.echo(render_table(["client", *rows.classes, "all"], body, "text"), nl=False)
    if client_partition.dropped:
        typer.echo(f"{client_partition.dropped} duplicate images were dropped from the later split")
    if near_duplicates:
        from fedvlm.encoders.near_duplicates import near_duplicates as find

        with progress() as report:
            pairs = find(dataset, client_partition, lambda done, all_: report("comparing", done, all_))
        for pair in pairs:
            typer.echo(
                f"near-duplicate: {pair.name} ({pair.split}) and {pair.duplicate_of} ({pair.duplicate_split}), "
                f"{pair.difference:.2f} of 255 apart"
            )
        typer.echo(f"{len(pairs) or 'no'} near-duplicates between parts; none was dropped")
    if image:
        draw_partition(counts, ids, rows.classes, image)
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

    from fedvlm.encoders.cache import cache_directory, list_entries
    from fedvlm.report.tables import render_table

    entries = [asdict(entry) for entry in list_entries(cache_directory())]
    if as_json:
        typer.echo(json.dumps(entries, indent=1))
    elif entries:
        rows = [[str(value) for value in entry.values()] for entry in entries]
        typer.echo(render_table(list(entries[0]), rows, "text"), nl=False)
    else:
        typer.echo(f"nothing is cached in {cache_directory()}")


@cache_app.command("rm")
def cache_rm(fingerprint: str) -> None:
    """Remove what one encoder has in the cache."""
    from fedvlm.encoders.cache import cache_directory, remove_entry

    entry = remove_entry(cache_directory(), fingerprint)
    typer.echo(f"removed {entry.rows} rows of {entry.encoder} ({entry.bytes / 1e6:.1f} MB)")


@cache_app.command("verify")
def cache_verify(
    fingerprint: Annotated[str, typer.Argument(help="One encoder's; all if left out.")] = "",
    drop: Annotated[bool, typer.Option(help="Let go of damaged rows; they are encoded anew.")] = False,
) -> None:
    """Check every cached row against its checksum."""
    from fedvlm.encoders.cache import cache_directory, verify

    bad = [(name, damage) for name, rows in verify(cache_directory(), fingerprint, drop).items() for damage in rows]
    for name, damage in bad:
        typer.echo(f"{name[:16]} {damage.table} row {damage.row}: {damage.reason}")
    status = "dropped" if drop else "still there; --drop lets go of them"
    typer.echo(f"{len(bad)} damaged rows, {status}" if bad else "every row is sound")
    if bad and not drop:
        sys.exit(1)


def describe(
    data: Annotated[str, typer.Argument(help="`fedvlm list datasets`, or a path.")],
    model: Annotated[Path, typer.Option(help="Folder of a text-generation model.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The JSON file of sentences by class.")],
    source: Source = None,
    about: Annotated[str, typer.Option(help="What the data are, in a few words.")] = "",
    questions: Annotated[int, typer.Option(help="How many the model asks itself.")] = 4,
) -> None:
    """Let a local language model describe the classes, for a run's `descriptions`."""
    import json

    from fedvlm.data.descriptions import load_writer
    from fedvlm.data.descriptions import write_descriptions as write
    from fedvlm.runner.load import open_data
    from fedvlm.storage.files import write_file as save

    dataset = open_data(data, options(source))
    topic = about or f"an image data set called {dataset.name}"
    with progress() as report:
        sentences = write(
            dataset.classes,
            topic,
            load_writer(model),
            questions,
            lambda done, total: report("describing", done, total),
        )
    save(out, (json.dumps(sentences, indent=1, ensure_ascii=False) + "\n").encode())
    silent = [name for name, class_sentences in sentences.items() if not class_sentences]
    typer.echo(
        f"{sum(map(len, sentences.values()))} sentences about {len(sentences)} classes are in {out}; "
        f"use them: --set descriptions={out}"
    )
    if silent:
        typer.echo(f"nothing was said of {', '.join(silent)}: the template stays alone", err=True)
