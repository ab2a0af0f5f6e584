"""Define what commands share: options, sections of the help and examples."""

import json
from pathlib import Path
from typing import Annotated, Any

import click
import typer
import typer.core
from typer import Argument, Option

from fedvlm.errors import SettingsError

QUIET_KEY = "fedvlm.quiet"  # in the meta of a click context


class SectionedGroup(typer.core.TyperGroup):
    """Show the commands of a group in sections by task, each with its whole one-line help."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                title = getattr(command, "rich_help_panel", None) or "Commands"
                sections.setdefault(str(title), []).append((name, command.get_short_help_str(limit=1000)))
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])


def examples(*commands: str) -> str:
    """Return the last part of a command's help, which keeps its line breaks."""
    title = "Example:" if len(commands) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  {command}" for command in commands)])


def output_file(help: str) -> Any:
    """Declare --output of a command that writes one file."""
    return Option("--output", "-o", dir_okay=False, help=help)


def echo_error(text: str) -> None:
    typer.echo(text, err=True)


def echo_url(text: str, url: str) -> None:
    typer.echo(f"{text} {url}")


def to_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)


def parse_pairs(option: str, pairs: list[str] | None) -> dict[str, Any]:
    """Read the KEY=VALUE pairs of --source or --access."""
    from fedvlm.runner.settings import override

    for pair in pairs or []:
        if "=" not in pair:
            raise SettingsError(f"{option} must be KEY=VALUE, got {pair!r}")
    return override({}, pairs or [])


def _set_quiet(context: typer.Context, is_quiet: bool) -> bool:
    context.meta[QUIET_KEY] = is_quiet
    return is_quiet


def is_quiet() -> bool:
    """Return whether the command that runs now was called with --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET_KEY))


def _import_files(paths: list[Path] | None) -> list[Path] | None:
    if paths:
        from fedvlm.plugins import import_file

        for path in paths:
            import_file(path)
    return paths


Import = Annotated[
    list[Path] | None,
    Option("--import", callback=_import_files, help="Python file with methods of your own. Repeatable."),
]
Set = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. method.lr=0.01. Repeatable.")
]
Source = Annotated[
    list[str] | None,
    Option("--source", metavar="KEY=VALUE", help="Option for reading the data, e.g. layout=class. Repeatable."),
]
Access = Annotated[
    list[str] | None,
    Option("--access", metavar="KEY=VALUE", help="Option for the encoder, e.g. token_file=FILE. Repeatable."),
]
Data = Annotated[str, Argument(help="Path of your data, or a name of `fedvlm list datasets`.")]
Encoder = Annotated[str | None, Option(help="Encoder (see `fedvlm list encoders`).")]
TableFormat = Annotated[str, Option("--format", help="Output format: text, markdown, latex, csv or json.")]
Force = Annotated[bool, Option("--force", help="Re-run even if a finished result exists.")]
Smoke = Annotated[bool, Option("--smoke", help="Do a short run on a few samples to test the setup.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, Option("--quiet", "-q", callback=_set_quiet, help="Hide progress.")]
Training = Annotated[str | None, Option(help="Training of the run (default: the first).")]
Seed = Annotated[int | None, Option(help="Seed of the run (default: the first).")]
Port = Annotated[int, Option(help="Port to listen on.")]
Host = Annotated[str, Option(help="Address to listen on.")]
TokenFile = Annotated[Path | None, Option(help="File with the token that clients must send.")]
TlsCertificate = Annotated[Path | None, Option(help="TLS certificate (PEM).")]
TlsKey = Annotated[Path | None, Option(help="TLS private key (PEM).")]
