"""Partition, embed and describe data; serve an encoder; manage the cache."""

import json
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from fedvlm.cli import options
from fedvlm.cli.progress import progress
from fedvlm.errors import SettingsError

Precision = Literal["float16", "float32"]
cache_app = typer.Typer(no_args_is_help=True, cls=options.SectionedGroup, help="Manage the embedding cache.")


def embed(
    data: options.Data,
    encoder: Annotated[str, Option(help="Encoder (see `fedvlm list encoders`).")] = "demo",
    source: options.Source = None,
    access: options.Access = None,
    patches: Annotated[bool, Option("--patches", help="Also embed image patches.")] = False,
    precision: Annotated[Precision, Option(help="Precision of the cached embeddings.")] = "float32",
    quiet: options.Quiet = False,
) -> None:
    """Embed every image once and cache the result."""
    from fedvlm.runner.load import encode, open_data, open_encoder_with_notes, skipped_messages

    dataset = open_data(data, options.parse_pairs("--source", source))
    started = monotonic()
    with progress() as report:
        opened_encoder, notes = open_encoder_with_notes(encoder, options.parse_pairs("--access", access))
        done = encode(dataset, opened_encoder, patches, precision, report)
    for message in [*notes, *skipped_messages(done)]:
        typer.echo(message, err=True)
    rows, seconds = done.embedded, monotonic() - started
    typer.echo(
        f"{len(rows.labels)} embeddings of size {rows.x.shape[1]} from {rows.encoder}: "
        f"{done.encoded} computed now, the others were in the cache ({seconds:.1f} s)"
    )


def partition(
    data: options.Data,
    source: options.Source = None,
    set_: options.Set = None,
    seed: Annotated[int | None, Option(help="Seed of the split (default: the first of `seeds`).")] = None,
    out: Annotated[Path | None, options.output_file("Also draw the table to this PNG file.")] = None,
    near_duplicates: Annotated[
        bool, Option("--near-duplicates", help="Also list near-duplicates across splits.")
    ] = False,
) -> None:
    """Show samples per class and client before a run."""
    import numpy as np

    from fedvlm.data.partition import SampleList, count_table, list_samples
    from fedvlm.data.splits import SPLITS
    from fedvlm.data.table import EmbeddedTable
    from fedvlm.encoders.store import open_store
    from fedvlm.report.plots import draw_partition
    from fedvlm.report.tables import render_table
    from fedvlm.runner.load import open_data, smoke_dataset
    from fedvlm.runner.prepare import divide_samples
    from fedvlm.runner.settings import build, override

    is_store = data.startswith("store:")
    values = {"method": "zero-shot", "source": options.parse_pairs("--source", source)}
    settings = build(override({**values, "encoder" if is_store else "data": data}, set_ or []))
    rows: EmbeddedTable | SampleList
    if is_store:
        if near_duplicates:
            raise SettingsError("--near-duplicates compares images, which a store does not hold; leave it out")
        rows = open_store(settings.encoder.removeprefix("store:"), **settings.source)
    else:
        dataset = open_data(settings.data, settings.source)
        dataset = smoke_dataset(dataset) if settings.smoke else dataset
        rows = list_samples(dataset)
    first = settings.seeds[0] if seed is None else seed
    client_partition, new_clients = divide_samples(settings, rows, first)
    counts = count_table(client_partition, rows, (*SPLITS, "calibration"))
    for index, id in enumerate(client_partition.clients):
        if id in new_clients:  # base-to-new: test samples of the classes nobody trains on
            counts[index] += np.bincount(rows.labels[new_clients[id].test], minlength=len(rows.classes))
    ids = list(client_partition.clients)
    body = [[id, *map(str, row), str(sum(row))] for id, row in zip(ids, counts.tolist(), strict=True)]
    typer.echo(render_table(["client", *rows.classes, "all"], body, "text"), nl=False)
    unlabelled = {id: len(client.unlabelled) for id, client in client_partition.clients.items()}
    if any(unlabelled.values()):
        typer.echo("without a label: " + ", ".join(f"{id} {count}" for id, count in unlabelled.items()))
    if client_partition.dropped:
        typer.echo(f"{client_partition.dropped} duplicate images were dropped from the later split")
    if near_duplicates:
        from fedvlm.encoders.near_duplicates import near_duplicates as find

        with progress() as report:
            pairs = find(dataset, client_partition, lambda done, all_: report("comparing", done, all_))
        for pair in pairs:
            typer.echo(
                f"near-duplicate: {pair.name} ({pair.split}) and {pair.duplicate_of} ({pair.duplicate_split}), "
                f"RMS difference {pair.difference:.2f} of 255"
            )
        typer.echo(f"{len(pairs) or 'no'} near-duplicates across splits; none was dropped")
    if out:
        draw_partition(counts, ids, rows.classes, out)
        typer.echo(f"image: {out}")


def data_report(
    data: options.Data,
    encoder: Annotated[str, Option(help="Encoder (see `fedvlm list encoders`).")] = "demo",
    source: options.Source = None,
    set_: options.Set = None,
    min_count: Annotated[int, Option(min=1, help="Suppress counts below this number.")] = 1,
    out: Annotated[Path, options.output_file("HTML file of the report.")] = Path("data-report.html"),
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Describe the data of all sites before training.

    It counts samples, measures how far sites differ, and estimates whether federating helps each.
    """
    from dataclasses import asdict

    from fedvlm.report.data_report import data_report as describe_data
    from fedvlm.report.data_report import headline, write_report
    from fedvlm.report.tables import render_table
    from fedvlm.runner.settings import build, override

    names = {"encoder": data} if data.startswith("store:") else {"data": data, "encoder": encoder}
    values = {"method": "ridge", "protocol": "own-test", "source": options.parse_pairs("--source", source), **names}
    with progress() as report:
        described = describe_data(build(override(values, set_ or [])), min_count, report)
    write_report(described, out)
    if as_json:
        typer.echo(json.dumps(asdict(described), indent=1, ensure_ascii=False))
        return
    typer.echo(render_table(["", ""], [list(fact) for fact in headline(described)], "text"), nl=False)
    typer.echo(f"report: {out}")


def serve_encoder(
    encoder: Annotated[str, Argument(help="Encoder (see `fedvlm list encoders`).")],
    port: options.Port = 8765,
    host: options.Host = "127.0.0.1",
    token_file: options.TokenFile = None,
    tls_cert: options.TlsCertificate = None,
    tls_key: options.TlsKey = None,
) -> None:
    """Serve an encoder's embeddings over HTTP, not its weights."""
    import logging

    from fedvlm.encoders import open_encoder
    from fedvlm.encoders.serve import create_app, serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    opened = open_encoder(encoder)
    place: dict[str, Any] = {"host": host, "port": port, "tls_cert": tls_cert, "tls_key": tls_key}
    ready = partial(options.echo_url, f"serving {encoder} at")
    serve(lambda token: create_app(opened, token), **place, token_file=token_file, ready=ready)


@cache_app.command("ls", epilog=options.examples("fedvlm cache ls --json"))
def cache_ls(as_json: options.Json = False) -> None:
    """List cached embeddings by encoder."""
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
        typer.echo(f"the cache in {cache_directory()} is empty")


@cache_app.command("rm", epilog=options.examples("fedvlm cache rm 66ec"))
def cache_rm(fingerprint: Annotated[str, Argument(help="First characters of the encoder's fingerprint.")]) -> None:
    """Remove the cached embeddings of one encoder."""
    from fedvlm.encoders.cache import cache_directory, remove_entry

    entry = remove_entry(cache_directory(), fingerprint)
    typer.echo(f"removed {entry.rows} embeddings of {entry.encoder} ({entry.bytes / 1e6:.1f} MB)")


@cache_app.command("verify", epilog=options.examples("fedvlm cache verify --drop"))
def cache_verify(
    fingerprint: Annotated[str, Argument(help="Fingerprint of one encoder (default: all).")] = "",
    drop: Annotated[bool, Option("--drop", help="Remove damaged embeddings; they are embedded again.")] = False,
) -> None:
    """Check cached embeddings against their checksums.

    The exit code is 1 if an embedding is damaged.
    """
    from fedvlm.encoders.cache import cache_directory, verify

    bad = [(name, damage) for name, rows in verify(cache_directory(), fingerprint, drop).items() for damage in rows]
    for name, damage in bad:
        typer.echo(f"{name[:16]} {damage.table} row {damage.row}: {damage.reason}")
    status = "dropped" if drop else "still there; --drop removes them"
    typer.echo(f"{len(bad)} damaged embeddings, {status}" if bad else "all embeddings are intact")
    if bad and not drop:
        sys.exit(1)


def describe(
    data: options.Data,
    model: Annotated[Path, Option(help="Folder of a text-generation model of transformers.")],
    out: Annotated[Path, options.output_file("JSON file of sentences by class.")],
    source: options.Source = None,
    topic: Annotated[str, Option(help="What the images show, in a few words.")] = "",
    questions: Annotated[int, Option(help="Number of questions per class.")] = 4,
) -> None:
    """Describe the classes with a local language model.

    Use the file in a run with --set descriptions=FILE.
    """
    import json

    from fedvlm.data.descriptions import load_writer
    from fedvlm.data.descriptions import write_descriptions as write
    from fedvlm.runner.load import open_data
    from fedvlm.storage.files import write_file as save

    dataset = open_data(data, options.parse_pairs("--source", source))
    topic = topic or f"an image data set called {dataset.name}"
    with progress() as report:
        sentences = write(
            dataset.classes, topic, load_writer(model), questions, lambda done, total: report("describing", done, total)
        )
    save(out, (json.dumps(sentences, indent=1, ensure_ascii=False) + "\n").encode())
    silent = [name for name, class_sentences in sentences.items() if not class_sentences]
    typer.echo(
        f"{sum(map(len, sentences.values()))} sentences about {len(sentences)} classes written to {out}; "
        f"use them with --set descriptions={out}"
    )
    if silent:
        typer.echo(f"no sentence for {', '.join(silent)}; only the template is used there", err=True)
