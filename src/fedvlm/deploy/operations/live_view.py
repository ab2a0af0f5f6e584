"""Build what the live page shows of a server or a site: cards, a timeline and trends; nothing here is HTML."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedvlm.deploy.operations import events
from fedvlm.deploy.operations.status import END_STATES, State, is_server, server_status, site_status
from fedvlm.deploy.site.consent import waiting_requests
from fedvlm.deploy.site.ledger import Ledger, PrivacyBudget, describe_spending
from fedvlm.deploy.site.policy import read_policy
from fedvlm.record import Record
from fedvlm.report.charts import Chart, Series
from fedvlm.report.page.render import format_bytes

TIMELINE_EVENTS = 60  # that are shown
MAX_TREND_POINTS = 500
FEW_DAYS = 30  # of a certificate
FEW_BYTES = 1 << 30  # of a disk
GOOD, BAD, QUIET = "good", "bad", "quiet"
SITE_STATES = {  # by the status of a site: what its card says, and how
    "answers": ("takes part", GOOD),
    "connected": ("connected", GOOD),
    "missing": ("late", BAD),
    "refused": ("takes no part", BAD),
    "not seen": ("not connected", QUIET),
}
BAD_EVENTS = {"refused", "missing", "failed", "unreachable", "withdrew", "withdrawn"}
GOOD_EVENTS = {"round", "connected", "joined", "ended", "reached", "gained", "classifier"}


@dataclass(frozen=True)
class Card:
    """Hold one box of the page: a title, a state with its colour, facts by name, and links."""

    title: str
    state: str
    kind: str = QUIET
    facts: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""
    links: list[tuple[str, str]] = field(default_factory=list)  # text and path


def live_view(folder: Path) -> dict[str, Any]:
    """Return what the page shows; it inserts every text as text."""
    history = events.read_events(folder)
    if is_server(folder):
        state = server_status(folder)
        cards, headline = [server_card(state), run_card(state), *site_cards(state)], run_headline(state)
        trends = server_trends(history)
        waiting = 0
    else:
        state = site_status(folder)
        waiting = len(waiting_requests(folder))
        cards = own_cards(folder, state)
        gained = state["gained"]
        headline = events.format_gain(gained) if gained else "this site has not finished a run yet"
        trends = own_trends(history)
    return {
        "title": "the server" if state["who"] == "server" else f"site {state['name']}",
        "is_server": state["who"] == "server",
        "headline": headline,
        "alarms": list_alarms(state),
        "waiting": waiting,
        "report": finished_record(state) is not None,
        "cards": [asdict(card) for card in cards],
        "trends": trends,
        "timeline": [timeline_entry(event) for event in reversed(history[-TIMELINE_EVENTS:])],
    }


def server_card(state: State) -> Card:
    connected = sum(site["connected"] for site in state["sites"].values())
    facts = [("address", state["address"]), ("connected", f"{connected} of {len(state['sites'])} sites")]
    return Card(
        "Server", "up" if state["up"] else "does not answer", GOOD if state["up"] else BAD, facts + machine_lines(state)
    )


def machine_lines(state: State) -> list[tuple[str, str]]:
    return [
        ("version", state["version"]),
        ("certificate", format_days(state["certificate days"])),
        ("free disk", format_bytes(state["free bytes"])),
    ]


def run_card(state: State) -> Card:
    run = state["run"]
    if not run:
        return Card("Run", "none yet", facts=[("start one", "fedvlm deploy run")])
    kind = {"failed": BAD, "ended": GOOD}.get(run["state"], GOOD)
    facts = [("method", f"{run['method']}, {run['training']}"), ("round", f"{run['round']} of {run['rounds']}")]
    if "seconds left" in run:
        facts.append(("time left", f"about {format_seconds(run['seconds left'])}"))
    if run.get("share") is not None:
        facts.append(("accuracy so far", events.format_percent(run["share"])))
    facts.append(("moved", format_bytes(1000 * run["total kB"])))
    if run.get("seconds") is not None:
        facts.append(("last round", f"{run['seconds']} s"))
    return Card("Run", run["state"], kind, facts, str(run.get("why") or "")[:300])


def run_headline(state: State) -> str:
    run = state["run"]
    if not run:
        return "no run has been started"
    accuracy = events.format_percent(run.get("share"))
    return f"{run['method']}: {run['state']}, round {run['round']} of {run['rounds']}" + f", {accuracy}" * bool(
        accuracy
    )


def site_cards(state: State) -> Iterable[Card]:
    for name, site in state["sites"].items():
        text, kind = SITE_STATES.get(site["state"], (site["state"], QUIET))
        if kind == GOOD and site["contact"] and not site["connected"]:
            text, kind = "not connected", QUIET
        accuracy = site.get("accuracy")
        facts = [
            ("last contact", format_age(site["contact"] or site.get("time"))),
            ("training samples", str(site.get("samples", "-"))),
            ("result", "-" if accuracy is None else f"{events.format_percent(accuracy)} of validation samples"),
            ("rounds missed", str(site["missed"])),
            ("version", site.get("version") or "-"),
            ("certificate", format_days(site["certificate days"])),
        ]
        yield Card(f"Site {name}", text, kind, facts, str(site.get("why") or "")[:300])


def own_cards(folder: Path, state: State) -> list[Card]:
    """Return the cards of a site's own page; nothing of other sites."""
    policy, ledger = read_policy(folder), Ledger(folder).history()
    sent = [event for event in events.read_events(folder) if event["kind"] in ("opened", "sent")]
    number = next((event["round"] for event in reversed(sent) if event.get("round")), 0)
    training, up = state["training"], state["up"]
    facts = [("server", state["address"]), ("last contact", format_age(state["last in"])), *machine_lines(state)]
    cards = [Card("Site", "running" if up else "not running", GOOD if up else BAD, facts)]
    if training:
        facts = [
            ("round", f"{number} of {training.get('rounds', '?')}"),
            ("training samples", str(training["samples"])),
        ]
        facts.append(("classes", str(training["classes"])))
        cards.append(Card("Training", str(training["method"]), GOOD, facts))
    spending = describe_spending(PrivacyBudget(ledger), policy)
    facts = [
        ("bytes", format_bytes(state["bytes out"])),
        ("trainings", state["trainings"]),
        ("rounds", state["rounds"]),
    ]
    facts.append(("last", format_age(state["last out"])))
    facts += [("head of the ledger", ledger.head[:16])] if ledger.head else []
    epsilon = [line for line in spending if line.startswith(("ε", "The ledger"))]
    cards.append(Card("What left this site", format_bytes(state["bytes out"]), QUIET, facts, " ".join(epsilon)))
    waiting = len(waiting_requests(folder))
    asked = f"{waiting} waiting" if waiting else "nothing waits"
    link = [("read and answer", "consent")] if waiting else []
    cards.append(Card("Consent", asked, BAD if waiting else QUIET, [("given", state["consent"])], links=link))
    links = [(f"download {name}", f"classifiers/{name}") for name in state["classifiers"]]
    gained = events.format_gain(state["gained"]) if state["gained"] else ""
    cards.append(Card("Classifier", f"{len(links)} here" if links else "none yet", QUIET, [], gained, links))
    return cards


def server_trends(history: list[events.Event]) -> list[Chart]:
    begun = max((place for place, event in enumerate(history) if event["kind"] == "begun"), default=0)
    rounds = [event for event in history[begun:] if event["kind"] == "round"]
    return draw_trends(rounds, "share", "kB", 1000)


def own_trends(history: list[events.Event]) -> list[Chart]:
    begun = max((place for place, event in enumerate(history) if event["kind"] == "opened"), default=0)
    return draw_trends([event for event in history[begun:] if event.get("round")], "share", "bytes", 1)


def draw_trends(rounds: list[events.Event], accuracy: str, traffic: str, unit: int) -> list[Chart]:
    """Describe accuracy and traffic over the rounds; a trend needs two points."""
    titles = (("Accuracy so far, by round", accuracy, "accuracy (%)"), ("Traffic, by round", traffic, "kB"))
    charts = []
    for place, (title, key, label) in enumerate(titles):
        scale = 1.0 if key == accuracy else unit / 1000
        points = [(event["round"], scale * event[key]) for event in rounds if event.get(key) is not None]
        if len(points) > 1:
            series = [Series(title, points[-MAX_TREND_POINTS:], place)]
            charts.append(Chart(title, "round", label, series, is_percent=key == accuracy))
    return charts


def timeline_entry(event: events.Event) -> dict[str, str]:
    time, _, text = events.format_event(event).partition(" ")
    kind = BAD if event["kind"] in BAD_EVENTS else GOOD if event["kind"] in GOOD_EVENTS else QUIET
    return {"at": str(event["time"]), "time": time, "text": text, "kind": kind}


def list_alarms(state: State) -> list[str]:
    """List what needs attention now."""
    out = (
        []
        if state["up"]
        else [f"the {state['who']} {'does not answer' if state['who'] == 'server' else 'is not running'}"]
    )
    if (days := state["certificate days"]) is None or days < FEW_DAYS:
        out.append(f"the certificate: {format_days(days)}; renew it: fedvlm deploy renew")
    if state["free bytes"] < FEW_BYTES:
        out.append(f"only {format_bytes(state['free bytes'])} of disk are free")
    if state["who"] == "server":
        ill = [name for name, site in state["sites"].items() if site["state"] in ("missing", "refused")]
        if ill and state["run"].get("state") == "running":
            out.append(f"{len(ill)} of {len(state['sites'])} sites do not take part")
        if state["run"].get("state") == "failed":
            out.append(f"the run failed: {state['run']['why']}"[:300])
    return out


def finished_record(state: Mapping[str, Any]) -> Record | None:
    """Return the record of the run that ended, if it has a result."""
    run = state.get("run") or {}
    if run.get("state") not in END_STATES or not run.get("record"):
        return None
    record = Record(Path(run["record"]))
    return record if record.result() is not None else None


def format_days(days: int | None) -> str:
    return "none" if days is None else f"{days} days left" if days >= 0 else "expired"


def format_seconds(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


def format_age(time: str | None) -> str:
    """Return how long ago something was; in steps, so that a page changes only now and then."""
    if not time:
        return "never"
    seconds = (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()
    if seconds < 60:
        return "less than a minute ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 6000 else f"{seconds / 3600:.0f} h ago"
