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
Where = Annotated[str, typer.Option(help="Where its encoder is now, if it moved.")]
Access = Annotated[
    list[str] | None, typer.Option(help="key=value for the encoder, as token_file=FILE.")
]
Promise = Annotated[
    float | None, typer.Option(help="Sets that hold the true class so often, as 0.95.")
]


def predict(
    folder: Folder,
    images: Annotated[
        list[Path], typer.Argument(help="Images, folders, .zip archives, or tables of embeddings.")
    ],
    encoder: Where = "",
    access: Access = None,
    top: Annotated[int, typer.Option(min=1, help="A line for each of the likeliest classes.")] = 1,
    every: Annotated[bool, typer.Option("--all", help="A line for each class.")] = False,
    coverage: Promise = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of CSV.")] = False,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="A file instead of the screen.")
    ] = None,
) -> None:
    """The likeliest class of each image, as CSV; exit code 1 if an image could not be read.

    With --coverage the set of classes beside it, and a decision where the set has one class: else
    the classifier abstains.
    """
    from fedvlm.classifier.predict import predict as run
    from fedvlm.storage.files import write

    with progress() as report:
        found = run(
            folder,
            images,
            encoder,
            options(access),
            lambda done, total: report("predicting", done, total),
            coverage,
        )
    lines = table(found, len(found.classes) if every else top, coverage is not None)
    text = _json(found, lines) if as_json else _csv(lines)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write(out, text.encode())
    _say(found.notes, found.skipped)


def table(found: "Predictions", top: int, sets: bool) -> list[dict[str, Any]]:
    """One line per image and rank; the probability's name says if nothing has calibrated it."""
    title = "uncalibrated probability" if any("not calib" in n for n in found.notes) else ""
    lines = []
    for one in found.rows:
        for rank, (label, chance) in enumerate(one.chances[:top], start=1):
            line: dict[str, Any] = {"file": one.file}
            if top > 1:
                line["rank"] = rank
            line |= {"class": label, title or "probability": round(chance, 4)}
            if sets:
                line |= {"set": list(one.within or ()), "decision": one.decision}
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


def _json(found: "Predictions", lines: list[dict[str, Any]]) -> str:
    whole = {"notes": found.notes, "skipped": found.skipped, "predictions": lines}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def score(
    folder: Folder,
    data: Annotated[str, typer.Argument(help="Images in folders named after their class.")],
    source: Source = None,
    encoder: Where = "",
    access: Access = None,
    coverage: Promise = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """How well a classifier does on labelled images; exit code 1 if one could not be read."""
    from fedvlm.classifier.score import score as run
    from fedvlm.report.tables import render

    with progress() as report:
        found = run(
            folder,
            data,
            options(source),
            encoder,
            options(access),
            lambda done, total: report("predicting", done, total),
            coverage,
        )
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1, ensure_ascii=False))
    else:
        rows = [["images", str(found.rows)]]
        rows += [[name, f"{100 * one:.2f}"] for name, one in found.metrics.items()]
        rows += [[f"recall of {name}", f"{100 * one:.2f}"] for name, one in found.recall.items()]
        if found.size is not None and found.coverage is not None and found.decided is not None:
            rows.append([f"coverage, {100 * (coverage or 0):g} promised", f"{found.coverage:.2%}"])
            rows.append(["classes in a set", f"{found.size:.2f}"])
            rows.append(["decided, not abstained", f"{found.decided:.2%}"])
        typer.echo(render(["", "%"], rows, "text", True), nl=False)
    _say(found.notes, found.skipped)


def _say(notes: list[str], skipped: list[tuple[str, str]]) -> None:
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    for name, reason in skipped:
        typer.echo(f"skipped {name}: {reason}", err=True)
    if skipped:
        sys.exit(1)
