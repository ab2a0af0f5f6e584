"""Start a deployed run and wait for it; rehearse a deployment on one machine."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any

from fedvlm.deploy import kits
from fedvlm.deploy.flower import processes
from fedvlm.deploy.operations.events import EventLog, EventTail, format_event
from fedvlm.deploy.server import run
from fedvlm.deploy.server.evaluation import evaluation_spec, read_tested
from fedvlm.deploy.site.policy import ALL_METHODS, POLICY_FILE, example_policy
from fedvlm.errors import FederationError, SettingsError, unknown_name
from fedvlm.record import Record
from fedvlm.report.data_report import DataReport, report_of_sites
from fedvlm.result import Result
from fedvlm.runner import tune
from fedvlm.runner.load import load
from fedvlm.runner.prepare import prepare
from fedvlm.runner.run import default_name
from fedvlm.runner.settings import Settings
from fedvlm.storage.files import read_json, to_toml, write_file, write_json

STATUS_INTERVAL_SECONDS = 5.0  # seconds between questions whether the server still answers
MAX_PENDING_SECONDS = 60.0  # seconds a server takes at most to begin a run


def wait_for_run(kit: kits.ServerKit, id: str, done: Callable[[], bool], on_poll: Callable[[], None]) -> None:
    """Wait for the result, or raise the server's error."""
    started = checked = monotonic()
    log, state = kit.folder / "superlink.log", "pending"
    while not done():
        on_poll()
        last_state, state = state, run_states(kit).get(id, "pending")
        if (kit.folder / run.ERROR_FILE).exists():
            raise FederationError((kit.folder / run.ERROR_FILE).read_text())
        if state == "ended" and last_state == "ended" and not done():
            raise FederationError(f"the run ended without a result; repeat the command to resume, and see {log}")
        if state == "pending" and (last_state != "pending" or monotonic() - started > MAX_PENDING_SECONDS):
            stop_run(kit, [id])
            raise FederationError(
                f"the server has not started the run within {MAX_PENDING_SECONDS:g} s, or was started again; repeat "
                f"the command to resume, and see {log}"
            )
        if monotonic() - checked > STATUS_INTERVAL_SECONDS:
            checked = monotonic()
            if not processes.is_server_up(kit):
                raise FederationError(
                    f"the server at {kit.address} no longer answers; start it: fedvlm deploy server {kit.folder}, and "
                    "repeat the command to resume"
                )
        sleep(0.2)
    on_poll()


def run_states(kit: kits.ServerKit) -> dict[str, str]:
    """Return whether each run is running or has ended, of those since the server was started."""
    path = kit.folder / kits.RUN_STATES_FILE
    return dict(read_json(path)) if path.exists() else {}


def stop_run(kit: kits.ServerKit, ids: Sequence[str]) -> None:
    write_json(kit.folder / kits.STOP_FILE, list(ids))


Progress = Callable[[str, int, int], None]


def run_over_sites(
    kit: kits.ServerKit,
    settings: Settings,
    out: Path | None = None,
    again: bool = False,
    progress: Progress | None = None,
    print_line: Callable[[str], None] = lambda text: None,
    **rules: float,
) -> Result:
    """Run an experiment, or go on with it; `rules` override quorum, deadline and wait of server.toml."""
    settings = run.choose_mode(kit, settings)
    run.check_deployable(run.with_rules(kit, rules), settings)
    about = settings if kit.rehearsal else replace(settings, data="sites")
    folder = out or kit.folder / "runs" / default_name(about, None)
    record = Record(folder)
    if record.result() is not None and not again:
        record.compare({"identity": tune.reuse_tuned(settings, record.manifest).identity()})
        return Result(folder)
    if again:
        _check_server_up(kit)
        with record.lock():  # a server that is at this very run goes on, with its checkpoints
            record.clear()
    report_progress = progress or (lambda stage, done, total: None)
    progress_file = folder.with_suffix(".progress")

    def step() -> None:
        if progress_file.exists():
            report_progress(*read_json(progress_file))

    kits.register_record(kit.folder, folder)
    request = {"out": str(folder.resolve()), "identity": settings.identity(), **settings.statement, "rules": rules}
    _request_run(kit, request, lambda: record.result() is not None, print_line, step)
    progress_file.unlink(missing_ok=True)
    return Result(folder)


def join_late_site(
    kit: kits.ServerKit, name: str, site: str, print_line: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Give a late site the classifiers of a run (its name or folder), without the others; return scores by training."""
    inside = kit.folder / "runs" / name
    folder = inside if inside.exists() else Path(name)
    return _ask(kit, {"out": str(folder.resolve()), "joins": site}, print_line)


def _ask(kit: kits.ServerKit, request: Mapping[str, Any], print_line: Callable[[str], None]) -> dict[str, Any]:
    """Let the server carry out what is no run, and return its answer."""
    done = kit.folder / run.ANSWER_FILE
    done.unlink(missing_ok=True)
    _request_run(kit, request, done.exists, print_line, lambda: None)
    return dict(read_json(done))


def report_site_data(
    kit: kits.ServerKit,
    settings: Settings,
    again: bool = False,
    progress: Progress | None = None,
    print_line: Callable[[str], None] = lambda text: None,
) -> DataReport:
    """Describe the data of all sites: sums from a verified run of ridge, and of each site what its policy allows."""
    out = kit.folder / "runs" / "data"
    result = run_over_sites(kit, settings, out, again, progress, print_line)
    done = _ask(kit, {"out": str(out.resolve()), "describes": True}, print_line)
    return report_of_sites(done, result.manifest["encoder"], list(result.manifest["classes"]))


def evaluate_over_sites(
    kit: kits.ServerKit,
    classifiers: Sequence[str],
    classes: Sequence[str] = (),
    print_line: Callable[[str], None] = lambda text: None,
    **statement: str,
) -> dict[str, Any]:
    """Measure classifiers on the test samples of all sites without training; return what each site reports."""
    tested = [read_tested(kit, name) for name in classifiers]
    evaluation_spec(tested, classes, statement)  # refused before anybody is asked
    request = {"evaluates": [one.place for one in tested], "classes": list(classes), **statement}
    return _ask(kit, request, print_line)


def _request_run(
    kit: kits.ServerKit,
    request: Mapping[str, Any],
    done: Callable[[], bool],
    print_line: Callable[[str], None],
    step: Callable[[], None],
) -> None:
    """Let the server's process carry out a request, and wait for it."""
    _check_server_up(kit)
    tail, id = EventTail(kit.folder), token_hex(8)
    (kit.folder / run.ERROR_FILE).unlink(missing_ok=True)
    write_json(kit.folder / kits.RUN_REQUEST_FILE, {**request, "id": id})

    def poll() -> None:
        for event in tail.read_new():
            if event["kind"] not in ("ended", "failed"):  # the caller says these
                print_line(format_event(event))
        step()

    try:
        wait_for_run(kit, id, done, poll)
    except KeyboardInterrupt:  # else it would go on without anybody who waits for it
        stop_run(kit, [id])
        raise


def _check_server_up(kit: kits.ServerKit) -> None:
    if not processes.is_server_up(kit):
        raise FederationError(f"no server answers at {kit.address}; start it: fedvlm deploy server {kit.folder}")


def stop_runs(kit: kits.ServerKit) -> list[str]:
    """Stop what the server is running and return the runs; a stopped run can be resumed."""
    if not processes.is_server_up(kit):
        raise FederationError(f"no server answers at {kit.address}, so nothing is running there")
    active_ids = [id for id, state in run_states(kit).items() if state == "running"]
    stop_run(kit, active_ids)
    if active_ids:
        EventLog(kit.folder)("failed", why="it was stopped by a person; it can be resumed")
    return active_ids


def resume_run(kit: kits.ServerKit, name: str, progress: Progress | None, print_line: Callable[[str], None]) -> Result:
    records = kits.record_folders(kit.folder)
    place = records.get(name) or records.get(str(Path(name).resolve()))
    if place is None:
        raise unknown_name("run of this server", name, list(records))
    settings = run.stated_settings(read_json(place / "manifest.json"))
    return run_over_sites(kit, settings, place, progress=progress, print_line=print_line)


def describe_absences(result: Result) -> list[str]:
    """Describe which sites were missing in how many rounds, and why."""
    lines = result.rounds
    reasons: dict[str, list[str]] = {}
    for line in lines:
        for name, reason in line.get("missing", {}).items():
            reasons.setdefault(name, []).append(reason.strip().splitlines()[-1])
    text = "{} was missing in {} of {} rounds; the last reason: {}"
    return [text.format(name, len(whys), len(lines), whys[-1]) for name, whys in sorted(reasons.items())]


def start_site(folder: Path) -> processes.Process:
    command = [sys.executable, "-m", "fedvlm", "deploy", "site", str(folder)]
    return processes.Process(folder.name, command, folder / "site.log", processes.flower_environment(folder / "flwr"))


def rehearse(
    settings: Settings, place: Path, out: Path | None = None, progress: Progress | None = None, **rules: Any
) -> Result:
    """Run a whole deployment on this machine: a process per client of the experiment, on loopback."""
    report = progress or (lambda label, done, total: None)
    kit = prepare_rehearsal(settings, place, report, **rules)
    with running_processes() as running:
        running += [processes.start_superlink(kit)]
        running += [start_site(place / f"site-{name}") for name in kit.sites]
        return run_over_sites(kit, settings, out, progress=progress)


@contextmanager
def running_processes() -> Iterator[list[processes.Process]]:
    """Stop all processes that were started meanwhile, all at once."""
    running: list[processes.Process] = []
    try:
        yield running
    finally:
        for process in reversed(running):
            process.ask_to_stop()
        for process in reversed(running):
            process.stop()


def prepare_rehearsal(settings: Settings, place: Path, progress: Progress, **rules: Any) -> kits.ServerKit:
    """Create the kits of a rehearsal: each site plays one client of the experiment's data."""
    if (place / "server" / "server.toml").exists():
        return kits.read_server(place / "server")  # a rehearsal that was stopped goes on
    rows, _ = load(settings, progress)
    ids = list(prepare(settings, rows, settings.seeds[0]).partition.clients)
    if len(ids) > 32:
        raise SettingsError(
            f"the experiment has {len(ids)} clients, and a rehearsal starts a process for each; at most 32 are "
            "allowed: set a smaller clients.count"
        )
    plain = not settings.channel.verified
    kits.create_kits(place, ids, "127.0.0.1", processes.free_port(), rehearsal=True, plain=plain, **rules)
    for id in ids:
        path = place / f"site-{id}" / "site.toml"
        write_file(path, path.read_bytes() + to_toml({"plays": id}).encode())
        policy = example_policy((ALL_METHODS,), plain)  # nobody's data but the owner's
        write_file(path.with_name(POLICY_FILE), policy.encode())
    return kits.read_server(place / "server")
