"""The command that draws runs."""

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    kind: Annotated[
        str,
        typer.Option(
            help="rounds, sweep, bars, reliability, roc, decision, partition, kite, tsne or heat; "
            "left out, a run's reliability, decision curve and rounds."
        ),
    ] = "",
    columns: Annotated[str, typer.Option(help="A panel each, as C,worst; of rounds, sweep and bars.")] = "",
    over: Annotated[str, typer.Option(help="The setting along the axis, as method.blocks.")] = "",
    training: Annotated[str | None, typer.Option(help="One of its trainings; the first.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the run; its first.")] = None,
    image: Annotated[Path | None, typer.Option(help="What prompts look at, for heat.")] = None,
    name: Annotated[str | None, typer.Option("--class", help="A class, for heat.")] = None,
    client: Annotated[str | None, typer.Option(help="Whose local prompt, for heat.")] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="The .png or .svg file.")] = None,
) -> None:
    """Draw a run, or several in one picture."""
    from fedvlm.errors import SettingsError
    from fedvlm.record import Record
    from fedvlm.report.plots import draw_diagrams, draw_runs

    results = [Record(path) for path in runs]
    if not kind:
        if len(results) != 1:
            raise SettingsError("several runs are drawn as one --kind, as rounds or bars")
        path = draw_diagrams(results[0], out or runs[0] / "diagrams.png", training, seed)
    else:
        folder = runs[0] if len(runs) == 1 else runs[0].parent
        path = draw_runs(
            kind,
            results,
            out or folder / f"{kind}.png",
            columns=[column.strip() for column in columns.split(",") if column.strip()],
            over=over,
            training=training,
            seed=seed,
            image=image,
            class_name=name,
            client=client,
        )
    typer.echo(f"image: {path}")
