"""Commands that tell people what a federation is doing."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedvlm.cli.keys import deploy_app

__all__ = ["deploy_app"]  # with these commands
Folder = Annotated[Path, typer.Argument(help="DIR/server or DIR/site-NAME")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@deploy_app.command()
def doctor(folder: Folder, as_json: Json = False) -> None:
    """Look at all that a server or a site needs, before anything runs; 1 if something is wrong."""
    from dataclasses import asdict

    from fedvlm.deploy.operations.status import check_folder

    checks = check_folder(folder)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=1, ensure_ascii=False))
    for check in () if as_json else checks:
        typer.echo(f"{'ok ' if check.ok else '!! '} {check.check}: {check.detail}")
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


@deploy_app.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """Say how a server or a site is: the run, the round, who answers, what has left."""
    from fedvlm.deploy.operations.status import format_status
    from fedvlm.deploy.operations.status import status as state_of

    state = state_of(folder)
    document = json.dumps(state, indent=1, ensure_ascii=False, default=str)
    for line in [document] if as_json else format_status(state):
        typer.echo(line)


@deploy_app.command()
def log(
    folder: Folder,
    as_json: Json = False,
    follow: Annotated[bool, typer.Option(help="Go on with what comes.")] = False,
) -> None:
    """Print what a server or a site has done, a line each."""
    from time import sleep

    from fedvlm.deploy.operations.events import Event, EventTail, format_event, read_events
    from fedvlm.deploy.operations.status import is_server

    def show(event: Event) -> None:
        typer.echo(json.dumps(event, ensure_ascii=False) if as_json else format_event(event))

    is_server(folder)
    tail = EventTail(folder)
    for event in read_events(folder):
        show(event)
    while follow:
        for event in tail.read_new():
            show(event)
        sleep(0.3)


@deploy_app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="DIR/server")],
    stop: Annotated[bool, typer.Option(help="Stop the run that is going on.")] = False,
    resume: Annotated[str, typer.Option(help="Go on with a stopped one, by its name.")] = "",
    as_json: Json = False,
) -> None:
    """List a server's runs, stop the one that is going on, or resume one."""
    from fedvlm.cli.progress import progress
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.operations.status import list_runs as listed
    from fedvlm.deploy.server.launch import resume_run as go_on
    from fedvlm.deploy.server.launch import stop_runs as end
    from fedvlm.report.tables import compare_table

    kit = read_server(folder)
    if stop:
        typer.echo(f"stopped: {', '.join(end(kit)) or 'there was none'}")
    elif resume:
        with progress() as report:
            result = go_on(kit, resume, report, lambda text: typer.echo(text, err=True))
        typer.echo(compare_table([result]), nl=False)
    else:
        run_rows = listed(folder)
        if as_json:
            typer.echo(json.dumps(run_rows, indent=1, ensure_ascii=False))
        for run in () if as_json else run_rows:
            typer.echo(f"{run['name']}: {run['method']}, {run['state']}, {run['rounds']} rounds")
        if not run_rows and not as_json:
            typer.echo("no run yet: fedvlm deploy run DIR/server EXPERIMENT")


@deploy_app.command()
def watch(
    folder: Folder,
    port: Annotated[int, typer.Option(help="0 is any that is free.")] = 0,
) -> None:
    """Show a live page of a server or a site, on this machine only. Ctrl-C stops it."""
    from fedvlm.deploy.operations.live_page import serve_live_page

    serve_live_page(folder, port, lambda url: typer.echo(f"open {url}"))
