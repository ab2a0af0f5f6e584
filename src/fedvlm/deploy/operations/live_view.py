"""Build what the live page shows of a server or a site: cards, a timeline and trends; nothing here is HTML."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from fedvlm.deploy.operations import events
from fedvlm.deploy.operations.status import END_STATES, ROUNDS_TO_FORECAST, State, is_server, server_status, site_status
from fedvlm.deploy.site.consent import waiting_requests
from fedvlm.deploy.site.ledger import Ledger, PrivacyBudget, describe_spending
from fedvlm.deploy.site.policy import read_policy
from fedvlm.record import Record
from fedvlm.report.charts import Chart, Series
from fedvlm.report.page.render import format_bytes

TIMELINE_EVENTS = 60  # that are shown
ROUNDS_IN_TIMELINE = 5  # in a row; the others are counted
MAX_TREND_POINTS = 500
FEW_DAYS = 30  # of a certificate
FEW_BYTES = 1 << 30  # of a disk
GOOD, BAD, PLAIN = "good", "bad", "plain"
SITE_STATES = {  # by the status of a site: what its card says, and how
    "answers": ("takes part", GOOD),
    "connected": ("connected", GOOD),
    "missing": ("late", BAD),
    "refused": ("takes no part", BAD),
    "not seen": ("not connected", PLAIN),
}
CONNECTION_STATES = {  # by the latest event of these at a site that runs
    "connecting": ("connecting", PLAIN),
    "unreachable": ("the server cannot be reached", BAD),
    **dict.fromkeys(("reached", "opened", "sent"), ("connected", GOOD)),
}
BAD_EVENTS = {"refused", "missing", "failed", "unreachable", "withdrew", "withdrawn"}
GOOD_EVENTS = {"round", "connected", "joined", "ended", "reached", "gained", "classifier"}


@dataclass(frozen=True)
class Card:
    """Hold one box of the page: a title, a state with its colour, facts by name, and links."""

    title: str
    state: str
    kind: str = PLAIN
    facts: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""
    links: list[tuple[str, str]] = field(default_factory=list)  # text and path


def live_view(folder: Path) -> dict[str, Any]:
    """Return what the page shows; it inserts every text as text."""
    history = events.read_events(folder)
    if is_server(folder):
        state = server_status(folder)
        cards, waiting = [server_card(state), run_card(state), *site_cards(state)], 0
        facts = dict(cards[1].facts)
        headline = f"{facts['method']}: {cards[1].state}, round {facts['round']}" if state["run"] else "no run yet"
        trends = make_trends(rounds_since(history, "begun"), "kB", 1.0)
    else:
        state = site_status(folder)
        waiting = len(waiting_requests(folder))
        cards = own_cards(folder, state)
        gained = state["gained"]
        headline = events.format_gain(gained) if gained else "this site has not finished a run yet"
        trends = make_trends(rounds_since(history, "opened"), "bytes", 0.001)
    return {
        "title": "the server" if state["who"] == "server" else f"site {state['name']}",
        "is_server": state["who"] == "server",
        "headline": headline,
        "alarms": list_alarms(state),
        "waiting": waiting,
        "report": finished_record(state) is not None,
        "cards": [asdict(card) for card in cards],
        "trends": trends,
        "timeline": list(timeline(history)),
    }


def server_card(state: State) -> Card:
    connected = sum(site["connected"] for site in state["sites"].values())
    facts = [("address", state["address"]), ("connected", f"{connected} of {len(state['sites'])} sites")]
    text, kind = ("up", GOOD) if state["up"] else ("does not answer", BAD)
    return Card("Server", text, kind, facts + machine_lines(state))


def machine_lines(state: State) -> list[tuple[str, str]]:
    days, free = format_days(state["certificate days"]), format_bytes(state["free bytes"])
    return [("version", state["version"]), ("certificate", days), ("free disk", free)]


def run_card(state: State) -> Card:
    run = state["run"]
    if not run:
        return Card("Run", "none yet", facts=[("start one", "fedvlm deploy run")])
    kind = BAD if run["state"] == "failed" else GOOD
    facts = [("method", f"{run['method']}, {run['training']}"), ("round", f"{run['round']} of {run['rounds']}")]
    if "seconds left" in run:
        facts.append(("time left", f"about {format_seconds(run['seconds left'])}"))
    if run.get("table"):  # as the command prints it
        facts += run["table"].items()
    elif run.get("share") is not None:
        facts.append(("accuracy so far", events.format_percent(run["share"])))
    facts.append(("moved", format_bytes(1000 * run["total kB"])))
    if run.get("seconds") is not None:
        facts.append(("last round", f"{run['seconds']} s"))
    return Card("Run", run["state"], kind, facts, str(run.get("why") or "")[:300])


def site_cards(state: State) -> Iterable[Card]:
    for name, site in state["sites"].items():
        text, kind = SITE_STATES.get(site["state"], (site["state"], PLAIN))
        if kind == GOOD and site["contact"] and not site["connected"]:
            text, kind = "not connected", PLAIN
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
    policy, ledger, history = read_policy(folder), Ledger(folder).history(), events.read_events(folder)
    training, up = state["training"], state["up"]
    facts = [("server", state["address"]), ("last contact", format_age(state["last in"])), *machine_lines(state)]
    last = next((event["kind"] for event in reversed(history) if event["kind"] in CONNECTION_STATES), "connecting")
    text, kind = CONNECTION_STATES[last] if up else ("not running", BAD)
    cards = [Card("Site", text, kind, facts)]
    if training:
        cards.append(training_card(training, rounds_since(history, "opened")))
    spending = describe_spending(PrivacyBudget(ledger), policy)
    facts = [("trainings", state["trainings"]), ("rounds", state["rounds"]), ("last", format_age(state["last out"]))]
    facts += [("head of the ledger", ledger.head[:16])] if ledger.head else []
    epsilon = [line for line in spending if line.startswith(("ε", "The ledger"))]
    cards.append(Card("What left this site", format_bytes(state["bytes out"]), PLAIN, facts, " ".join(epsilon)))
    waiting = len(waiting_requests(folder))
    asked = f"{waiting} waiting" if waiting else "nothing waits"
    link = [("read and answer", "consent")] if waiting else []
    cards.append(Card("Consent", asked, BAD if waiting else PLAIN, [("given", state["consent"])], links=link))
    links = [(f"download {name}", f"classifiers/{name}") for name in state["classifiers"]]
    gained = events.format_gain(state["gained"]) if state["gained"] else ""
    cards.append(Card("Classifier", f"{len(links)} here" if links else "none yet", PLAIN, [], gained, links))
    return cards


def training_card(training: events.Event, rounds: list[events.Event]) -> Card:
    """Return the card of the training that was opened last; its rounds are those that this site has answered."""
    number, planned = rounds[-1]["round"] if rounds else 0, int(training.get("rounds", 0))
    facts = [("round", f"{number} of {planned}")]
    if len(rounds) > 1 and number < planned:
        recent = rounds[-ROUNDS_TO_FORECAST - 1 :]
        first, latest = (datetime.fromisoformat(event["time"]) for event in (recent[0], recent[-1]))
        seconds = (latest - first).total_seconds() / (len(recent) - 1) * (planned - number)
        facts.append(("time left", f"about {format_seconds(seconds)}"))
    facts += [("training samples", str(training["samples"])), ("classes", str(training["classes"]))]
    return Card("Training", str(training["method"]), GOOD, facts)


def rounds_since(history: list[events.Event], kind: str) -> list[events.Event]:
    """Return the events of rounds since the latest event of a kind."""
    begun = max((place for place, event in enumerate(history) if event["kind"] == kind), default=0)
    return [event for event in history[begun:] if event["kind"] in ("round", "sent") and event.get("round")]


def make_trends(rounds: list[events.Event], traffic: str, unit: float) -> list[Chart]:
    """Describe accuracy and traffic over the rounds; a trend needs two points."""
    titles = (("Accuracy so far, by round", "share", 1.0), ("Traffic, by round", traffic, unit))
    charts = []
    for place, (title, key, scale) in enumerate(titles):
        points = [(event["round"], scale * event[key]) for event in rounds if event.get(key) is not None]
        top, label = (1.0, "accuracy (%)") if key == "share" else (max([y for _, y in points], default=1.0), "kB")
        series = [Series(title, points[-MAX_TREND_POINTS:], place)]
        chart = Chart(title, "round", label, series, is_percent=key == "share", y_range=(0.0, top))
        charts += [chart] if len(points) > 1 else []
    return charts


def timeline(history: list[events.Event]) -> Iterable[dict[str, str]]:
    """Yield the newest events first; of a row of rounds, the newest ones and how many more there are."""
    shown = 0
    for kind, group in groupby(reversed(history), lambda event: event["kind"]):
        row = list(group)
        limit = ROUNDS_IN_TIMELINE if kind in ("round", "sent") else len(row)
        for event in row[:limit]:
            yield timeline_entry(event)
        if len(row) > limit:
            rest = len(row) - limit
            yield {**timeline_entry(row[-1]), "text": f"{rest} earlier line{'s' * (rest > 1)} of rounds since then"}
        shown += min(len(row), limit + 1)
        if shown >= TIMELINE_EVENTS:
            return


def timeline_entry(event: events.Event) -> dict[str, str]:
    time, _, text = events.format_event(event).partition(" ")
    kind = BAD if event["kind"] in BAD_EVENTS else GOOD if event["kind"] in GOOD_EVENTS else PLAIN
    return {"at": str(event["time"]), "time": time, "text": text, "kind": kind}


def list_alarms(state: State) -> list[str]:
    """List what needs attention now."""
    down = {"server": "the server does not answer", "site": "the site is not running"}
    out = [] if state["up"] else [down[state["who"]]]
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
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def format_age(time: str | None) -> str:
    """Return how long ago something was; in steps, so that a page changes only now and then."""
    if not time:
        return "never"
    seconds = (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()
    if seconds < 60:
        return "less than a minute ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 6000 else f"{seconds / 3600:.0f} h ago"
