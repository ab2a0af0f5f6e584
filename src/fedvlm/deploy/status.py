"""The state of a server or a site, from its folder alone: anyone who may read it can ask."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedvlm.deploy import events
from fedvlm.deploy.account import PrivacyBudget
from fedvlm.deploy.consent import CONSENT_FILE
from fedvlm.deploy.kits import SiteKit, read_server, read_site
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.policy import read_policy
from fedvlm.errors import SettingsError
from fedvlm.record import Record
from fedvlm.storage.files import is_locked, read_json

State = dict[str, Any]
END_STATES = {"ended", "failed"}


def is_server(folder: Path) -> bool:
    if not any((folder / name).exists() for name in ("server.toml", "site.toml")):
        raise SettingsError(f"{folder} is no server's folder and no site's; name one, as DIR/server or DIR/site-a")
    return (folder / "server.toml").exists()


def status(folder: Path) -> State:
    return server_status(folder) if is_server(folder) else site_status(folder)


def server_status(folder: Path) -> State:
    """Whether it is up, which run it is at, and how each site is."""
    from fedvlm.deploy.flower.processes import is_server_up

    kit = read_server(folder)
    history = events.read_events(folder)
    sites: dict[str, State] = {name: {"state": "not seen"} for name in kit.sites}
    run: State = {}
    for event in history:
        kind, name = event["kind"], event.get("site")
        if kind == "begun":
            keys = ("method", "training", "rounds", "record")
            run = {key: event.get(key) for key in keys} | {"state": "running", "round": 0}
        elif kind == "round":
            run |= {key: event.get(key) for key in ("round", "share", "kB", "seconds")}
            for site in event.get("there", []):
                sites.setdefault(site, {}).update(state="answers", why="", time=event["time"])
        elif kind in END_STATES:
            run |= {"state": kind, "why": event.get("why", "")}
        if name in sites and kind in ("connected", "refused", "missing"):
            sites[name].update(state=kind, why=event.get("why", ""), time=event["time"])
            sites[name] |= {"rows": event["rows"]} if "rows" in event else {}
    return {
        **{"who": "server", "address": kit.address, "up": is_server_up(kit), "run": run},
        **{"sites": sites, "last": history[-1] if history else None},
    }


def site_status(folder: Path) -> State:
    """Whether it runs, what it was asked, what has left it and what may still leave."""
    kit = read_site(folder)
    history = events.read_events(folder)
    account, policy = PrivacyBudget(Ledger(folder)), read_policy(folder)
    ledger = Ledger(folder)
    lines = ledger.read().lines if ledger.path.exists() else ()
    out = [line for line in lines if line["direction"] == "out"]
    gains = [event for event in history if event["kind"] == "gained"]
    refused = [line for line in lines if line["direction"] == "refused"]
    return {
        **{"who": "site", "name": kit.name, "address": kit.address, "up": is_locked(folder / ".lock")},
        "trainings": f"{len(account.trainings)} of {policy.trainings}",
        "rounds": f"{account.rounds.total()} of {policy.all_rounds}",
        "bytes out": sum(line["bytes"] for line in out),
        "last out": out[-1]["time"] if out else None,
        "last refusal": _describe_refusal(refused[-1]) if refused else None,
        "consent": _describe_consent(kit),
        "gained": gains[-1] if gains else None,
        "classifiers": sorted(path.name for path in (folder / "classifiers").glob("*")),
        "last": history[-1] if history else None,
    }


def _describe_refusal(line: dict[str, Any]) -> State:
    return {"time": line["time"], "why": line.get("error", "")}


def _describe_consent(kit: SiteKit) -> str:
    if not (kit.folder / CONSENT_FILE).exists():
        return "none"
    try:
        consent = json.loads((kit.folder / CONSENT_FILE).read_text())
        if "refused" in consent:
            return f"refused by {consent['by']}: {consent['reason']}"
        remaining = datetime.fromisoformat(consent["until"]) - datetime.now(UTC)
    except Exception:
        return "damaged; give it again: fedvlm deploy consent"
    return "ended" if remaining < timedelta(0) else f"until {consent['until']}, by {consent['by']}"


def format_status(state: State) -> list[str]:
    """A handful of lines for people."""
    last = [f"last: {events.format_event(state['last'])}"] if state["last"] else []
    if state["who"] == "site":
        keys = ("trainings", "rounds", "bytes out", "last out", "consent", "classifiers")
        shown_state: State = {**state, "classifiers": ", ".join(state["classifiers"])}
        facts = [f"{key}: {shown_state[key] or 'none yet'}" for key in keys]
        gain_lines = [events.format_event(state["gained"])] if state["gained"] else []
        refused = state["last refusal"]
        refusal_lines = [f"last refusal: {refused['time']} {refused['why']}"] if refused else []
        runs = "is running" if state["up"] else "is not running"
        return [f"site {state['name']} {runs}; its server is {state['address']}", *facts] + (
            refusal_lines + gain_lines + last
        )
    up = "is up" if state["up"] else "does not answer"
    lines = [f"the server at {state['address']} {up}"]
    if run := state["run"]:
        accuracy = events.format_percent(run.get("share"))
        lines.append(
            f"{run['method']}, {run['training']}: {run['state']}, round {run['round']} of "
            f"{run['rounds']}{', accuracy ' + accuracy if accuracy else ''} {run.get('why', '')}".rstrip()
        )
    for name, site_state in state["sites"].items():
        rows = f", {site_state['rows']} training rows" if "rows" in site_state else ""
        reason = f": {site_state['why']}" if site_state.get("why") else ""
        when = f" ({site_state['time']})" if "time" in site_state else ""
        lines.append(f"  {name}: {site_state['state']}{rows}{reason}{when}")
    return lines + last


def list_runs(folder: Path) -> list[State]:
    """The records in a server's folder: what each is, and how far."""
    out = []
    for path in sorted((folder / "runs").glob("*/manifest.json")):
        record = Record(path.parent)
        manifest = read_json(path)
        lines = record.lines()
        out.append(
            {
                "name": path.parent.name,
                "method": manifest["identity"]["method"]["name"],
                "state": "running"
                if is_locked(path.parent / ".lock")
                else "finished"
                if record.result() is not None
                else "stopped",
                "rounds": len(lines),
            }
        )
    return out
