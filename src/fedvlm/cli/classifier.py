"""Export classifiers, predict and evaluate with them, and train one for a late client."""

import csv
import json
import sys
from dataclasses import asdict
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from fedvlm.cli import options
from fedvlm.cli.progress import progress

if TYPE_CHECKING:
    from fedvlm.classifier.predict import Predictions

Folder = Annotated[Path, Argument(help="Classifier written by `fedvlm export`.")]
EncoderOption = Annotated[str, Option(help="Encoder, if it has moved since the export.")]
GroupOption = Annotated[
    Literal["image", "mean", "max"], Option(help="Predict each image, or each group by mean or max of its logits.")
]
Coverage = Annotated[float | None, Option(help="Predict sets with this coverage, e.g. 0.95.")]


def predict(
    folder: Folder,
    images: Annotated[list[Path], Argument(help="Images, folders, .zip files or tables of embeddings.")],
    encoder: EncoderOption = "",
    access: options.Access = None,
    top: Annotated[int, Option(min=1, help="Print this many classes per image.")] = 1,
    all_classes: Annotated[bool, Option("--all", help="Print all classes.")] = False,
    coverage: Coverage = None,
    reject: Annotated[bool, Option("--reject", help="Mark images unlike any the client has seen.")] = False,
    group: GroupOption = "image",
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of CSV.")] = False,
    out: Annotated[Path | None, options.output_file("Write to this file instead of stdout.")] = None,
    import_: options.Import = None,
    quiet: options.Quiet = False,
) -> None:
    """Classify images with an exported classifier.

    The output is CSV. With --coverage it has a set of classes per image, and a decision where the
    set has one class. With --reject it marks images unlike the client's; about 5 % of familiar ones
    are marked, too. A group is the column group of a table, or the folder of images.
    The exit code is 1 if an image cannot be read.
    """
    from fedvlm.classifier.predict import predict as run
    from fedvlm.storage.files import write_file

    settings = options.parse_pairs("--access", access)
    with progress() as report:
        on_progress = partial(report, "predicting")
        predictions = run(folder, images, encoder, settings, on_progress, coverage, reject, group)
    lines = table(predictions, len(predictions.classes) if all_classes else top, coverage is not None)
    text = _json(predictions, lines) if as_json else _csv(lines)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_file(out, text.encode())
    _report_problems(predictions.notes, predictions.skipped)


def table(predictions: "Predictions", top: int, sets: bool) -> list[dict[str, Any]]:
    """Return one line per image and rank; the header says if probabilities are not calibrated."""
    title = "uncalibrated probability" if any("not calib" in n for n in predictions.notes) else ""
    lines = []
    for row in predictions.rows:
        ranking = row.probabilities[:top] if row.findings is None else row.probabilities[:1]
        for rank, (label, chance) in enumerate(ranking, start=1):
            line: dict[str, Any] = {"file": row.file}
            if row.findings is not None:  # one line per image, with the probability of every finding
                line |= {"findings": row.label}
                line |= {name: round(dict(row.probabilities)[name], 4) for name in predictions.classes}
            else:
                line |= ({"rank": rank} if top > 1 else {}) | {"class": label, title or "probability": round(chance, 4)}
            if sets:
                line |= {"set": list(row.prediction_set or ()), "decision": row.decision}
            if row.rejected is not None:
                line["rejected"] = row.rejected
            lines.append(line)
    return lines


def _csv(lines: list[dict[str, Any]]) -> str:
    text = StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(lines[0] if lines else ["file", "class", "probability"])
    for line in lines:
        out.writerow(_cell(value) for value in line.values())
    return text.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "|".join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _json(predictions: "Predictions", lines: list[dict[str, Any]]) -> str:
    document = {"notes": predictions.notes, "skipped": predictions.skipped, "predictions": lines}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def score(
    folder: Folder,
    data: Annotated[str, Argument(help="Labelled images, e.g. in one folder per class; or store:TABLE.")],
    source: options.Source = None,
    encoder: EncoderOption = "",
    access: options.Access = None,
    coverage: Coverage = None,
    group: GroupOption = "image",
    as_json: options.Json = False,
) -> None:
    """Evaluate an exported classifier on labelled images.

    The exit code is 1 if an image cannot be read.
    """
    from fedvlm.classifier.predict import score as run
    from fedvlm.report.tables import render_table

    reading, settings = options.parse_pairs("--source", source), options.parse_pairs("--access", access)
    with progress() as report:
        on_progress = partial(report, "predicting")
        evaluation = run(folder, data, reading, encoder, settings, on_progress, coverage, group)
    if as_json:
        typer.echo(json.dumps(asdict(evaluation), indent=1, ensure_ascii=False))
    else:
        rows = [["images" if group == "image" else "groups", str(evaluation.rows)]]
        rows += [[name, f"{100 * fraction:.2f}"] for name, fraction in evaluation.metrics.items()]
        rows += [[f"recall of {name}", f"{100 * fraction:.2f}"] for name, fraction in evaluation.recall.items()]
        for metric in ("AUC", "AP"):
            of_findings = {name: scores[metric] for name, scores in evaluation.findings.items() if metric in scores}
            rows += [[f"{metric} of {name}", f"{100 * value:.2f}"] for name, value in of_findings.items()]
        if evaluation.size is not None and evaluation.coverage is not None and evaluation.decided is not None:
            rows.append([f"coverage (target {100 * (coverage or 0):g} %)", f"{evaluation.coverage:.2%}"])
            rows.append(["mean set size", f"{evaluation.size:.2f}"])
            rows.append(["decided (one class)", f"{evaluation.decided:.2%}"])
        typer.echo(render_table(["", "%"], rows, "text", True), nl=False)
    _report_problems(evaluation.notes, evaluation.skipped)


def _report_problems(notes: list[str], skipped: list[tuple[str, str]]) -> None:
    for message in notes:
        typer.echo(f"note: {message}", err=True)
    for name, reason in skipped:
        typer.echo(f"skipped {name}: {reason}", err=True)
    if skipped:
        sys.exit(1)


def serve(
    folder: Folder,
    port: options.Port = 8766,
    host: options.Host = "127.0.0.1",
    token_file: options.TokenFile = None,
    tls_cert: options.TlsCertificate = None,
    tls_key: options.TlsKey = None,
    encoder: EncoderOption = "",
    access: options.Access = None,
    import_: options.Import = None,
) -> None:
    """Serve an exported classifier over HTTP, with a page for people.

    Programs find the interface at /openapi.json. Images are neither stored nor logged.
    """
    import logging

    from fedvlm.encoders.serve import serve as listen
    from fedvlm.serving import create_app, open_service

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    service = open_service(folder, encoder, options.parse_pairs("--access", access))
    place: dict[str, Any] = {"host": host, "port": port, "tls_cert": tls_cert, "tls_key": tls_key}
    ready = partial(options.echo_url, f"serving {folder} at")
    listen(lambda token: create_app(service, token), **place, token_file=token_file, ready=ready)


def export(
    run: Annotated[Path, Argument(help="Folder of the run.")],
    folder: Annotated[Path, Argument(help="New folder of the classifier.")],
    client: Annotated[str, Option(help="Client whose classifier is exported.")],
    onnx: Annotated[bool, Option("--onnx", help="Also write the head as ONNX.")] = False,
    import_: options.Import = None,
) -> None:
    """Export one client's classifier from a run.

    The folder has tensors, settings, class names, the encoder's fingerprint and a model card.
    """
    from fedvlm.classifier.export import export as write

    classifier = write(run, client, folder, onnx)
    about = f"{len(classifier.frozen.classes)} classes, {classifier.encoder}"
    typer.echo(f"{classifier.method.name} for {client} ({about}) is in {folder}")


def join(
    run: Annotated[Path, Argument(help="Folder of a finished run.")],
    data: Annotated[str, Argument(help="Images of the new client.")],
    out: Annotated[Path, Option("--output", "-o", help="New folder of the classifier.")],
    client: Annotated[str, Option(help="Name of the new client.")] = "new",
    source: options.Source = None,
    encoder: Annotated[str, Option(help="Encoder of the run, if it has moved.")] = "",
    access: options.Access = None,
    training: options.Training = None,
    train_ratio: Annotated[float, Option(help="Fraction of the samples to train on.")] = 0.8,
) -> None:
    """Train a classifier for a late client of a finished run.

    No other client takes part.
    """
    from fedvlm.classifier.export import ClassifierOrigin, save_with_card
    from fedvlm.classifier.late_join import embed_for_run
    from fedvlm.classifier.late_join import join as adapt
    from fedvlm.result import Result

    result = Result(run)
    with progress() as report:
        pairs = options.parse_pairs("--source", source), options.parse_pairs("--access", access)
        rows, notes = embed_for_run(result, data, pairs[0], encoder, pairs[1], report)
    for message in notes:
        typer.echo(message, err=True)
    done = adapt(result, rows, client, training=training, train_fraction=train_ratio)
    facts = {**result.manifest, "data": rows.name, "rows": rows.fingerprint}
    counts = done.n_test_samples, round(done.accuracy * done.n_test_samples)
    save_with_card(done.classifier, ClassifierOrigin(facts, f"joined {result.folder.name}", *counts), out)
    if not done.is_adapted:
        name = done.classifier.method.name
        typer.echo(f"{name} does not adapt to a client; {client} gets the shared classifier")
    typer.echo(
        f"{client}: {100 * done.accuracy:.2f} % accuracy on {done.n_test_samples} held-out samples "
        f"({100 * done.unseen_accuracy:.2f} % without adaptation), "
        f"trained on {done.n_train_samples} samples; saved to {out}"
    )
