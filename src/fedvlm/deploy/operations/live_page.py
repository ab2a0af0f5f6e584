"""Serve the live page on this machine for whoever has the token; read-only except for consent."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from hashlib import sha256
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zipfile import ZIP_DEFLATED, ZipFile

from fedvlm.deploy.kits import read_site
from fedvlm.deploy.operations.live_view import finished_record, live_view
from fedvlm.deploy.operations.metrics import prometheus_metrics
from fedvlm.deploy.operations.status import is_server, site_status, status
from fedvlm.deploy.site.consent import accept_request, format_request, refuse_request, waiting_requests
from fedvlm.deploy.site.people import LoginError, authenticate, read_people
from fedvlm.errors import FedVLMError, SettingsError
from fedvlm.report.page.render import open_template, page_shell
from fedvlm.report.page.svg import draw_chart


def render_live_page(folder: Path, token: str = "") -> tuple[str, str]:
    """Return the page and its content security policy; it requests only from where it came."""
    view = live_view(folder)
    return _render("live.html", token, view=view, time=datetime.now().strftime("%H:%M:%S"), draw_chart=draw_chart)


def render_consent_page(folder: Path, token: str = "") -> tuple[str, str]:
    """Return the page on which a site's people answer requests, and its content security policy."""
    requests = [(request, format_request(folder, request)) for request in waiting_requests(folder)]
    title = f"site {read_site(folder).name}"
    return _render(
        "consent.html", token, title=title, requests=requests, people=read_people(folder), folder=folder.name
    )


def _render(template: str, token: str, **values: Any) -> tuple[str, str]:
    package = files("fedvlm.deploy.operations")
    parts = page_shell(
        (package / "live.js").read_text("utf-8"), (package / "live.css").read_text("utf-8"), "connect-src 'self'"
    )
    query = f"?token={quote(token)}"
    html = open_template(template, "fedvlm.deploy.operations").render(**parts, **values, query=query)
    return html, parts["policy"]


def pack_classifier(folder: Path, name: str) -> bytes | None:
    """Return the files of a site's classifier as a zip file, if there is one of this name."""
    if name not in site_status(folder)["classifiers"]:
        return None
    place, data = folder / "classifiers" / name, BytesIO()
    with ZipFile(data, "w", ZIP_DEFLATED) as archive:
        for path in sorted(place.rglob("*")):
            if path.is_file():
                archive.write(path, f"{name}/{path.relative_to(place)}")
    return data.getvalue()


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
    if not is_server(folder):
        _add_site_routes(server, folder, token)

    @server.middleware("http")
    async def check_access(request: Request, call: Any) -> Response:
        refusal = _refusal(request, token, hosts)
        reply: Response = JSONResponse({"detail": refusal[1]}, refusal[0]) if refusal else (await call(request))
        reply.headers.update({key: header for key, header in HEADERS.items() if key not in reply.headers})
        return reply

    @server.get("/")
    def live() -> Any:
        return _page_response(render_live_page(folder, token))

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

    return server


def _page_response(content: tuple[str, str]) -> Any:
    from fastapi.responses import HTMLResponse

    return HTMLResponse(content[0], headers={"content-security-policy": content[1]})


def _add_site_routes(server: Any, folder: Path, token: str) -> None:
    """Add what only a site has: consent and its classifiers."""
    from fastapi import Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response

    def consent_page() -> Any:
        return _page_response(render_consent_page(folder, token))

    async def consent(request: Request) -> JSONResponse:
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > MAX_ANSWER_BYTES:
                return JSONResponse({"detail": "the answer is too long"}, 413)
        detail, code = await asyncio.to_thread(_answer_request, folder, bytes(raw))
        return JSONResponse({"detail": detail}, code)

    def classifier(name: str) -> Response:
        if (data := pack_classifier(folder, name)) is None:
            return PlainTextResponse("there is no classifier of this name here", 404)
        named = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name)}.zip"}
        return Response(data, media_type="application/zip", headers=named)

    server.add_api_route("/consent", consent_page)
    server.add_api_route("/consent", consent, methods=["POST"])
    server.add_api_route("/classifiers/{name}", classifier)


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
    """Yield a hash of the view each time it has changed; the page then asks for itself."""
    last = ""
    while True:
        now = await asyncio.to_thread(live_view, folder)
        text = sha256(json.dumps(now, default=repr).encode()).hexdigest()
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
