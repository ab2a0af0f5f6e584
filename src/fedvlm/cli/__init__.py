"""The command line: the only package that talks to a person."""

import sys
import warnings
from typing import Annotated, Any

import typer
import typer.core

from fedvlm.cli.classifier import export, join, predict, score
from fedvlm.cli.data import cache_app, describe, embed, partition, serve_encoder
from fedvlm.cli.deploy import ledger
from fedvlm.cli.enrolment import deploy_app
from fedvlm.cli.results import audit, compare, explain, list_, plot, report, resume, verify
from fedvlm.cli.run import demo, reproduce, run

typer.core.HAS_RICH = False  # typer escapes brackets for rich also where help is plain
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,  # click asks whether another was meant, and once is enough
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # nor local variables in what a crash prints: rows, keys
    pretty_exceptions_show_locals=False,
    help="Adapt a frozen vision-language model across sites whose images may not leave them.",
)


def _version(show_version: bool) -> None:
    if show_version:
        from fedvlm import __version__

        typer.echo(f"fedvlm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Tell the version.")
    ] = False,
) -> None: ...


app.command()(demo)
app.command()(run)
app.command()(resume)
app.command()(compare)
app.command()(reproduce)
app.command()(report)
app.command()(plot)
app.command()(explain)
app.command()(audit)
app.command("list")(list_)
app.command()(embed)
app.command()(partition)
app.command("serve-encoder")(serve_encoder)
app.command()(join)
app.command()(describe)
app.command()(export)
app.command()(predict)
app.command()(score)
app.command()(ledger)
app.command()(verify)
app.add_typer(cache_app, name="cache")
app.add_typer(deploy_app, name="deploy")


INTERRUPTED_EXIT_CODE = 130  # what typer exits with after Ctrl-C


def main() -> None:
    """Entry point: an error a person can put right is said in a few lines, with exit code 2."""
    from fedvlm.errors import FedVLMError, OutsideWarning

    usual = warnings.formatwarning

    def format_in_one_line(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> str:
        if issubclass(category, OutsideWarning):
            return f"fedvlm: {message}\n"
        return usual(message, category, *args, **kwargs)

    warnings.formatwarning = format_in_one_line
    try:
        app()
    except FedVLMError as error:
        typer.echo(f"fedvlm: {error}", err=True)
        sys.exit(2)
    except OSError as error:  # a disk that is read-only or full, a folder in a file's place
        place = f"{error.filename}: " if error.filename else ""
        typer.echo(f"fedvlm: {place}{error.strerror or error}; choose another place", err=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED_EXIT_CODE:
            typer.echo("fedvlm: stopped; the same command goes on where a run was", err=True)
        raise
