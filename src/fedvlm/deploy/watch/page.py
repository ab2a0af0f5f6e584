"""A state as the page shows it, and the page with the state that it opens with."""

from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedvlm.deploy import events
from fedvlm.deploy.account import PrivacyBudget
from fedvlm.deploy.explain import describe_spending
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.pending import format_request as asked
from fedvlm.deploy.pending import pending_request
from fedvlm.deploy.policy import read_policy
from fedvlm.deploy.status import END_STATES, State, format_status, is_server, status
from fedvlm.record import Record
from fedvlm.report.page.render import page_shell

LOG_LINES = 60  # of the log that are shown
STYLE = """
#lights { list-style: none; padding: 0; }
.light::before { content: "●"; margin-right: .5rem; color: var(--quiet); }
.light.answers::before, .light.connected::before { color: var(--good); }
.light.missing::before, .light.refused::before { content: "▲"; color: var(--warn); }
"""


def live_view(folder: Path) -> dict[str, Any]:
    """Plain lines and lights; the page puts them in as text."""
    state = status(folder)
    history = events.read_events(folder)
    lines = format_status(state)
    server = state["who"] == "server"
    out: dict[str, Any] = {
        "time": datetime.now().strftime("%H:%M:%S"),
        "lead": lines[:1],
        "alarms": list_alarms(state),
        "lights": _site_lights(state) if server else [],
        "facts": [line for line in lines[1:] if not line.startswith("  ")],
        "log": [events.format_event(event) for event in reversed(history[-LOG_LINES:])],
        "pending": [],
        "report": finished_record(state) is not None,
    }
    if not server:
        ledger = Ledger(folder)
        head = ledger.read().head if ledger.path.exists() else ""
        out["facts"] += describe_spending(PrivacyBudget(ledger), read_policy(folder))
        out["facts"] += [f"head of the ledger, to note down: {head[:16]}"] if head else []
        out["pending"] = asked(pending_request(folder))
    return out


def _site_lights(state: State) -> list[dict[str, str]]:
    return [
        {
            "state": site_state["state"] if site_state["state"].isalpha() else "unknown",
            "text": f"{name}: {site_state['state']}{': ' + site_state['why'] if site_state.get('why') else ''}",
        }
        for name, site_state in state["sites"].items()
    ]


def list_alarms(state: State) -> list[str]:
    """What a person should look at now."""
    out = []
    if state["who"] == "server":
        ill = [name for name, site_state in state["sites"].items() if site_state["state"] in ("missing", "refused")]
        if ill and state["run"].get("state") == "running":
            out.append(f"{len(ill)} of {len(state['sites'])} sites take no part")
        if state["run"].get("state") == "failed":
            out.append(f"the run failed: {state['run']['why']}"[:300])
        if not state["up"]:
            out.append("the server does not answer")
    elif not state["up"]:
        out.append("the site is not running")
    return out


def finished_record(state: State) -> Record | None:
    """The run that ended, if it has a result: the page then leads to its report."""
    run = state.get("run") or {}
    if run.get("state") not in END_STATES or not run.get("record"):
        return None
    record = Record(Path(run["record"]))
    return record if record.result() is not None else None


def live_page(folder: Path) -> tuple[str, str]:
    """The page and its policy; its only requests are to where it came from."""
    from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined

    script = (files("fedvlm.deploy.watch") / "live.js").read_text("utf-8")
    parts = page_shell(script, STYLE, "connect-src 'self'")
    package_folder = Path(str(files("fedvlm.deploy.watch")))
    env = Environment(
        loader=ChoiceLoader([FileSystemLoader(package_folder), PackageLoader("fedvlm.report.page", "templates")]),
        autoescape=True,
        undefined=StrictUndefined,
    )
    server = is_server(folder)
    title = "the server" if server else f"site {status(folder)['name']}"
    html = env.get_template("live.html").render(**parts, title=title, site=not server, view=live_view(folder))
    return html, parts["policy"]
