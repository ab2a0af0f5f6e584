"""Report the state of a server or a site from its folder, and check the folder before anything runs."""

import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import fedvlm
from fedvlm.deploy.flower import network
from fedvlm.deploy.identity import certificates
from fedvlm.deploy.identity.enrolment import server_days_left
from fedvlm.deploy.kits import ServerKit, SiteKit, listen_address, read_server, read_site, record_folders
from fedvlm.deploy.operations import events
from fedvlm.deploy.site.consent import describe_consent
from fedvlm.deploy.site.ledger import Ledger, PrivacyBudget
from fedvlm.deploy.site.policy import explain_policy, read_policy
from fedvlm.errors import FedVLMError, SettingsError
from fedvlm.record import Record
from fedvlm.storage.files import is_locked, read_json

State = dict[str, Any]
CONNECTED_SECONDS = 60.0  # since its last call that a site counts as connected
ROUNDS_TO_FORECAST = 5  # whose time says how long the others take
END_STATES = {"ended", "failed"}


def is_server(folder: Path) -> bool:
    if not any((folder / name).exists() for name in ("server.toml", "site.toml")):
        raise SettingsError(f"{folder} is neither a server's folder nor a site's; name e.g. DIR/server or DIR/site-a")
    return (folder / "server.toml").exists()


def status(folder: Path) -> State:
    return server_status(folder) if is_server(folder) else site_status(folder)


def server_status(folder: Path) -> State:
    """Return whether the server is up, its run, and the state of each site."""
    from fedvlm.deploy.flower.processes import is_server_up

    kit = read_server(folder)
    history = events.read_events(folder)
    sites: dict[str, State] = {name: {"state": "not seen", "missed": 0} for name in kit.sites}
    run: State = {}
    seconds: list[float] = []
    for event in history:
        kind, name = event["kind"], event.get("site")
        if kind == "begun":
            keys = ("method", "training", "rounds", "record")
            run = {key: event.get(key) for key in keys} | {"state": "running", "round": 0, "total kB": 0.0}
            seconds = []
            for site_state in sites.values():
                site_state["missed"] = 0
        elif kind == "round":
            run |= {key: event.get(key) for key in ("round", "share", "kB", "seconds")}
            run["total kB"] = run.get("total kB", 0.0) + (event.get("kB") or 0.0)
            seconds.append(event.get("seconds") or 0.0)
            for site in event.get("there", []):
                accuracy = event.get("results", {}).get(site)
                sites.setdefault(site, {}).update(state="answers", why="", time=event["time"], accuracy=accuracy)
        elif kind in END_STATES:
            run |= {"state": kind, "why": event.get("why", ""), "table": event.get("table", {})}
        if name in sites and kind in ("connected", "refused", "missing"):
            sites[name].update(state=kind, why=event.get("why", ""), time=event["time"])
            sites[name] |= {key: event[key] for key in ("samples", "version") if key in event}
            sites[name]["missed"] += kind == "missing"
    if run.get("state") == "running" and seconds:
        run["seconds left"] = round(median(seconds[-ROUNDS_TO_FORECAST:]) * max(0, run["rounds"] - run["round"]))
    for name, site_state in sites.items():
        contact = certificates.last_contact(folder, name)
        site_state["contact"] = contact and contact.isoformat(timespec="seconds")
        certificate = certificates.find_certificate(folder, name)
        site_state["certificate days"] = certificate and certificate.days_left
        is_fresh = contact is not None and (datetime.now(UTC) - contact).total_seconds() < CONNECTED_SECONDS
        if is_fresh and site_state["state"] == "not seen":
            site_state["state"] = "connected"
        site_state["connected"] = is_fresh
    return {
        **machine_facts(folder),
        "certificate days": server_days_left(folder),
        **{"who": "server", "address": kit.address, "up": is_server_up(kit), "run": run},
        **{"sites": sites, "last": history[-1] if history else None},
    }


def _own_days_left(folder: Path) -> int | None:
    """Return the days of a site's certificate; the key, which may need a passphrase, is not read."""
    try:
        path = folder / certificates.CERTIFICATE_FILE
        return certificates.read_certificate(path, (folder / "server.pub").read_bytes()).days_left
    except (FedVLMError, OSError):  # none yet, or damaged: the site says so when it starts
        return None


def machine_facts(folder: Path) -> State:
    return {"version": fedvlm.__version__, "free bytes": shutil.disk_usage(folder).free}


def site_status(folder: Path) -> State:
    """Return whether the site runs, what has left it and what may still leave."""
    kit = read_site(folder)
    history, ledger, policy = events.read_events(folder), Ledger(folder).history(), read_policy(folder)
    budget = PrivacyBudget(ledger)
    out = [line for line in ledger.lines if line["direction"] == "out"]
    gains = [event for event in history if event["kind"] == "gained"]
    opened = [event for event in history if event["kind"] == "opened"]
    requests = [line for line in ledger.lines if line["direction"] == "in"]
    refused = [line for line in ledger.lines if line["direction"] == "refused"]
    return {
        **{"who": "site", "name": kit.name, "address": kit.address, "up": is_locked(folder / ".lock")},
        **machine_facts(folder),
        "certificate days": _own_days_left(folder),
        "training": opened[-1] if opened else None,
        "last in": requests[-1]["time"] if requests else None,
        "trainings": f"{len(budget.trainings)} of {policy.trainings}",
        "rounds": f"{budget.rounds.total()} of {policy.all_rounds}",
        "bytes out": sum(line["bytes"] for line in out),
        "last out": out[-1]["time"] if out else None,
        "last refusal": {"time": refused[-1]["time"], "why": refused[-1].get("error", "")} if refused else None,
        "consent": describe_consent(folder, policy),
        "gained": gains[-1] if gains else None,
        "classifiers": sorted(path.name for path in (folder / "classifiers").glob("*")),
        "last": history[-1] if history else None,
    }


def format_status(state: State) -> list[str]:
    """Return the status as a few lines."""
    last = [f"last: {events.format_event(state['last'])}"] if state["last"] else []
    if state["who"] == "site":
        keys = ("trainings", "rounds", "bytes out", "last out", "consent", "classifiers")
        shown_state: State = {**state, "classifiers": ", ".join(state["classifiers"])}
        facts = [f"{key}: {shown_state[key] or 'none yet'}" for key in keys]
        gain_lines = [events.format_event(state["gained"])] if state["gained"] else []
        refused = state["last refusal"]
        refusal_lines = [f"last refusal: {refused['time']} {refused['why']}"] if refused else []
        runs = "is running" if state["up"] else "is not running"
        head = f"site {state['name']} {runs}; its server is {state['address']}"
        return [head, *facts, *refusal_lines, *gain_lines, *last]
    up = "is up" if state["up"] else "does not answer"
    lines = [f"the server at {state['address']} {up}"]
    if run := state["run"]:
        accuracy = events.format_percent(run.get("share"))
        result = f", validation accuracy {accuracy}" if accuracy else ""
        if table := run.get("table"):  # as the command prints it
            result = "".join(f", {column} {cell}" for column, cell in table.items())
        progress = f"{run['state']}, round {run['round']} of {run['rounds']}{result} {run.get('why', '')}"
        lines.append(f"{run['method']}, {run['training']}: {progress}".rstrip())
    for name, site_state in state["sites"].items():
        samples = f", {site_state['samples']} training samples" if "samples" in site_state else ""
        reason = f": {site_state['why']}" if site_state.get("why") else ""
        when = f" ({site_state['time']})" if "time" in site_state else ""
        lines.append(f"  {name}: {site_state['state']}{samples}{reason}{when}")
    return lines + last


def list_runs(folder: Path) -> list[State]:
    out = []
    for name, path in record_folders(folder).items():
        record, method = Record(path), read_json(path / "manifest.json")["identity"]["method"]["name"]
        state = "stopped" if record.result() is None else "finished"
        state = "running" if is_locked(path / ".lock") else state
        out.append({"name": name, "method": method, "state": state, "rounds": len(record.lines())})
    return out


MIN_FREE_BYTES = 1 << 30  # bytes that should be free
EXPIRY_WARNING_DAYS = 30  # days of a certificate that are few


@dataclass(frozen=True)
class Finding:
    check: str
    ok: bool
    detail: str  # what was found, or what to do


Check = Callable[[], str]  # what was found; an error is what is wrong


def check_folder(folder: Path) -> list[Finding]:
    checks = _server_checks(read_server(folder)) if is_server(folder) else _site_checks(read_site(folder))
    return [_run_check(name, check) for name, check in (*_common_checks(folder), *checks)]


def _run_check(name: str, check: Check) -> Finding:
    try:
        return Finding(name, True, check())
    except FedVLMError as error:
        return Finding(name, False, str(error))
    except Exception as error:  # a doctor who faints helps nobody
        return Finding(name, False, f"{type(error).__name__}: {error}")


class CheckFailed(FedVLMError):
    """A failed check, with the remedy."""


def _common_checks(folder: Path) -> Iterator[tuple[str, Check]]:
    yield "versions", _check_versions
    yield "disk", lambda: _check_disk(folder)
    yield "folder", lambda: _check_permissions(folder)


def _check_versions() -> str:
    from importlib.metadata import version

    from fedvlm.engines import flower as api

    api.import_flower()
    versions = f"fedvlm {fedvlm.__version__}, flwr {version('flwr')}, torch {version('torch')}"
    return f"{versions}, Python {sys.version.split()[0]}"


def _check_disk(folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise CheckFailed(f"{free / 1e9:.1f} GB are free at {folder}; free at least 1 GB")
    return f"{free / 1e9:.0f} GB are free"


def _check_permissions(folder: Path) -> str:
    if folder.stat().st_mode & 0o077:
        raise CheckFailed(f"other users of this machine can read {folder}; chmod 700 {folder}")
    return "only its owner can read it"


def _server_checks(kit: ServerKit) -> Iterator[tuple[str, Check]]:
    yield "name", lambda: _check_name(kit.address)
    yield "port", lambda: _check_port(kit)
    yield "certificate", lambda: _check_expiry(server_days_left(kit.folder), "fedvlm deploy renew")
    yield "sites", lambda: _check_sites(kit)
    yield "proxy", lambda: _check_proxy(kit.address)
    yield "from outside", lambda: _check_reachable(kit.address, kit.folder)


def _check_proxy(address: str) -> str:
    """Check the settings of a proxy, and name the one that is used."""
    proxy = network.find_proxy(address)
    if not proxy:
        return f"none is used for {address} (by HTTPS_PROXY and NO_PROXY)"
    return f"{network.describe_proxy(proxy)} is used for {address} (by HTTPS_PROXY)"


def _check_name(address: str) -> str:
    host, _ = network.split_address(address)
    if network.find_proxy(address):
        return f"{host} is resolved by the proxy"
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
    except OSError as error:
        raise CheckFailed(
            f"{host} cannot be resolved on this machine ({error}); check DNS, or name the server by its address"
        ) from error
    return f"{host} is {', '.join(addresses)}"


def _check_port(kit: ServerKit) -> str:
    host, port = listen_address(kit)
    place = network.join_address(host, port)
    if is_locked(kit.folder / ".lock"):
        return f"{place} is served by this folder's server"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise CheckFailed(
                f"the server cannot listen on {place} ({error.strerror}); stop the other program, or set another "
                "`listen` in server.toml, with an address of this machine"
            ) from error
    return f"{place} is free; the server is not running"


def _check_expiry(days: int, remedy: str) -> str:
    if days < EXPIRY_WARNING_DAYS:
        raise CheckFailed(f"it expires in {days} days; {remedy}")
    return f"it is valid for {days} days"


def _check_sites(kit: ServerKit) -> str:
    if not kit.sites:
        raise CheckFailed(f"no site is admitted; send the invitation, then fedvlm deploy admit {kit.folder} REQUEST")
    return ", ".join(kit.sites)


def _check_reachable(address: str, folder: Path) -> str:
    """Check that the server answers by the name that sites use, with its certificate."""
    try:
        network.check_server(address, folder / "ca.crt")
    except network.Unreachable as error:
        raise CheckFailed(f"{error}; start the server, and open the port in firewalls on the way") from error
    return f"{address} answers with the right certificate"


def _check_clock(kit: SiteKit) -> str:
    skew = network.clock_skew(network.server_date(kit.address, kit.folder / "ca.crt"))
    if problem := network.describe_skew(skew):
        raise CheckFailed(problem)
    return f"it differs from the server's by {abs(skew):.0f} s"


def _site_checks(kit: SiteKit) -> Iterator[tuple[str, Check]]:
    yield "name", lambda: _check_name(kit.address)
    yield "proxy", lambda: _check_proxy(kit.address)
    remedy = f"fedvlm deploy renew {kit.folder}"
    yield "certificate", lambda: _check_expiry(certificates.read_own_certificate(kit.folder).days_left, remedy)
    yield "server", lambda: _check_reachable(kit.address, kit.folder)
    yield "clock", lambda: _check_clock(kit)
    yield "encoder", lambda: _check_encoder(kit)
    yield "images", lambda: _check_images(kit)
    yield "policy", lambda: " ".join(explain_policy(read_policy(kit.folder)))


def _check_encoder(kit: SiteKit) -> str:
    from fedvlm.encoders import fingerprint
    from fedvlm.runner.load import open_encoder_with_notes

    if kit.plays:
        return "the experiment's, in a rehearsal"
    if not kit.encoder:
        raise CheckFailed(f"no encoder is set: fedvlm deploy site {kit.folder} --encoder NAME --data IMAGES")
    if kit.encoder.startswith("store:"):
        return kit.encoder
    encoder, _ = open_encoder_with_notes(kit.encoder, kit.access)
    return f"{kit.encoder} loads; its fingerprint is {fingerprint(encoder)[:16]}"


def _check_images(kit: SiteKit) -> str:
    from fedvlm.runner.load import open_data

    if kit.plays or kit.encoder.startswith("store:"):
        return "none of its own to read"
    if not kit.data:
        raise CheckFailed(f"no images are set: fedvlm deploy site {kit.folder} --data IMAGES --encoder NAME")
    dataset = open_data(kit.data, kit.source)
    return f"{len(dataset.labels)} images of {len(dataset.classes)} classes: " + ", ".join(dataset.classes[:8])
