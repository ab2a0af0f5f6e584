"""Return the numbers of a server or a site in Prometheus' text format."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fedvlm.deploy.operations import events
from fedvlm.deploy.operations.security_log import SECURITY_LOG_FILE
from fedvlm.deploy.operations.status import State, status
from fedvlm.deploy.site.consent import waiting_requests

DAY_SECONDS = 86400
METRICS = {  # type and help, by the name without its prefix
    "up": ("gauge", "Whether the server or site runs."),
    "round": ("gauge", "Rounds done in the latest run."),
    "rounds_planned": ("gauge", "Rounds that the latest run has."),
    "round_seconds": ("gauge", "Duration of the latest round."),
    "accuracy_ratio": ("gauge", "Accuracy so far, mean over the sites; at a site on its validation samples."),
    "traffic_bytes_total": ("counter", "Bytes of uploads and downloads in rounds."),
    "sent_bytes_total": ("counter", "Bytes that left this site, by its ledger."),
    "site_answers": ("gauge", "Whether a site took part in the latest round, or is connected."),
    "site_missed_rounds": ("gauge", "Rounds of the latest run in which a site was missing."),
    "last_contact_timestamp_seconds": ("gauge", "When a site was last heard of; at a site, its last reply."),
    "certificate_remaining_seconds": ("gauge", "Time until a certificate expires."),
    "disk_free_bytes": ("gauge", "Free space where the folder is."),
    "refusals_total": ("counter", "Refusals in the security log, by event."),
    "consent_waiting": ("gauge", "Requests that wait for a person."),
}
Sample = tuple[str, str, Any]  # name, labels and value; None is left out


def prometheus_metrics(folder: Path) -> str:
    state, lines = status(folder), []
    collect = _server_samples if state["who"] == "server" else _site_samples
    samples = [*_common_samples(folder, state), *collect(folder, state)]
    for name, (kind, text) in METRICS.items():
        known = [(labels, value) for key, labels, value in samples if key == name and value is not None]
        values = [f"fedvlm_{name}{labels} {value}" for labels, value in known]
        if values:
            lines += [f"# HELP fedvlm_{name} {text}", f"# TYPE fedvlm_{name} {kind}", *values]
    return "\n".join(lines) + "\n"


def _label(name: str, text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'{{{name}="{escaped}"}}'


def _common_samples(folder: Path, state: State) -> Iterator[Sample]:
    yield "up", "", int(state["up"])
    yield "disk_free_bytes", "", state["free bytes"]
    name = _label("name", state.get("name", "server"))
    yield "certificate_remaining_seconds", name, _seconds(state["certificate days"])
    counts: Counter[str] = Counter()
    for path in folder.glob(f"{Path(SECURITY_LOG_FILE).stem}*.jsonl"):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, KeyError):  # a line that is cut off
                entry = json.loads(line)
                counts[entry["event"]] += entry["count"] if entry["outcome"] == "refused" else 0
    yield from (("refusals_total", _label("event", event), count) for event, count in sorted((+counts).items()))


def _server_samples(folder: Path, state: State) -> Iterator[Sample]:
    names = {"round": "round", "rounds_planned": "rounds", "round_seconds": "seconds", "accuracy_ratio": "share"}
    yield from ((name, "", state["run"].get(key)) for name, key in names.items())
    rounds = [event for event in events.read_events(folder) if event["kind"] == "round"]
    yield "traffic_bytes_total", "", 1000 * sum(event["kB"] for event in rounds)
    for site, site_state in state["sites"].items():
        label = _label("site", site)
        yield "site_answers", label, int(site_state["state"] in ("answers", "connected"))
        yield "site_missed_rounds", label, site_state["missed"]
        yield "last_contact_timestamp_seconds", label, _timestamp(site_state["contact"] or site_state.get("time"))
        yield "certificate_remaining_seconds", _label("name", site), _seconds(site_state["certificate days"])


def _site_samples(folder: Path, state: State) -> Iterator[Sample]:
    yield "sent_bytes_total", "", state["bytes out"]
    yield "consent_waiting", "", len(waiting_requests(folder))
    yield "last_contact_timestamp_seconds", _label("site", state["name"]), _timestamp(state["last out"])
    if (gained := state["gained"]) and gained["samples"]:
        yield "accuracy_ratio", "", gained["federated"] / gained["samples"]


def _seconds(days: int | None) -> int | None:
    return None if days is None else DAY_SECONDS * days


def _timestamp(time: str | None) -> float | None:
    return datetime.fromisoformat(time).timestamp() if time else None
