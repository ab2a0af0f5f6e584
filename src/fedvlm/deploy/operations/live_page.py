"""Serve the live page on this machine for whoever has the token; read-only except for consent."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedvlm.deploy.operations import events
from fedvlm.deploy.operations.metrics import prometheus_metrics
from fedvlm.deploy.operations.status import END_STATES, State, format_status, is_server, status
from fedvlm.deploy.site.consent import accept_request, format_request, refuse_request, waiting_requests
from fedvlm.deploy.site.ledger import Ledger, PrivacyBudget, describe_spending
from fedvlm.deploy.site.people import LoginError, authenticate
from fedvlm.deploy.site.policy import read_policy
from fedvlm.errors import FedVLMError, SettingsError
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
    """Return the lines and lights of the page, which inserts them as text."""
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
        "plan": "",
        "report": finished_record(state) is not None,
    }
    if not server:
        ledger = Ledger(folder).history()
        out["facts"] += describe_spending(PrivacyBudget(ledger), read_policy(folder))
        out["facts"] += [f"head of the ledger, to note down: {ledger.head[:16]}"] if ledger.head else []
        for request in waiting_requests(folder)[:1]:
            out["pending"] = [f"{topic}: {text}" for topic, text in format_request(folder, request)]
            out["plan"] = request.plan
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
    """List what needs attention now."""
    out = []
    if state["who"] == "server":
        ill = [name for name, site_state in state["sites"].items() if site_state["state"] in ("missing", "refused")]
        if ill and state["run"].get("state") == "running":
            out.append(f"{len(ill)} of {len(state['sites'])} sites do not take part")
        if state["run"].get("state") == "failed":
            out.append(f"the run failed: {state['run']['why']}"[:300])
        if not state["up"]:
            out.append("the server does not answer")
    elif not state["up"]:
        out.append("the site is not running")
    return out


def finished_record(state: State) -> Record | None:
    """Return the record of the run that ended, if it has a result."""
    run = state.get("run") or {}
    if run.get("state") not in END_STATES or not run.get("record"):
        return None
    record = Record(Path(run["record"]))
    return record if record.result() is not None else None


def live_page(folder: Path) -> tuple[str, str]:
    """Return the page and its content security policy; it requests only from where it came."""
    from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined

    script = (files("fedvlm.deploy.operations") / "live.js").read_text("utf-8")
    parts = page_shell(script, STYLE, "connect-src 'self'")
    package_folder = Path(str(files("fedvlm.deploy.operations")))
    env = Environment(
        loader=ChoiceLoader([FileSystemLoader(package_folder), PackageLoader("fedvlm.report.page", "templates")]),
        autoescape=True,
        undefined=StrictUndefined,
    )
    server = is_server(folder)
    title = "the server" if server else f"site {status(folder)['name']}"
    html = env.get_template("live.html").render(**parts, title=title, site=not server, view=live_view(folder))
    return html, parts["policy"]


POLL_SECONDS = 1.0  # seconds between looks
MAX_ANSWER_BYTES = 4096  # bytes of a person's answer
HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def create_app(folder: Path, token: str, hosts: set[str]) -> Any:
    """Create the web application; a request for a host that is not in `hosts` is DNS rebinding."""
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
        from starlette.responses import StreamingResponse
    except ImportError as error:
        raise SettingsError("fastapi is not installed; pip install 'fedvlm[watch]'") from error

    server = FastAPI(openapi_url=None)

    @server.middleware("http")
    async def check_access(request: Request, call: Any) -> Response:
        refusal = _refusal(request, token, hosts)
        reply: Response = JSONResponse({"detail": refusal[1]}, refusal[0]) if refusal else (await call(request))
        reply.headers.update({key: header for key, header in HEADERS.items() if key not in reply.headers})
        return reply

    @server.get("/")
    def live() -> HTMLResponse:
        html, policy = live_page(folder)
        return HTMLResponse(html, headers={"content-security-policy": policy})

    @server.get("/state")
    def state() -> JSONResponse:
        return JSONResponse(json.loads(json.dumps(status(folder), default=str)))

    @server.get("/events")
    def events() -> StreamingResponse:
        return StreamingResponse(_stream(folder), media_type="text/event-stream")

    @server.get("/report")
    def report() -> HTMLResponse:
        from fedvlm.report.page.model import build_model
        from fedvlm.report.page.render import render_page as written

        record = finished_record(status(folder))
        if record is None:
            return HTMLResponse("no run has ended here", 404)
        return HTMLResponse(written(build_model([record])))

    @server.get("/health")
    def health() -> JSONResponse:
        up = status(folder)["up"]
        return JSONResponse({"up": up}, 200 if up else 503)

    @server.get("/metrics")
    def numbers() -> PlainTextResponse:
        return PlainTextResponse(prometheus_metrics(folder))

    @server.post("/consent")
    async def consent(request: Request) -> JSONResponse:
        if is_server(folder):
            return JSONResponse({"detail": "consent is given at a site"}, 405)
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > MAX_ANSWER_BYTES:
                return JSONResponse({"detail": "the answer is too long"}, 413)
        detail, code = await asyncio.to_thread(_answer_request, folder, bytes(raw))
        return JSONResponse({"detail": detail}, code)

    return server


def _refusal(request: Any, token: str, hosts: set[str]) -> tuple[int, str] | None:
    if request.headers.get("host", "") not in hosts:
        return 421, "this service does not have that name"
    origin = request.headers.get("origin")
    if origin is not None and origin not in {f"http://{host}" for host in hosts}:
        return 403, "another page sent this request"
    if request.method == "POST" and origin is None:
        return 403, "only the page of this service may send this"
    credentials = request.query_params.get("token") or request.headers.get("authorization", "")
    if not hmac.compare_digest(credentials.removeprefix("Bearer ").encode(), token.encode()):
        return 401, "the token is missing or wrong; use the address that the command printed"
    return None


def _answer_request(folder: Path, raw: bytes) -> tuple[str, int]:
    """Carry out a person's answer; return a sentence and an HTTP status."""
    try:
        answer = json.loads(raw)
        person, plan = authenticate(folder, str(answer["by"]), str(answer["secret"])), str(answer["plan"])
        if answer.get("refuse"):
            return refuse_request(folder, person, plan, str(answer.get("reason", ""))), 200
        return accept_request(folder, person, plan, float(answer["days"])), 200
    except LoginError as error:
        return str(error), 403
    except FedVLMError as error:
        return str(error)[:300], 422
    except (ValueError, TypeError, AttributeError, KeyError):
        return "the answer cannot be read; reload the page and try again", 422


async def _stream(folder: Path) -> AsyncIterator[str]:
    """Yield the view each time it has changed."""
    last = ""
    while True:
        now = await asyncio.to_thread(live_view, folder)
        text = json.dumps({**now, "time": ""}, ensure_ascii=False)
        if text != last:
            last = text
            yield f"data: {text}\n\n"
        await asyncio.sleep(POLL_SECONDS)


def serve_live_page(folder: Path, port: int, ready: Callable[[str], None]) -> None:
    """Serve on this machine until interrupted; `ready` gets the address with its token."""
    from secrets import token_urlsafe

    import uvicorn

    from fedvlm.encoders.serve import open_socket

    token = token_urlsafe(24)
    is_server(folder)
    with open_socket("127.0.0.1", port) as listener:
        at = listener.getsockname()[1]
        hosts = {f"127.0.0.1:{at}", f"localhost:{at}"}
        made = create_app(folder, token, hosts)
        config = uvicorn.Config(made, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1)
        ready(f"http://127.0.0.1:{at}/?token={token}")
        uvicorn.Server(config).run(sockets=[listener])
