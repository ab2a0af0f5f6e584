"""The command line, the only package that prints."""

import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core
from typer import Option

from fedvlm.cli.classifier import export, join, predict, score, serve
from fedvlm.cli.data import cache_app, data_report, describe, embed, partition, serve_encoder
from fedvlm.cli.deploy import export_app, ledger
from fedvlm.cli.enrolment import deploy_app
from fedvlm.cli.options import SectionedGroup, examples
from fedvlm.cli.results import audit, compare, explain, export_data, list_, plot, report, resume, verify
from fedvlm.cli.run import demo, grow, reproduce, run

typer.core.HAS_RICH = False  # else typer escapes brackets for rich, although this help is plain
app = typer.Typer(
    no_args_is_help=True,
    cls=SectionedGroup,
    add_completion=False,
    suggest_commands=False,  # click suggests a command already
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # a traceback must not print local variables: samples, keys
    pretty_exceptions_show_locals=False,
    help="Adapt a frozen vision-language model across sites whose images may not leave them.",
)


def _version(show_version: bool) -> None:
    if show_version:
        from fedvlm import __version__

        typer.echo(f"fedvlm {__version__}")
        raise typer.Exit


@app.callback(epilog=examples("fedvlm demo", "fedvlm run --data images", "fedvlm COMMAND --help"))
def options(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Print the traceback of an error.")] = False,
) -> None:
    if context.obj is not None:
        context.obj["verbose"] = verbose


# The sections of `fedvlm --help`: each command with examples of its use.
SECTIONS: dict[str, dict[Callable[..., None], tuple[str, ...]]] = {
    "Run": {
        demo: ("fedvlm demo",),
        run: (
            "fedvlm run --data images",
            "fedvlm run --data images --method fedot --set method.lr=0.01",
            "fedvlm run pacs --seed 0 --seed 1 --output runs/pacs",
        ),
        resume: ("fedvlm resume runs/images/fedot-images-1a2b3c4d",),
        grow: ("fedvlm grow runs/ridge images-with-new-class --output runs/ridge-2",),
        reproduce: ("fedvlm reproduce fedot-v1/T1", "fedvlm reproduce fedot-v1/T1 --smoke --data demo --encoder demo"),
        list_: ("fedvlm list methods", "fedvlm list methods fedot", "fedvlm list papers --json"),
    },
    "Results": {
        compare: ("fedvlm compare runs/images --columns balanced,F1,AUC", "fedvlm compare runs/pacs --format latex"),
        report: ("fedvlm report runs/images --title 'Our images'",),
        plot: ("fedvlm plot runs/demo/shift/0-fedot", "fedvlm plot runs/a runs/b --kind rounds --output rounds.svg"),
        explain: ("fedvlm explain runs/prompts --image dog.jpg --class dog", "fedvlm explain runs/prompts --prompts"),
        audit: ("fedvlm audit runs/images/fedot-images-1a2b3c4d --save",),
        export_data: ("fedvlm export-data runs/images/auto-images-1a2b3c4d --format csv",),
        verify: ("fedvlm verify runs/images/fedot-images-1a2b3c4d", "fedvlm verify cache"),
    },
    "Classifiers": {
        export: ("fedvlm export runs/images/auto-images-1a2b3c4d classifier --client north",),
        predict: (
            "fedvlm predict classifier photos --top 3",
            "fedvlm predict classifier photos --coverage 0.95 --output out.csv",
        ),
        serve: ("fedvlm serve classifier --port 8766", "fedvlm serve classifier --host 0.0.0.0 --token-file token"),
        score: ("fedvlm score classifier labelled-images --json",),
        join: ("fedvlm join runs/images/tofa-images-1a2b3c4d images/west --output west",),
    },
    "Data and encoders": {
        partition: ("fedvlm partition images", "fedvlm partition images --set clients.partition=dirichlet --seed 1"),
        data_report: ("fedvlm data-report images --min-count 16 --output data.html",),
        embed: ("fedvlm embed images --encoder hf:openai/clip-vit-base-patch16",),
        describe: ("fedvlm describe images --model models/llm --output classes.json",),
        serve_encoder: ("fedvlm serve-encoder demo --port 8765 --token-file token",),
    },
    "Sites": {
        ledger: ("fedvlm ledger north",),
        export_app: (
            "fedvlm export-app flower app --method fedot --data images --encoder demo",
            "fedvlm export-app flower app experiment.toml",
        ),
    },
}
for section, commands in SECTIONS.items():
    for function, lines in commands.items():
        name = function.__name__.rstrip("_").replace("_", "-")
        app.command(name, rich_help_panel=section, epilog=examples(*lines))(function)
app.add_typer(cache_app, name="cache", rich_help_panel="Data and encoders")
app.add_typer(deploy_app, name="deploy", rich_help_panel="Sites")

INTERRUPTED_EXIT_CODE = 130  # what typer exits with after Ctrl-C


def _describe(error: Exception) -> str:
    """Return an error in one line; that of a disk, such as a full one, with its path."""
    if not isinstance(error, OSError):
        return str(error)
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}; choose another path"


def main() -> None:
    """Run the command line; an error that the user can fix is one line with exit code 2."""
    from fedvlm.errors import FedVLMError, OutsideWarning

    usual = warnings.formatwarning

    def format_in_one_line(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> str:
        if issubclass(category, OutsideWarning):
            return f"fedvlm: {message}\n"
        return usual(message, category, *args, **kwargs)

    warnings.formatwarning = format_in_one_line
    flags: dict[str, bool] = {}
    try:
        app(obj=flags)
    except (FedVLMError, OSError) as error:
        if flags.get("verbose"):
            raise
        typer.echo(f"fedvlm: {_describe(error)}", err=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED_EXIT_CODE:
            typer.echo("fedvlm: stopped; the same command resumes the run", err=True)
        raise
