"""Commands that hand a result on, and show what left a site."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


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


def ledger(
    folder: Annotated[Path, typer.Argument(help="A site's folder.")],
    head: Annotated[str, typer.Option(help="A head noted before; it must still be there.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What left a site and what came in, checked line by line; exit code 1 if it was changed."""
    from fedvlm.deploy.site.ledger import Ledger
    from fedvlm.report.tables import render_table

    history = Ledger(folder).read()
    if as_json:
        typer.echo(json.dumps(history.lines, indent=1, ensure_ascii=False))
    else:
        names = ["time", "direction", "kind", "round", "bytes", "content"]
        rows = [[*(str(line.get(key, ""))[:23] for key in names), _describe_line(line)] for line in history.lines]
        typer.echo(render_table([*names, "what"], rows, "text", True), nl=False)
    for number in history.torn:
        typer.echo(f"line {number} was cut short by a crash; nothing was sent for it", err=True)
    wrong = [*history.broken]
    if head and not history.contains(head):
        wrong.append(f"the head {head} is not in the ledger: its end was cut off or rewritten")
    for problem in wrong:
        typer.echo(problem, err=True)
    if wrong:
        sys.exit(1)
    typer.echo(f"{len(history.lines)} lines, each follows the one before; head {history.head}", err=True)


def _describe_line(line: dict[str, Any]) -> str:
    """Why nothing left, or what did: each name with its type and shape."""
    if "error" in line:
        return str(line["error"]).splitlines()[0]
    if "strangers" in line:
        return f"{line['strangers']} messages that the server did not sign"
    return ", ".join(f"{name} {shape}" for name, shape in line["fields"].items())
