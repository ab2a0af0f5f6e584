"""Run a federation between machines: server, sites, runs, monitoring and consent."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer import Argument, Option

from fedvlm.cli import options
from fedvlm.cli.progress import progress
from fedvlm.errors import FederationError, SettingsError, unknown_name
from fedvlm.runner.experiment_files import find_experiment, read_toml

deploy_app = typer.Typer(no_args_is_help=True, cls=options.SectionedGroup, help="Run a federation between real sites.")


Command = TypeVar("Command", bound=Callable[..., None])


def command(section: str, *lines: str, name: str | None = None) -> Callable[[Command], Command]:
    """Register a command of `fedvlm deploy` in a section of its help, with examples."""
    return deploy_app.command(name, rich_help_panel=section, epilog=options.examples(*lines))


Server = Annotated[Path, Argument(help="Folder of the server.")]
Site = Annotated[Path, Argument(help="Folder of the site.")]
Folder = Annotated[Path, Argument(help="Folder of a server or a site.")]


@command("Set up", "fedvlm deploy init fed --host server.example.org", "fedvlm deploy init fed --sites a,b,c")
def init(
    folder: Annotated[Path, Argument(help="New folder of the federation.")],
    sites: Annotated[str, Option(help="Also create kits for a rehearsal with these sites, e.g. a,b,c.")] = "",
    host: Annotated[str, Option(help="Address at which sites reach the server.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port at which sites reach the server.")] = 8443,
    listen: Annotated[str, Option(help="HOST:PORT to listen on, if it differs (NAT, containers).")] = "",
    plain: Annotated[bool, Option("--plain", help="Let runs ask for single uploads without noise.")] = False,
) -> None:
    """Create the server's folder and an invitation for sites.

    Runs ask for verified sums, which need three sites or more, unless you allow plain mode.
    """
    from fedvlm.channel.verified import MIN_SUM_MEMBERS
    from fedvlm.deploy.kits import INVITATION_FILE, create_kits
    from fedvlm.deploy.site.policy import PLAIN_RISK

    names = [name.strip() for name in sites.split(",") if name.strip()]
    flags: dict[str, Any] = {"plain": plain, **({"listen": listen} if listen else {})}
    central, *kits = create_kits(folder, names, host, port, **flags)
    typer.echo(f"{central}: keep this folder on the server")
    typer.echo(f"{central / INVITATION_FILE}: send this to each site that joins; it contains no secret")
    for path in kits:
        typer.echo(f"{path}: send this to its site")
    if plain:
        typer.echo(f"plain mode: {PLAIN_RISK}")
    elif 0 < len(names) < MIN_SUM_MEMBERS:
        typer.echo(
            f"{len(names)} sites are too few for verified sums: runs need noise, or --plain, and then {PLAIN_RISK}"
        )
    if kits:
        typer.echo(
            "ready kits are for rehearsals: their private keys were made here; fedvlm deploy renew makes new ones"
        )


@command("Run", "fedvlm deploy server fed/server")
def server(folder: Server) -> None:
    """Start the server.

    Sites can connect from then on. Ctrl-C stops the server.
    """
    from time import sleep

    from fedvlm.deploy.flower.processes import describe_exit, start_superlink
    from fedvlm.deploy.identity.enrolment import describe_server_expiry
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.operations.events import EventTail, format_event
    from fedvlm.storage.files import exclusive_lock

    _stop_gently()
    kit = read_server(folder)
    with exclusive_lock(folder / ".lock", f"the server of {folder} is already running"):
        link = start_superlink(kit)
        names = ", ".join(kit.sites) or "sites that are not admitted yet"
        typer.echo(f"the server is up at {kit.address} for {names}; press Ctrl-C to stop it")
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


@command("Run", "fedvlm deploy site north --data images --encoder demo")
def site(
    folder: Site,
    data: Annotated[str | None, Option(help="Images of this site, one folder per class.")] = None,
    encoder: options.Encoder = None,
    source: options.Source = None,
    access: options.Access = None,
    test_only: Annotated[bool, Option("--test-only", help="Only evaluate classifiers; never train.")] = False,
) -> None:
    """Start a site.

    The options are saved in site.toml, so you need them only once. Ctrl-C stops the site.
    """
    from fedvlm.deploy.kits import read_site, with_options, write_site
    from fedvlm.deploy.site.service import serve_site
    from fedvlm.deploy.site.training import embed_site_images

    _stop_gently()
    site_options: dict[str, Any] = {"data": data, "encoder": encoder, "test_only": test_only or None}
    site_options |= {
        "source": options.parse_pairs("--source", source) or None,
        "access": options.parse_pairs("--access", access) or None,
    }
    kit = with_options(read_site(folder), {k: v for k, v in site_options.items() if v is not None})
    with progress() as report:
        for message in embed_site_images(kit, report):
            typer.echo(message, err=True)
    write_site(kit)  # now that it has worked
    try:
        serve_site(kit, lambda text: typer.echo(text))
    except KeyboardInterrupt:
        typer.echo("the site is stopped", err=True)


@command("Run", "fedvlm deploy run fed/server experiment.toml --quorum 0.6")
def run(
    folder: Server,
    experiment: Annotated[str, Argument(help="Experiment name or TOML file.")],
    set_: options.Set = None,
    out: Annotated[Path | None, Option("--output", "-o", help="Folder of the runs.")] = None,
    again: options.Force = False,
    quorum: Annotated[float | None, Option(help="Fraction of sites that must reply (default: 0.5).")] = None,
    deadline: Annotated[float | None, Option(help="Seconds a site has for a round (default: 600).")] = None,
    wait: Annotated[float | None, Option(help="Seconds to wait for sites at the start (default: 120).")] = None,
) -> None:
    """Run an experiment at the connected sites and print its table."""
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.server.launch import run_over_sites

    kit = read_server(folder)
    flags = {"quorum": quorum, "deadline": deadline, "wait": wait}
    rules = {key: value for key, value in flags.items() if value is not None}
    with progress() as report:

        def go(number: int, settings: Any, place: Path | None) -> Any:
            return run_over_sites(kit, settings, place, again, report, options.echo_error, **rules)

        _run_experiment(experiment, set_, go, out)


@command("Set up", "fedvlm deploy local rehearsal --set method.rounds=2")
def local(
    experiment: Annotated[str, Argument(help="Experiment name or TOML file.")],
    folder: Annotated[Path, Option("--output", "-o", help="Folder of kits, logs and runs.")] = Path("rehearsal"),
    set_: options.Set = None,
) -> None:
    """Rehearse a federation here, with one process per site.

    The rehearsal uses TLS, keys and policies as a deployment does.
    """
    from fedvlm.deploy.server.launch import rehearse

    _stop_gently()
    with progress() as report:

        def go(number: int, settings: Any, place: Path | None) -> Any:
            return rehearse(settings, folder / f"{number}-{settings.method.name}", progress=report)

        _run_experiment(experiment, set_, go, None)


def _run_experiment(experiment: str, set_: list[str] | None, go: Any, out: Path | None) -> None:
    """Execute every run of an experiment and print one table."""
    from fedvlm.deploy.server.launch import describe_absences
    from fedvlm.report.tables import compare_table
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


@command("Run", "fedvlm deploy data fed/server --classes cat,dog")
def data(
    folder: Server,
    classes: Annotated[str, Option(help="Class names of all sites, e.g. cat,dog.")],
    out: Annotated[Path, Option("--output", "-o", help="HTML page to write.")] = Path("data-report.html"),
    purpose: Annotated[str, Option(help="What for, in plain words.")] = "to know the data before training",
    contact: Annotated[str, Option(help="Who answers questions.")] = "",
    again: options.Force = False,
) -> None:
    """Describe the data of all sites before training on one page.

    Sums come from a verified run of ridge; of single sites the page has what each policy allows.
    """
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.server.launch import report_site_data
    from fedvlm.report.data_report import headline, write_report
    from fedvlm.runner.settings import build

    names = [name.strip() for name in classes.split(",") if name.strip()]
    values = {"method": "ridge", "protocol": "own-test", "source": {"classes": names}, "channel": {"verified": True}}
    settings = build({**values, "purpose": purpose, "contact": contact})
    with progress() as report:
        found = report_site_data(read_server(folder), settings, again, report, lambda text: typer.echo(text, err=True))
    for title, text in headline(found):
        typer.echo(f"{title}: {text}")
    typer.echo(f"wrote {write_report(found, out)}")


@command(
    "Run", "fedvlm deploy evaluate fed/server zero-shot auto", "fedvlm deploy evaluate fed/server classifier --json"
)
def evaluate(
    folder: Server,
    classifiers: Annotated[list[str], Argument(help="Runs, exported classifiers, or zero-shot.")],
    classes: Annotated[str, Option(help="Class names for zero-shot alone, e.g. cat,dog.")] = "",
    purpose: Annotated[str, Option(help="What for, in plain words (default: that of the run).")] = "",
    contact: Annotated[str, Option(help="Who answers questions (default: that of the run).")] = "",
    as_json: options.Json = False,
) -> None:
    """Measure classifiers on the test samples of all sites.

    Nothing is trained. Sites that answer verified sums only ask for the transcript of a run, or for an approval.
    """
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.server.evaluation import evaluation_table
    from fedvlm.deploy.server.launch import evaluate_over_sites
    from fedvlm.report.tables import render_table

    names = [name.strip() for name in classes.split(",") if name.strip()]
    kit, statement = read_server(folder), {"purpose": purpose, "contact": contact}
    done = evaluate_over_sites(kit, classifiers, names, options.echo_error, **statement)
    for site, reason in done["missing"].items():
        typer.echo(f"{site}: {reason}", err=True)
    for note in done["notes"]:
        typer.echo(note, err=True)
    if as_json:
        typer.echo(options.to_json(done))
        return
    typer.echo(render_table(*evaluation_table(done), "text"), nl=False)
    typer.echo(f"accuracy in % with 95 % intervals, on test samples; plan {done['plan'][:16]}")


@command("Run", "fedvlm deploy reference fed/server --data public --encoder demo")
def reference(
    folder: Server,
    data: Annotated[str, Option(help="Public images; their labels are not used.")],
    encoder: Annotated[str, Option(help="Encoder of the sites.")],
    patches: Annotated[bool, Option("--patches", help="Also embed image patches.")] = False,
) -> None:
    """Embed public images for methods that need a reference set."""
    from fedvlm.deploy.server.run import write_reference

    with progress() as report:
        count = write_reference(folder, data, encoder, patches, report)
    typer.echo(f"wrote {count} reference samples to {folder}")


@command("Consent and policy", "fedvlm deploy policy north")
def policy(folder: Site) -> None:
    """Explain a site's policy and what has left the site."""
    from fedvlm.deploy.site.ledger import Ledger, PrivacyBudget, describe_spending
    from fedvlm.deploy.site.policy import explain_policy, read_policy

    rules = read_policy(folder)
    for line in (*explain_policy(rules), *describe_spending(PrivacyBudget(Ledger(folder).history()), rules)):
        typer.echo(line)


@command(
    "Consent and policy",
    "fedvlm deploy consent north",
    "fedvlm deploy consent north --by 'Dr Lee' --plan 3f2a9c01 --days 7",
)
def consent(
    folder: Site,
    by: Annotated[str, Option(help="Name of the person who decides, from `deploy people`.")] = "",
    plan: Annotated[str, Option(help="Beginning of the hash of the plan that is decided on.")] = "",
    days: Annotated[float, Option(help="Days the consent is valid.")] = 1.0,
    withdraw: Annotated[bool, Option("--withdraw", help="Withdraw every consent.")] = False,
    refuse: Annotated[str, Option(help="Refuse with this reason, which stays at the site.")] = "",
) -> None:
    """Show, accept or refuse a request that needs consent.

    Without --by the command only shows the requests that wait.
    """
    from fedvlm.deploy.site import consent as answers
    from fedvlm.deploy.site.people import authenticate

    if not by and (withdraw or refuse or plan):
        raise typer.BadParameter("name the person who decides, e.g. --by 'Dr Lee'")
    if not by:
        requests = answers.waiting_requests(folder)
        for request in requests:
            for topic, text in answers.format_request(folder, request):
                typer.echo(f"{topic}: {text}")
            typer.echo("")
        accept = f"accept with: fedvlm deploy consent {folder} --by NAME --plan "
        typer.echo(f"{accept}{requests[0].plan[:8]}" if requests else "no request needs consent")
        return
    person = authenticate(folder, by, typer.prompt(f"password or token of {by}", hide_input=True, err=True))
    if withdraw:
        typer.echo(answers.withdraw_consent(folder, person))
    elif refuse:
        typer.echo(answers.refuse_request(folder, person, plan, refuse))
    else:
        typer.echo(answers.accept_request(folder, person, plan, days))


@command(
    "Consent and policy", "fedvlm deploy people north", "fedvlm deploy people north --add 'Dr Lee' --role approver"
)
def people(
    folder: Site,
    add: Annotated[str, Option(help="Add this person, or change the person's secret or role.")] = "",
    role: Annotated[str, Option(help="operator: refuses and withdraws; approver: also consents.")] = "operator",
    password: Annotated[bool, Option("--password", help="Ask for a password instead of making a token.")] = False,
    remove: Annotated[str, Option(help="Remove this person.")] = "",
) -> None:
    """List, add or remove the people who decide at a site."""
    from fedvlm.deploy.kits import read_site
    from fedvlm.deploy.site.people import add_person, read_people, remove_person

    read_site(folder)
    if add:
        secret = typer.prompt(f"password of {add}", hide_input=True, confirmation_prompt=True) if password else ""
        token = add_person(folder, add, role, secret)
        typer.echo(f"{add} is on the list as {role}")
        if token:
            typer.echo(f"token: {token}\ngive it to {add} and to nobody else; it is not shown again")
    elif remove:
        remove_person(folder, remove)
        typer.echo(f"{remove} is no longer on the list")
    else:
        for name, entry in read_people(folder).items():
            typer.echo(f"{name}: {entry['role']}")
        if not read_people(folder):
            typer.echo(f"nobody yet; add somebody: fedvlm deploy people {folder} --add NAME --role approver")


@command("Keys and backups", "fedvlm deploy backup fed/server server.backup")
def backup(folder: Folder, file: Annotated[Path, Argument(help="New file; it contains private keys.")]) -> None:
    """Back up a server's or a site's folder to one file."""
    from fedvlm.deploy.kits import write_backup

    typer.echo(f"{write_backup(folder, file)} files saved to {file}; it contains private keys, so keep it secret")


@command("Keys and backups", "fedvlm deploy restore server.backup fed/server")
def restore(
    file: Annotated[Path, Argument(help="File written by `backup`.")],
    folder: Annotated[Path, Argument(help="New folder.")],
) -> None:
    """Restore a folder from a backup.

    Every file is checked against its checksum.
    """
    from fedvlm.deploy.kits import restore_backup

    count = restore_backup(file, folder)
    typer.echo(f"{count} files in {folder}; what was sent after the backup is not in its ledger, and is not counted")


def _stop_gently() -> None:
    """Treat SIGTERM like Ctrl-C, so that child processes end as well."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


@command("Set up", "fedvlm deploy doctor fed/server")
def doctor(folder: Folder, as_json: options.Json = False) -> None:
    """Check that a server or a site is ready.

    The exit code is 1 if a check fails.
    """
    from dataclasses import asdict

    from fedvlm.deploy.operations.status import check_folder

    checks = check_folder(folder)
    if as_json:
        typer.echo(options.to_json([asdict(check) for check in checks]))
    for check in () if as_json else checks:
        typer.echo(f"{'ok ' if check.ok else '!! '} {check.check}: {check.detail}")
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


@command("Monitor", "fedvlm deploy status fed/server --json")
def status(folder: Folder, as_json: options.Json = False) -> None:
    """Show the state of a server or a site."""
    from fedvlm.deploy.operations.status import format_status
    from fedvlm.deploy.operations.status import status as state_of

    state = state_of(folder)
    for line in [options.to_json(state)] if as_json else format_status(state):
        typer.echo(line)


@command("Monitor", "fedvlm deploy log fed/server --follow")
def log(
    folder: Folder,
    as_json: options.Json = False,
    follow: Annotated[bool, Option("--follow", "-f", help="Keep printing new events.")] = False,
) -> None:
    """Print the events of a server or a site."""
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


@command("Run", "fedvlm deploy runs fed/server", "fedvlm deploy runs fed/server --stop")
def runs(
    folder: Server,
    stop: Annotated[bool, Option("--stop", help="Stop the current run.")] = False,
    resume: Annotated[str, Option(help="Resume the run of this name.")] = "",
    as_json: options.Json = False,
) -> None:
    """List, stop or resume a server's runs."""
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.operations.status import list_runs
    from fedvlm.deploy.server.launch import resume_run, stop_runs
    from fedvlm.report.tables import compare_table

    kit = read_server(folder)
    if stop:
        typer.echo(f"stopped: {', '.join(stop_runs(kit)) or 'no run was active'}")
    elif resume:
        with progress() as report:
            result = resume_run(kit, resume, report, options.echo_error)
        typer.echo(compare_table([result]), nl=False)
    else:
        run_rows = list_runs(folder)
        if as_json:
            typer.echo(options.to_json(run_rows))
        for run in () if as_json else run_rows:
            typer.echo(f"{run['name']}: {run['method']}, {run['state']}, {run['rounds']} rounds")
        if not run_rows and not as_json:
            typer.echo("no runs yet; start one with: fedvlm deploy run DIR/server EXPERIMENT")


@command("Monitor", "fedvlm deploy watch fed/server --port 8080")
def watch(folder: Folder, port: Annotated[int, Option(help="Port of the page; 0 takes a free one.")] = 0) -> None:
    """Serve a live page of a server or a site on this machine.

    Ctrl-C stops it.
    """
    from fedvlm.deploy.operations.live_page import serve_live_page

    serve_live_page(folder, port, lambda url: typer.echo(f"open {url}"))


def ledger(
    folder: Site,
    head: Annotated[str, Option(help="Check that this earlier head is still in the ledger.")] = "",
    as_json: options.Json = False,
) -> None:
    """Show and verify the ledger of what left a site.

    The exit code is 1 if the ledger was changed.
    """
    from fedvlm.deploy.site.ledger import Ledger
    from fedvlm.report.tables import render_table

    history = Ledger(folder).read()
    if as_json:
        typer.echo(options.to_json(history.lines))
    else:
        names = ["time", "direction", "kind", "round", "bytes", "content"]
        rows = [[*(str(line.get(key, ""))[:23] for key in names), _describe_line(line)] for line in history.lines]
        typer.echo(render_table([*names, "what"], rows, "text", True), nl=False)
    for number in history.torn:
        typer.echo(f"line {number} was cut off by a crash; nothing was sent for it", err=True)
    wrong = [*history.broken]
    if head and not history.contains(head):
        wrong.append(f"the head {head} is not in the ledger; its end was removed or rewritten")
    for problem in wrong:
        typer.echo(problem, err=True)
    if wrong:
        sys.exit(1)
    typer.echo(f"{len(history.lines)} lines, the hash chain is intact; head {history.head}", err=True)


def _describe_line(line: dict[str, Any]) -> str:
    """Return the tensors that left, with type and shape, or the reason why none did."""
    if "error" in line:
        return str(line["error"]).splitlines()[0]
    if line["direction"] == "consent":
        details = "".join(f", {key} {line[key]}" for key in ("until", "reason") if line.get(key))
        return f"{line['by']} ({line['role']}), plan {line['plan'][:16]}{details}"
    if "strangers" in line:
        return f"{line['strangers']} messages that the server did not sign"
    return ", ".join(f"{name} {shape}" for name, shape in line["fields"].items())


def export_app(
    kind: Annotated[str, Argument(help="Kind of app: flower.")],
    folder: Annotated[Path, Argument(help="New folder of the app.")],
    file: Annotated[str | None, Argument(help="Experiment name or TOML file.")] = None,
    method: Annotated[str | None, Option(help="Method (default: auto, or that of the experiment).")] = None,
    data: Annotated[str | None, Option(help="Data, unless every node has its own.")] = None,
    encoder: options.Encoder = None,
    set_: options.Set = None,
) -> None:
    """Write an experiment as a plain app for a Flower federation.

    It runs with `flwr run` on any SuperLink whose nodes have fedvlm installed.
    """
    from fedvlm.deploy.flower_app.export import export_flower_app
    from fedvlm.runner.experiments import experiment_runs
    from fedvlm.runner.settings import build

    if kind != "flower":
        raise unknown_name("kind of app", kind, ["flower"])
    values: dict[str, Any] = read_toml(find_experiment(file)) if file else {"method": "auto"}
    if method:
        values.pop("methods", None)
    overrides = {"method": method, "data": data, "encoder": encoder}
    values |= {name: value for name, value in overrides.items() if value is not None}
    runs = experiment_runs(values, set_ or [])
    if len(runs) > 1:
        raise SettingsError(f"{file} has {len(runs)} runs, and an app is one; choose one by --method, without a sweep")
    export_flower_app(build(runs[0]), folder)
    typer.echo(f"wrote the app to {folder}; run it: flwr run {folder} YOUR-SUPERLINK --stream")
