"""Starting a deployed run and waiting for it; and the rehearsal of it all on one machine."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from fedvlm.deploy.events import Events, Tail, sentence
from fedvlm.deploy.explain import example
from fedvlm.deploy.flower.processes import (
    LINK,
    Process,
    answers,
    environment,
    flwr,
    free_port,
    superlink,
)
from fedvlm.deploy.follow import GOING, follow
from fedvlm.deploy.kits import ServerKit, init, read_server
from fedvlm.deploy.policy import ANY
from fedvlm.deploy.policy import NAME as POLICY
from fedvlm.deploy.server import FAILED, JOINED, REQUEST, ready, ruled
from fedvlm.errors import FederationError, SettingsError, unknown
from fedvlm.record import Record
from fedvlm.result import Result
from fedvlm.runner import tune
from fedvlm.runner.load import load
from fedvlm.runner.prepare import prepare
from fedvlm.runner.run import default_name
from fedvlm.runner.settings import Settings, build
from fedvlm.storage.files import write
from fedvlm.storage.sealed import read_json, write_json
from fedvlm.storage.toml import toml

APP = {  # what Flower carries about as an app; server and sites run their own fedvlm and not this
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedvlm-app"
version = "1.0.0"
description = "fedvlm over Flower"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedvlm"

[tool.flwr.app.components]
serverapp = "fedvlm_app.server:app"
clientapp = "fedvlm_app.client:app"

[tool.flwr.app.config]
request = ""
""",
    "fedvlm_app/__init__.py": "",
    "fedvlm_app/server.py": "app = None\n",
    "fedvlm_app/client.py": "app = None\n",
}
Progress = Callable[[str, int, int], None]


def run(
    kit: ServerKit,
    settings: Settings,
    out: Path | None = None,
    again: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    **rules: float,
) -> Result:
    """Runs an experiment over the sites; one that was stopped goes on where it was.

    `rules` are this run's own quorum, deadline and wait, where server.toml says otherwise.
    """
    ready(ruled(kit, rules), settings)
    about = settings if kit.rehearsal else replace(settings, data="sites")
    folder = out or kit.folder / "runs" / default_name(about, None)
    record = Record(folder)
    if record.result() is not None and not again:
        record.compare({"identity": tune.known(settings, record.manifest).identity()})
        return Result(folder)
    if again:
        record.clear()
    seen = progress or (lambda what, done, total: None)
    told = folder.with_suffix(".progress")

    def step() -> None:
        if told.exists():
            seen(*read_json(told))

    request = {"out": str(folder.resolve()), "identity": settings.identity(), "rules": rules}
    _carry_out(kit, request, lambda: record.result() is not None, say, step)
    told.unlink(missing_ok=True)
    return Result(folder)


def join(
    kit: ServerKit, name: str, site: str, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Brings a site that came late to the classifiers of a finished run, without the others.

    `name` is that of a run of this server, or a directory. The site's scores, by training.
    """
    folder = kit.folder / "runs" / name
    folder = folder if folder.exists() else Path(name)
    done = kit.folder / JOINED
    done.unlink(missing_ok=True)
    request = {"out": str(folder.resolve()), "joins": site}
    _carry_out(kit, request, done.exists, say, lambda: None)
    return dict(read_json(done))


def _carry_out(
    kit: ServerKit,
    request: Mapping[str, Any],
    done: Callable[[], bool],
    say: Callable[[str], None],
    step: Callable[[], None],
) -> None:
    """Has the server's process do what is asked, and waits for it."""
    if not answers(kit):
        raise FederationError(
            f"no server answers at {kit.address}; start it: fedvlm deploy server {kit.folder}"
        )
    for name, text in APP.items():
        write(kit.folder / "app" / name, text.encode())
    tail = Tail(kit.folder)
    id = token_hex(8)
    write_json(kit.folder / REQUEST, {**request, "id": id})
    (kit.folder / FAILED).unlink(missing_ok=True)
    app = str(kit.folder.resolve() / "app")
    answer = flwr(kit, "run", app, LINK, "--run-config", f'request="{id}"')
    if "run-id" not in answer:
        raise FederationError(
            f"the run cannot be started: {str(answer.get('error-message', answer)).strip()}"
        )

    def hear() -> None:
        _heard(tail, say)
        step()

    try:
        follow(kit, str(answer["run-id"]), done, hear)
    except KeyboardInterrupt:  # else it would go on without anybody who waits for it
        flwr(kit, "stop", str(answer["run-id"]), LINK)
        raise


def stop(kit: ServerKit) -> list[str]:
    """Ends what the server is running; the run can be resumed. The numbers of what was ended."""
    if not answers(kit):
        raise FederationError(f"no server answers at {kit.address}, so nothing is running there")
    listed: Any = flwr(kit, "list", LINK)
    going = [
        str(one["run-id"])
        for one in listed.get("runs", [])
        if any(word in str(one.get("status")) for word in GOING)
    ]
    for id in going:
        flwr(kit, "stop", id, LINK)
    if going:
        Events(kit.folder)("failed", why="it was stopped by a person; it can be resumed")
    return going


def resume(
    kit: ServerKit, name: str, progress: Progress | None, say: Callable[[str], None]
) -> Result:
    """Goes on with a run of this name in the server's folder."""
    place = kit.folder / "runs" / name
    known = [path.parent.name for path in (kit.folder / "runs").glob("*/manifest.json")]
    if name not in known:
        raise unknown("run of this server", name, known)
    identity = read_json(place / "manifest.json")["identity"]
    return run(kit, build(identity), place, progress=progress, say=say)


def _heard(tail: Tail, say: Callable[[str], None]) -> None:
    for event in tail.new():
        if event["kind"] not in ("ended", "failed"):  # the caller says these
            say(sentence(event))


def absences(result: Result) -> list[str]:
    """Who was missing in how many rounds, and why: a table does not show it."""
    lines = result.rounds
    reasons: dict[str, list[str]] = {}
    for line in lines:
        for name, why in line.get("missing", {}).items():
            reasons.setdefault(name, []).append(why.strip().splitlines()[-1])
    return [
        f"{name} took no part in {len(whys)} of {len(lines)} rounds; the last time because: "
        f"{whys[-1]}"
        for name, whys in sorted(reasons.items())
    ]


def start_site(folder: Path) -> Process:
    command = [sys.executable, "-m", "fedvlm", "deploy", "site", str(folder)]
    return Process(folder.name, command, folder / "site.log", environment(folder / "flwr"))


def rehearse(
    settings: Settings,
    place: Path,
    out: Path | None = None,
    progress: Progress | None = None,
    **rules: Any,
) -> Result:
    """All of it on this machine: a process per client of the experiment, ports of loopback."""
    report = progress or (lambda what, done, total: None)
    kit = stage(settings, place, report, **rules)
    with processes() as running:
        running += [superlink(kit)]
        running += [start_site(place / f"site-{name}") for name in kit.sites]
        return run(kit, settings, out, progress=progress)


@contextmanager
def processes() -> Iterator[list[Process]]:
    """Whatever is started meanwhile is stopped in the end, all at once."""
    running: list[Process] = []
    try:
        yield running
    finally:
        for one in reversed(running):
            one.ask_to_stop()
        for one in reversed(running):
            one.stop()


def stage(settings: Settings, place: Path, progress: Progress, **rules: Any) -> ServerKit:
    """Kits for a rehearsal: each site plays one client of the experiment's own data."""
    if (place / "server" / "server.toml").exists():
        return read_server(place / "server")  # a rehearsal that was stopped goes on
    rows, _ = load(settings, progress)
    ids = list(prepare(settings, rows, settings.seeds[0]).division.members)
    if len(ids) > 32:
        raise SettingsError(
            f"the experiment has {len(ids)} clients, and a rehearsal starts a process for each; "
            "32 is the most: set a smaller clients.count"
        )
    init(place, ids, "127.0.0.1", free_port(), rehearsal=True, **rules)
    for id in ids:
        path = place / f"site-{id}" / "site.toml"
        write(path, path.read_bytes() + toml({"plays": id}).encode())
        write(path.with_name(POLICY), example((ANY,)).encode())  # nobody's data but the owner's
    return read_server(place / "server")
