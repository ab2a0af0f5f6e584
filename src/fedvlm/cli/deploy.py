"""Commands that take a federation to several machines."""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedvlm.cli.progress import progress

deploy_app = typer.Typer(no_args_is_help=True, help="Run between real sites: kits, server, sites, and a rehearsal.")
Set = Annotated[list[str] | None, typer.Option("--set", help="a.b=value over the settings.")]


@deploy_app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder for the server's and the kits.")],
    sites: Annotated[str, typer.Option(help="Ready kits, for a rehearsal: a,b,c")] = "",
    host: Annotated[str, typer.Option(help="The server, as sites reach it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="One port for everything.")] = 8443,
) -> None:
    """Write the server's folder, with an invitation for sites to join."""
    from fedvlm.deploy.kits import INVITATION_FILE
    from fedvlm.deploy.kits import create_kits as write_kits

    names = [name.strip() for name in sites.split(",") if name.strip()]
    central, *kits = write_kits(folder, names, host, port)
    typer.echo(f"{central}: stays on the server")
    typer.echo(f"{central / INVITATION_FILE}: to each site that is to join; it holds no secret")
    for path in kits:
        typer.echo(f"{path}: to its site")
    if kits:
        typer.echo(
            "ready kits are for rehearsals: their private keys were made here and not at the sites "
            "(fedvlm deploy renew, at the site, makes one there)"
        )


@deploy_app.command()
def server(folder: Annotated[Path, typer.Argument(help="DIR/server")]) -> None:
    """Start the server; sites may connect from then on. Ctrl-C stops it."""
    from time import sleep

    from fedvlm.deploy.events import EventTail, format_event
    from fedvlm.deploy.flower.processes import describe_exit, start_superlink
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.standing import describe_server_expiry
    from fedvlm.errors import FederationError
    from fedvlm.storage.files import exclusive_lock

    _stop_gently()
    kit = read_server(folder)
    with exclusive_lock(folder / ".lock", f"the server of {folder} is already running"):
        link = start_superlink(kit)
        names = ", ".join(kit.sites) or "sites that are yet to be admitted"
        typer.echo(f"the server is up at {kit.address} for {names}; stop it with Ctrl-C")
        for line in describe_server_expiry(kit):
            typer.echo(line)
        tail = EventTail(folder)
        try:
            while link.alive:
                for event in tail.read_new():
                    typer.echo(format_event(event))
                sleep(0.3)
            raise FederationError(describe_exit(link))
        except KeyboardInterrupt:
            typer.echo("the server is stopped", err=True)
        finally:
            link.stop()


@deploy_app.command()
def site(
    folder: Annotated[Path, typer.Argument(help="DIR/site-NAME")],
    data: Annotated[str | None, typer.Option(help="This site's images, CLASS/IMAGE.")] = None,
    encoder: Annotated[str | None, typer.Option(help="`fedvlm list encoders`")] = None,
    source: Annotated[list[str] | None, typer.Option(help="key=value: how to read DATA.")] = None,
    access: Annotated[list[str] | None, typer.Option(help="key=value for the encoder.")] = None,
) -> None:
    """Start a site; what is said here is kept in its site.toml. Ctrl-C stops it."""
    from fedvlm.cli.data import options
    from fedvlm.deploy.kits import read_site, with_options, write_site
    from fedvlm.deploy.rows import embed_site_images
    from fedvlm.deploy.serve import serve_site

    _stop_gently()
    site_options: dict[str, Any] = {"data": data, "encoder": encoder}
    site_options |= {"source": options(source) or None, "access": options(access) or None}
    kit = with_options(read_site(folder), {k: v for k, v in site_options.items() if v is not None})
    with progress() as report:
        for message in embed_site_images(kit, report):
            typer.echo(message, err=True)
    write_site(kit)  # now that it has worked
    try:
        serve_site(kit, lambda text: typer.echo(text))
    except KeyboardInterrupt:
        typer.echo("the site is stopped", err=True)


@deploy_app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="DIR/server")],
    experiment: Annotated[str, typer.Argument(help="A TOML file or an experiment's name.")],
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the records.")] = None,
    again: Annotated[bool, typer.Option(help="Also if it is finished.")] = False,
    quorum: Annotated[float | None, typer.Option(help="Share of sites that must answer.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds a site has for a round.")] = None,
    wait: Annotated[float | None, typer.Option(help="Seconds to wait for sites at first.")] = None,
) -> None:
    """Run an experiment over the sites that are connected, and print its table."""
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.runs import run_over_sites as run_over_sites

    kit = read_server(folder)
    round_options = {"quorum": quorum, "deadline": deadline, "wait": wait}
    rules = {key: value for key, value in round_options.items() if value is not None}
    with progress() as report:
        _run_experiment(
            experiment,
            set_,
            lambda number, settings, place: run_over_sites(
                kit, settings, place, again, report, lambda text: typer.echo(text, err=True), **rules
            ),
            out,
        )


@deploy_app.command()
def local(
    experiment: Annotated[str, typer.Argument(help="A TOML file or an experiment's name.")],
    folder: Annotated[Path, typer.Option(help="For kits, logs and records.")] = Path("rehearsal"),
    set_: Set = None,
) -> None:
    """Rehearse: a process per client on this machine, with TLS, keys and all."""
    from fedvlm.deploy.runs import rehearse

    _stop_gently()
    with progress() as report:
        _run_experiment(
            experiment,
            set_,
            lambda number, settings, place: rehearse(
                settings, folder / f"{number}-{settings.method.name}", progress=report
            ),
            None,
        )


def _run_experiment(experiment: str, set_: list[str] | None, go: Any, out: Path | None) -> None:
    """Every run of an experiment, and one table of them all."""
    from fedvlm.deploy.runs import describe_absences
    from fedvlm.report.tables import compare_table
    from fedvlm.runner.experiment_files import find_experiment, read_toml
    from fedvlm.runner.experiments import experiment_runs
    from fedvlm.runner.settings import build

    values = read_toml(find_experiment(experiment))
    settings = [build(run_settings) for run_settings in experiment_runs(values, set_ or [])]
    several = len(settings) > 1
    results = []
    for number, run_settings in enumerate(settings):
        place = out / f"{number}-{run_settings.method.name}" if out and several else out
        results.append(go(number, run_settings, place))
        for message in describe_absences(results[-1]):
            typer.echo(message, err=True)
    typer.echo(compare_table(results, paper=values.get("paper")), nl=False)
    typer.echo("records: " + ", ".join(str(run_settings.folder) for run_settings in results))


@deploy_app.command()
def reference(
    folder: Annotated[Path, typer.Argument(help="DIR/server")],
    data: Annotated[str, typer.Option(help="Public images; their labels are not used.")],
    encoder: Annotated[str, typer.Option(help="The sites' encoder.")],
    patches: Annotated[bool, typer.Option(help="Also the patch embeddings.")] = False,
) -> None:
    """Embed public images for methods that need a reference, into the server's folder."""
    from fedvlm.deploy.rows import write_reference

    with progress() as report:
        count = write_reference(folder, data, encoder, patches, report)
    typer.echo(f"{count} reference rows are in {folder}")


@deploy_app.command()
def policy(folder: Annotated[Path, typer.Argument(help="DIR/site-NAME")]) -> None:
    """Say in plain words what a site allows, what has left it, and what each rule is good for."""
    from fedvlm.deploy.account import PrivacyBudget
    from fedvlm.deploy.explain import describe_spending, explain_policy
    from fedvlm.deploy.ledger import Ledger
    from fedvlm.deploy.policy import read_policy

    rules = read_policy(folder)
    for line in (*explain_policy(rules), *describe_spending(PrivacyBudget(Ledger(folder)), rules)):
        typer.echo(line)


@deploy_app.command()
def consent(
    folder: Annotated[Path, typer.Argument(help="DIR/site-NAME")],
    by: Annotated[str, typer.Option(help="Who consents.")] = "",
    method: Annotated[list[str] | None, typer.Option(help="To these methods only.")] = None,
    days: Annotated[float, typer.Option(help="For so long.")] = 1.0,
    withdraw: Annotated[bool, typer.Option(help="Take it back.")] = False,
    refuse: Annotated[str, typer.Option(help="Refuse, and why; the reason stays here.")] = "",
) -> None:
    """Say what waits for a person at a site; with --by, consent to it or refuse."""
    from fedvlm.deploy.consent import give_consent, refuse_consent, withdraw_consent
    from fedvlm.deploy.pending import format_request, pending_request

    if withdraw:
        withdraw_consent(folder)
        typer.echo("consent is withdrawn")
        return
    if refuse:
        refuse_consent(folder, by, refuse)
        typer.echo(f"{by} has refused; the server is told that a person did, not why")
        return
    if not by:
        for line in format_request(pending_request(folder)) or ["no request waits for a person here"]:
            typer.echo(line)
        return
    until = give_consent(folder, by, method or [], days)
    typer.echo(f"{by} consents until {until.isoformat(timespec='minutes')}")


@deploy_app.command()
def backup(
    folder: Annotated[Path, typer.Argument(help="The server's folder, or a site's kit.")],
    file: Annotated[Path, typer.Argument(help="A new file, as secret as the folder.")],
) -> None:
    """Keep a server's folder or a site's kit, with its ledger, in one file."""
    from fedvlm.deploy.backup import write_backup as keep

    typer.echo(f"{keep(folder, file)} files in {file}; it holds keys: keep it as you keep them")


@deploy_app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="What `backup` wrote.")],
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
) -> None:
    """Bring back what `backup` kept, if every file is what it was."""
    from fedvlm.deploy.backup import restore_backup as bring

    typer.echo(
        f"{bring(file, folder)} files in {folder}; what was sent after the backup is not in its "
        "ledger, and is not counted"
    )


def _stop_gently() -> None:
    """A kill with SIGTERM ends the children, too."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


Folder = Annotated[Path, typer.Argument(help="DIR/server or DIR/site-NAME")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@deploy_app.command()
def doctor(folder: Folder, as_json: Json = False) -> None:
    """Look at all that a server or a site needs, before anything runs; 1 if something is wrong."""
    from dataclasses import asdict

    from fedvlm.deploy.doctor import check_folder

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
    from fedvlm.deploy.status import format_status
    from fedvlm.deploy.status import status as state_of

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

    from fedvlm.deploy.events import Event, EventTail, format_event, read_events
    from fedvlm.deploy.status import is_server

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
    from fedvlm.deploy.runs import resume_run as go_on
    from fedvlm.deploy.runs import stop_runs as end
    from fedvlm.deploy.status import list_runs as listed
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
    from fedvlm.deploy.watch import serve_live_page

    serve_live_page(folder, port, lambda url: typer.echo(f"open {url}"))


def ledger(
    folder: Annotated[Path, typer.Argument(help="A site's folder.")],
    head: Annotated[str, typer.Option(help="A head noted before; it must still be there.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What left a site and what came in, checked line by line; exit code 1 if it was changed."""
    from fedvlm.deploy.ledger import Ledger
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
