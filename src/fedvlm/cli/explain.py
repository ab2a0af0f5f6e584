"""The command that draws what a run's prompts have learnt."""

from pathlib import Path
from typing import Annotated

import typer


def explain(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    image: Annotated[Path | None, typer.Option(help="An image, of any data.")] = None,
    name: Annotated[str | None, typer.Option("--class", help="A class; the client's own answer if left out.")] = None,
    client: Annotated[str | None, typer.Option(help="Whose local prompt; the first.")] = None,
    gamma: Annotated[list[float] | None, typer.Option(help="γ in (0, 1]; several times for several.")] = None,
    prompts: Annotated[bool, typer.Option("--prompts", help="A map of the clients' prompts instead.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of the run; its first.")] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="The PNG file.")] = None,
) -> None:
    """Draw what the global and a local prompt look at in an image, or a map of local prompts."""
    from fedvlm.errors import SettingsError
    from fedvlm.report import explain as explaining
    from fedvlm.report.plots import draw_explanation, draw_prompt_map

    if (image is None) == (not prompts):
        raise SettingsError("explain draws one thing: give --image FILE, or --prompts")
    if prompts:
        path = draw_prompt_map(explaining.prompt_map(run, seed), out or run / "prompts.png")
        typer.echo(f"image: {path}")
        return
    assert image is not None
    explained = explaining.explain(run, image, name=name, client=client, gammas=gamma, seed=seed)
    typer.echo(
        f"client {explained.client} gives {explained.name} {explained.probability:.1%}, "
        f"its answer is {explained.likeliest}"
    )
    typer.echo(f"image: {draw_explanation(explained, out or run / f'explain-{image.stem}.png')}")
