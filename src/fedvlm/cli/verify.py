"""Whether what lies on disk is still what was written."""

import sys
from typing import Annotated

import typer


def verify(
    target: Annotated[str, typer.Argument(help="A run, an exported classifier, a store's file, or `cache`.")],
) -> None:
    """Check files against the digests and checksums that were written with them."""
    from fedvlm.report.verify import verify_files

    checked, problems = verify_files(target)
    for name, problem in problems:
        typer.echo(f"{name}: {problem}")
    typer.echo(f"{checked} checked, {len(problems) or 'none'} damaged")
    if problems:
        sys.exit(1)
