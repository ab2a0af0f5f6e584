"""Commands that hand a result on, use it, and show what left a site."""

import csv
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedvlm.cli.data import options
from fedvlm.cli.progress import progress


def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    folder: Annotated[Path, typer.Argument(help="Where the classifier goes.")],
    client: Annotated[str, typer.Option(help="Whose classifier.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Also the head as ONNX.")] = False,
) -> None:
    """Write one client's classifier: tensors, settings, class names, encoder and a card."""
    from fedvlm.classifier.export import export as write

    classifier = write(run, client, folder, onnx)
    typer.echo(
        f"{classifier.method.name} for {client} ({len(classifier.frozen.classes)} classes, "
        f"{classifier.encoder}) is in {folder}"
    )


def predict(
    folder: Annotated[Path, typer.Argument(help="A classifier that `fedvlm export` wrote.")],
    images: Annotated[list[Path], typer.Argument(help="Pictures, folders or .zip archives.")],
    encoder: Annotated[str, typer.Option(help="Where its encoder is now, if it moved.")] = "",
    access: Annotated[
        list[str] | None, typer.Option(help="key=value for the encoder, as token_file=FILE.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A CSV file instead of the screen.")] = None,
) -> None:
    """The likeliest class of each picture, as CSV; exit code 1 if a picture could not be read."""
    from io import StringIO

    from fedvlm.classifier.predict import predict as run
    from fedvlm.storage.files import write

    with progress() as told:
        found = run(
            folder,
            images,
            encoder,
            options(access),
            lambda done, total: told("predicting", done, total),
        )
    text = StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["file", "class", "probability"])
    table.writerows([one.file, one.label, f"{one.probability:.4f}"] for one in found.rows)
    if out is None:
        typer.echo(text.getvalue(), nl=False)
    else:
        write(out, text.getvalue().encode())
    for name, reason in found.skipped:
        typer.echo(f"skipped {name}: {reason}", err=True)
    if found.skipped:
        sys.exit(1)


def ledger(
    folder: Annotated[Path, typer.Argument(help="A site's folder.")],
    head: Annotated[str, typer.Option(help="A head noted before; it must still be there.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What left a site and what came in, checked line by line; exit code 1 if it was changed."""
    from fedvlm.deploy.ledger import Ledger
    from fedvlm.report.tables import render

    told = Ledger(folder).read()
    if as_json:
        typer.echo(json.dumps(told.lines, indent=1, ensure_ascii=False))
    else:
        names = ["time", "direction", "kind", "round", "bytes", "content"]
        rows = [
            [*(str(line.get(key, ""))[:23] for key in names), _what(line)] for line in told.lines
        ]
        typer.echo(render([*names, "what"], rows, "text", True), nl=False)
    for number in told.torn:
        typer.echo(f"line {number} was cut short by a crash; nothing was sent for it", err=True)
    wrong = [*told.broken]
    if head and not told.knows(head):
        wrong.append(f"the head {head} is not in the ledger: its end was cut off or rewritten")
    for one in wrong:
        typer.echo(one, err=True)
    if wrong:
        sys.exit(1)
    typer.echo(f"{len(told.lines)} lines, each follows the one before; head {told.head}", err=True)


def _what(line: dict[str, Any]) -> str:
    """Why nothing left, or what did: each name with its type and shape."""
    if "error" in line:
        return str(line["error"]).splitlines()[0]
    if "strangers" in line:
        return f"{line['strangers']} messages that the server did not sign"
    return ", ".join(f"{name} {shape}" for name, shape in line["fields"].items())
