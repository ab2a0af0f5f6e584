"""The state of a server or a site, from its folder alone: anyone who may read it can ask."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedvlm.deploy import events
from fedvlm.deploy.account import Account
from fedvlm.deploy.consent import CONSENT
from fedvlm.deploy.kits import SiteKit, read_server, read_site
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.policy import read_policy
from fedvlm.errors import SettingsError
from fedvlm.record import Record
from fedvlm.storage.files import busy
from fedvlm.storage.sealed import read_json

State = dict[str, Any]
ENDS = {"ended", "failed"}


def is_server(folder: Path) -> bool:
    if not any((folder / name).exists() for name in ("server.toml", "site.toml")):
        raise SettingsError(
            f"{folder} is no server's folder and no site's; name one, as DIR/server or DIR/site-a"
        )
    return (folder / "server.toml").exists()


def status(folder: Path) -> State:
    return of_server(folder) if is_server(folder) else of_site(folder)


def of_server(folder: Path) -> State:
    """Whether it is up, which run it is at, and how each site is."""
    from fedvlm.deploy.flower.processes import answers

    kit = read_server(folder)
    seen = events.read(folder)
    sites: dict[str, State] = {name: {"state": "not seen"} for name in kit.sites}
    run: State = {}
    for event in seen:
        kind, name = event["kind"], event.get("site")
        if kind == "begun":
            keys = ("method", "training", "rounds", "record")
            run = {key: event.get(key) for key in keys} | {"state": "running", "round": 0}
        elif kind == "round":
            run |= {key: event.get(key) for key in ("round", "share", "kB", "seconds")}
            for there in event.get("there", []):
                sites.setdefault(there, {}).update(state="answers", why="", time=event["time"])
        elif kind in ENDS:
            run |= {"state": kind, "why": event.get("why", "")}
        if name in sites and kind in ("connected", "refused", "missing"):
            sites[name].update(state=kind, why=event.get("why", ""), time=event["time"])
            sites[name] |= {"rows": event["rows"]} if "rows" in event else {}
    return {
        **{"who": "server", "address": kit.address, "up": answers(kit), "run": run},
        **{"sites": sites, "last": seen[-1] if seen else None},
    }


def of_site(folder: Path) -> State:
    """Whether it runs, what it was asked, what has left it and what may still leave."""
    kit = read_site(folder)
    seen = events.read(folder)
    account, policy = Account(Ledger(folder)), read_policy(folder)
    ledger = Ledger(folder)
    lines = ledger.read().lines if ledger.path.exists() else ()
    out = [line for line in lines if line["direction"] == "out"]
    gained = [event for event in seen if event["kind"] == "gained"]
    refused = [line for line in lines if line["direction"] == "refused"]
    return {
        **{"who": "site", "name": kit.name, "address": kit.address, "up": busy(folder / ".lock")},
        "trainings": f"{len(account.trainings)} of {policy.trainings}",
        "rounds": f"{account.rounds.total()} of {policy.all_rounds}",
        "bytes out": sum(line["bytes"] for line in out),
        "last out": out[-1]["time"] if out else None,
        "last refusal": _refusal(refused[-1]) if refused else None,
        "consent": _consent(kit),
        "gained": gained[-1] if gained else None,
        "classifiers": sorted(path.name for path in (folder / "classifiers").glob("*")),
        "last": seen[-1] if seen else None,
    }


def _refusal(line: dict[str, Any]) -> State:
    return {"time": line["time"], "why": line.get("error", "")}


def _consent(kit: SiteKit) -> str:
    if not (kit.folder / CONSENT).exists():
        return "none"
    try:
        given = json.loads((kit.folder / CONSENT).read_text())
        if "refused" in given:
            return f"refused by {given['by']}: {given['reason']}"
        left = datetime.fromisoformat(given["until"]) - datetime.now(UTC)
    except Exception:
        return "damaged; give it again: fedvlm deploy consent"
    return "ended" if left < timedelta(0) else f"until {given['until']}, by {given['by']}"


def in_words(state: State) -> list[str]:
    """A handful of lines for people."""
    last = [f"last: {events.sentence(state['last'])}"] if state["last"] else []
    if state["who"] == "site":
        keys = ("trainings", "rounds", "bytes out", "last out", "consent", "classifiers")
        own: State = {**state, "classifiers": ", ".join(state["classifiers"])}
        facts = [f"{key}: {own[key] or 'none yet'}" for key in keys]
        gained = [events.sentence(state["gained"])] if state["gained"] else []
        refused = state["last refusal"]
        why = [f"last refusal: {refused['time']} {refused['why']}"] if refused else []
        runs = "is running" if state["up"] else "is not running"
        return [f"site {state['name']} {runs}; its server is {state['address']}", *facts] + (
            why + gained + last
        )
    up = "is up" if state["up"] else "does not answer"
    lines = [f"the server at {state['address']} {up}"]
    if run := state["run"]:
        share = events.percent(run.get("share"))
        lines.append(
            f"{run['method']}, {run['training']}: {run['state']}, round {run['round']} of "
            f"{run['rounds']}{', accuracy ' + share if share else ''} {run.get('why', '')}".rstrip()
        )
    for name, one in state["sites"].items():
        rows = f", {one['rows']} training rows" if "rows" in one else ""
        reason = f": {one['why']}" if one.get("why") else ""
        when = f" ({one['time']})" if "time" in one else ""
        lines.append(f"  {name}: {one['state']}{rows}{reason}{when}")
    return lines + last


def runs(folder: Path) -> list[State]:
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
                if busy(path.parent / ".lock")
                else "finished"
                if record.result() is not None
                else "stopped",
                "rounds": len(lines),
            }
        )
    return out
