"""Commands that ask a saved classifier: of images, and of labelled images how well it does."""

import csv
import json
import sys
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlm.cli.data import Source, options
from fedvlm.cli.progress import progress

if TYPE_CHECKING:
    from fedvlm.classifier.predict import Predictions

Folder = Annotated[Path, typer.Argument(help="A classifier that `fedvlm export` wrote.")]
EncoderOption = Annotated[str, typer.Option(help="Where its encoder is now, if it moved.")]
Access = Annotated[list[str] | None, typer.Option(help="key=value for the encoder, as token_file=FILE.")]
Promise = Annotated[float | None, typer.Option(help="Sets that hold the true class so often, as 0.95.")]


def predict(
    folder: Folder,
    images: Annotated[list[Path], typer.Argument(help="Images, folders, .zip archives, or tables of embeddings.")],
    encoder: EncoderOption = "",
    access: Access = None,
    top: Annotated[int, typer.Option(min=1, help="A line for each of the likeliest classes.")] = 1,
    all_classes: Annotated[bool, typer.Option("--all", help="A line for each class.")] = False,
    coverage: Promise = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of CSV.")] = False,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="A file instead of the screen.")] = None,
) -> None:
    """The likeliest class of each image, as CSV; exit code 1 if an image could not be read.

    With --coverage the set of classes beside it, and a decision where the set has one class: else
    the classifier abstains.
    """
    from fedvlm.classifier.predict import predict as run
    from fedvlm.storage.files import write_file

    with progress() as report:
        predictions = run(
            folder,
            images,
            encoder,
            options(access),
            lambda done, total: report("predicting", done, total),
            coverage,
        )
    lines = table(predictions, len(predictions.classes) if all_classes else top, coverage is not None)
    text = _json(predictions, lines) if as_json else _csv(lines)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_file(out, text.encode())
    _report_problems(predictions.notes, predictions.skipped)


def table(predictions: "Predictions", top: int, sets: bool) -> list[dict[str, Any]]:
    """One line per image and rank; the probability's name says if nothing has calibrated it."""
    title = "uncalibrated probability" if any("not calib" in n for n in predictions.notes) else ""
    lines = []
    for row in predictions.rows:
        for rank, (label, chance) in enumerate(row.probabilities[:top], start=1):
            line: dict[str, Any] = {"file": row.file}
            if top > 1:
                line["rank"] = rank
            line |= {"class": label, title or "probability": round(chance, 4)}
            if sets:
                line |= {"set": list(row.prediction_set or ()), "decision": row.decision}
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
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _json(predictions: "Predictions", lines: list[dict[str, Any]]) -> str:
    document = {"notes": predictions.notes, "skipped": predictions.skipped, "predictions": lines}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def score(
    folder: Folder,
    data: Annotated[str, typer.Argument(help="Images in folders named after their class.")],
    source: Source = None,
    encoder: EncoderOption = "",
    access: Access = None,
    coverage: Promise = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """How well a classifier does on labelled images; exit code 1 if one could not be read."""
    from fedvlm.classifier.predict import score as run
    from fedvlm.report.tables import render_table

    with progress() as report:
        evaluation = run(
            folder,
            data,
            options(source),
            encoder,
            options(access),
            lambda done, total: report("predicting", done, total),
            coverage,
        )
    if as_json:
        typer.echo(json.dumps(asdict(evaluation), indent=1, ensure_ascii=False))
    else:
        rows = [["images", str(evaluation.rows)]]
        rows += [[name, f"{100 * fraction:.2f}"] for name, fraction in evaluation.metrics.items()]
        rows += [[f"recall of {name}", f"{100 * fraction:.2f}"] for name, fraction in evaluation.recall.items()]
        if evaluation.size is not None and evaluation.coverage is not None and evaluation.decided is not None:
            rows.append([f"coverage, {100 * (coverage or 0):g} promised", f"{evaluation.coverage:.2%}"])
            rows.append(["classes in a set", f"{evaluation.size:.2f}"])
            rows.append(["decided, not abstained", f"{evaluation.decided:.2%}"])
        typer.echo(render_table(["", "%"], rows, "text", True), nl=False)
    _report_problems(evaluation.notes, evaluation.skipped)


def _report_problems(notes: list[str], skipped: list[tuple[str, str]]) -> None:
    for message in notes:
        typer.echo(f"note: {message}", err=True)
    for name, reason in skipped:
        typer.echo(f"skipped {name}: {reason}", err=True)
    if skipped:
        sys.exit(1)
