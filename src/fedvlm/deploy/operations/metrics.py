"""Return the numbers of a server or a site in Prometheus' text format."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fedvlm.deploy.operations import events
from fedvlm.deploy.operations.security_log import SECURITY_LOG_FILE
from fedvlm.deploy.operations.status import State, status
from fedvlm.deploy.site.consent import waiting_requests
from fedvlm.deploy.site.ledger import Ledger

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
    "site_missed_rounds_total": ("counter", "Rounds in which a site was missing."),
    "last_contact_timestamp_seconds": ("gauge", "When a site was last heard of; at a site, its last reply."),
    "certificate_remaining_seconds": ("gauge", "Time until a certificate expires."),
    "disk_free_bytes": ("gauge", "Free space where the folder is."),
    "refusals_total": ("counter", "Refusals in the security log, by event."),
    "consent_waiting": ("gauge", "Requests that wait for a person."),
}
Sample = tuple[str, Mapping[str, str], float]  # name, labels and value


def prometheus_metrics(folder: Path) -> str:
    """Return all metrics; those without a value are left out."""
    state = status(folder)
    collect = _server_samples if state["who"] == "server" else _site_samples
    samples = [*_common_samples(folder, state), *collect(folder, state)]
    lines = []
    for name, (kind, text) in METRICS.items():
        values = [(labels, value) for sample, labels, value in samples if sample == name]
        if values:
            lines += [f"# HELP fedvlm_{name} {text}", f"# TYPE fedvlm_{name} {kind}"]
        for labels, value in values:
            inside = ",".join(f'{key}="{_escape_label(label)}"' for key, label in labels.items())
            lines.append(f"fedvlm_{name}{'{' + inside + '}' if inside else ''} {value}")
    return "\n".join(lines) + "\n"


def _escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def _common_samples(folder: Path, state: State) -> Iterator[Sample]:
    yield "up", {}, int(state["up"])
    yield "disk_free_bytes", {}, state["free bytes"]
    for event, count in sorted(count_refusals(folder).items()):
        yield "refusals_total", {"event": event}, count


def count_refusals(folder: Path) -> Counter[str]:
    """Count the refusals in the security log, also in its rotated files."""
    counts: Counter[str] = Counter()
    for path in folder.glob(f"{Path(SECURITY_LOG_FILE).stem}*.jsonl"):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, KeyError):  # a line that is cut off
                entry = json.loads(line)
                counts[entry["event"]] += entry["count"] if entry["outcome"] == "refused" else 0
    return +counts


def _server_samples(folder: Path, state: State) -> Iterator[Sample]:
    run = state["run"]
    names = {"round": "round", "rounds_planned": "rounds", "round_seconds": "seconds", "accuracy_ratio": "share"}
    yield from ((name, {}, run[key]) for name, key in names.items() if run.get(key) is not None)
    history = events.read_events(folder)
    yield "traffic_bytes_total", {}, 1000 * sum(event["kB"] for event in history if event["kind"] == "round")
    yield "certificate_remaining_seconds", {"name": "server"}, DAY_SECONDS * state["certificate days"]
    missed = Counter(str(event.get("site")) for event in history if event["kind"] == "missing")
    for site, site_state in state["sites"].items():
        yield "site_answers", {"site": site}, int(site_state["state"] in ("answers", "connected"))
        yield "site_missed_rounds_total", {"site": site}, missed[site]
        heard = [event["time"] for event in history if _is_from(event, site)]
        if contact := site_state["contact"] or (heard and heard[-1]):
            yield "last_contact_timestamp_seconds", {"site": site}, _timestamp(contact)
        if (days := site_state["certificate days"]) is not None:
            yield "certificate_remaining_seconds", {"name": site}, DAY_SECONDS * days


def _is_from(event: Mapping[str, Any], site: str) -> bool:
    return site in event.get("there", ()) or (event.get("site") == site and event["kind"] in ("connected", "refused"))


def _site_samples(folder: Path, state: State) -> Iterator[Sample]:
    out = [line for line in Ledger(folder).history().lines if line["direction"] == "out"]
    yield "sent_bytes_total", {}, state["bytes out"]
    yield "consent_waiting", {}, len(waiting_requests(folder))
    if out:
        yield "last_contact_timestamp_seconds", {"site": state["name"]}, _timestamp(out[-1]["time"])
    if (days := state["certificate days"]) is not None:
        yield "certificate_remaining_seconds", {"name": state["name"]}, DAY_SECONDS * days
    gained = state["gained"]
    if gained and gained["samples"]:
        yield "accuracy_ratio", {}, gained["federated"] / gained["samples"]


def _timestamp(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
