"""Serve an encoder over HTTP: it takes images or sentences and returns embeddings.

Weights and gradients are never sent; images are neither stored nor logged.
"""

import asyncio
import hmac
import json
import logging
import socket
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.encoders import Encoder, fingerprint
from fedvlm.encoders.http import REMOTE_OFFERS, encode_array, read_token
from fedvlm.errors import DataError, EncoderError, SettingsError

LOG = logging.getLogger("fedvlm.serve")
MAX_BYTES = 64_000_000  # of one request
MAX_BATCH = 256  # images or sentences in one request
MAX_DECODES = 2  # at once: a small file may claim 64 megapixels, half a gigabyte each
MAX_REQUESTS = 8  # bodies in memory at once; other requests wait
BODY_SECONDS = 60.0  # for a complete body


MAX_CONNECTIONS = 128  # at once; a new one replaces the longest idle one
HEADER_SECONDS = 10.0  # from the first byte, or from connecting, to the end of a request's header


class RequestRefused(Exception):
    """A request that is refused with an HTTP status and the reason."""

    def __init__(self, status: int, detail: str, **fields: int) -> None:
        super().__init__(detail)
        self.status, self.body = status, {"detail": detail, **fields}


class Service:
    """Process the bodies of requests, independent of the HTTP framework."""

    def __init__(self, encoder: Encoder, max_bytes: int, max_batch: int) -> None:
        self.encoder, self.max_batch = encoder, max_batch
        self.fingerprint = fingerprint(encoder)
        self.offers = encoder.offers & REMOTE_OFFERS
        self.info = {
            "name": Path(encoder.name).name,  # without the server's folders
            "dim": encoder.dim,
            "scale": encoder.scale,
            "offers": sorted(self.offers),
            "fingerprint": self.fingerprint,
            "preprocess": encoder.identity.get("preprocess", ""),
            "max_batch": max_batch,
            "max_bytes": max_bytes,
        }
        self._decoding = threading.Semaphore(MAX_DECODES)
        self._encoder_lock = threading.Lock()  # encoders need not be thread-safe

    def embed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        images = self._list(body, "images")
        patches = body.get("patches", False)
        if not isinstance(patches, bool):
            raise RequestRefused(422, "patches must be true or false")
        if patches and "patches" not in self.offers:
            raise RequestRefused(422, "this encoder has no patch embeddings")
        batch = [self._prepare(index, image) for index, image in enumerate(images)]
        with self._encoder_lock:
            vectors = self.encoder.embed(batch, patches)
        spread = None if vectors.patches is None else encode_array(vectors.patches)
        return {
            "fingerprint": self.fingerprint,
            "pooled": encode_array(np.asarray(vectors.pooled, np.float32)),
            "patches": spread,
        }

    def text(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if "text" not in self.offers:
            raise RequestRefused(404, "this encoder has no text")
        sentences = self._list(body, "sentences")
        try:
            with self._encoder_lock:
                vectors = self.encoder.embed_text(sentences)
        except SettingsError as error:
            raise RequestRefused(422, str(error)) from error
        return {"fingerprint": self.fingerprint, "pooled": encode_array(vectors.numpy()), "patches": None}

    def _list(self, body: Mapping[str, Any], key: str) -> list[str]:
        values = body.get(key) if isinstance(body, dict) else None
        if not isinstance(values, list) or not values or any(type(v) is not str for v in values):
            raise RequestRefused(422, f"the body must be a JSON object with a list of strings {key!r}")
        if len(values) > self.max_batch:
            raise RequestRefused(413, f"{len(values)} {key} in one request; send at most {self.max_batch}")
        return values

    def _prepare(self, index: int, image: str) -> Any:
        from fedvlm.encoders.images import decode

        try:
            data = b64decode(image, validate=True)
        except ValueError as error:
            raise RequestRefused(422, f"image {index} is not base64", index=index) from error
        if self.encoder.preprocess is None:
            return data
        try:
            with self._decoding:
                return self.encoder.preprocess(decode(data))
        except DataError as error:
            raise RequestRefused(422, f"image {index}: {error}", index=index) from error


def create_app(
    encoder: Encoder,
    token: str | None,
    max_bytes: int = MAX_BYTES,
    max_batch: int = MAX_BATCH,
) -> Any:
    """Create the ASGI application; with a token, every request must send it."""
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse
        from starlette.concurrency import run_in_threadpool
    except ImportError as error:
        raise EncoderError("fastapi is not installed; pip install 'fedvlm[serve]'") from error

    service = Service(encoder, max_bytes, max_batch)
    server = FastAPI(title="fedvlm encoder", openapi_url=None)
    room = asyncio.Semaphore(MAX_REQUESTS)

    async def answer(request: Request, work: Callable[[Mapping[str, Any]], dict[str, Any]] | None) -> JSONResponse:
        began, size, status, count = time.perf_counter(), 0, 200, 0
        try:
            _check_token(token, request.headers.get("authorization", ""))
            content: dict[str, Any] = service.info
            if work is not None:
                async with room:
                    raw = await _body(request, max_bytes)
                    size = len(raw)
                    content = await run_in_threadpool(lambda: work(_parse(raw)))
                count = content["pooled"]["shape"][0]
        except RequestRefused as refusal:
            status, content = refusal.status, refusal.body
        except Exception:  # details stay in the server's log
            LOG.exception("the encoder failed")
            status, content = 500, {"detail": "the encoder failed; see the server's log"}
        spent = time.perf_counter() - began
        LOG.info(
            "%s rows=%d bytes=%d seconds=%.3f status=%d",
            request.url.path,
            count,
            size,
            spent,
            status,
        )
        return JSONResponse(content, status)

    @server.get("/info")
    async def info(request: Request) -> JSONResponse:
        return await answer(request, None)

    @server.post("/embed")
    async def embed(request: Request) -> JSONResponse:
        return await answer(request, service.embed)

    @server.post("/text")
    async def text(request: Request) -> JSONResponse:
        return await answer(request, service.text)

    return server


def _check_token(token: str | None, header: str) -> None:
    sent_token = header.removeprefix("Bearer ").encode()
    if token is not None and not hmac.compare_digest(sent_token, token.encode()):
        raise RequestRefused(401, "the token is missing or wrong")


async def _body(request: Any, max_bytes: int) -> bytearray:
    """Read a body within its limits of bytes and of time."""
    raw = bytearray()
    if int(request.headers.get("content-length") or 0) > max_bytes:
        raise RequestRefused(413, f"a request may have {max_bytes:,} bytes; send fewer images")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > max_bytes:
                    raise RequestRefused(413, f"a request may have {max_bytes:,} bytes")
    except TimeoutError as error:
        raise RequestRefused(408, f"the body took longer than {BODY_SECONDS:g} seconds") from error
    return raw


def _parse(raw: bytearray) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(422, "the body is not JSON") from error


def serve(
    encoder: Encoder,
    host: str = "127.0.0.1",
    port: int = 8765,
    token_file: str | Path | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until interrupted; `ready` is called with the URL."""
    if token_file is None and not is_loopback(host):
        raise SettingsError(f"{host} can be reached from other machines; name a token_file, or listen on 127.0.0.1")
    if (tls_cert is None) != (tls_key is None):
        raise SettingsError("TLS takes a certificate and its key; name both tls_cert and tls_key")
    for file in (tls_cert, tls_key):
        if file is not None and not Path(file).is_file():
            raise SettingsError(f"there is no TLS file {file}; correct the path")
    made = create_app(encoder, read_token(token_file) if token_file else None)
    import uvicorn

    config = uvicorn.Config(
        made,
        http=limit_connections(),
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=3,  # an idle client must not keep the server from stopping
        ssl_certfile=tls_cert,
        ssl_keyfile=str(tls_key) if tls_key else None,
    )
    try:
        config.load()
    except OSError as error:  # also errors of the ssl module
        raise SettingsError(f"{tls_cert} and {tls_key} are no TLS pair ({error})") from error
    with open_socket(host, port) as listener:
        if ready is not None:
            url_host = f"[{host}]" if ":" in host else host
            ready(f"{'https' if tls_cert else 'http'}://{url_host}:{listener.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listener])


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_socket(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise SettingsError(f"cannot listen on {host} port {port} ({error}); choose another host or port") from error


def limit_connections(max_connections: int = MAX_CONNECTIONS, header_seconds: float = HEADER_SECONDS) -> type[Any]:
    """Return uvicorn's HTTP protocol with a limit on idle connections and on the time a header may take."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class LimitedProtocol(H11Protocol):
        idle_timer: asyncio.TimerHandle | None = None  # runs while no request is being answered

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.update_timer()
            if len(self.connections) > max_connections:
                limited = [connection for connection in self.connections if isinstance(connection, LimitedProtocol)]
                idle = [(connection.idle_timer.when(), connection) for connection in limited if connection.idle_timer]
                # the longest idle connection; if all others are busy, that is the new one
                min(idle, key=lambda pair: pair[0])[1].abort_connection()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.update_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self.cancel_timer()
            super().connection_lost(exc)

        def abort_connection(self) -> None:
            self.cancel_timer()
            self.connections.discard(self)
            self.transport.abort()

        def update_timer(self) -> None:
            """Between two requests uvicorn's own limit applies, until the first byte of the second."""
            if self.cycle is not None and not self.cycle.response_complete:
                self.cancel_timer()
            elif self.idle_timer is None and not self.transport.is_closing():
                self.idle_timer = self.loop.call_later(header_seconds, self.abort_connection)

        def cancel_timer(self) -> None:
            if self.idle_timer is not None:
                self.idle_timer.cancel()
                self.idle_timer = None

    return LimitedProtocol
