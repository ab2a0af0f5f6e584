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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvlm.encoders import Encoder, Vectors, fingerprint
from fedvlm.encoders.http import REMOTE_OFFERS, encode_array, read_token
from fedvlm.errors import DataError, EncoderError, SettingsError
from fedvlm.plugins import require

if TYPE_CHECKING:
    from fastapi import FastAPI

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

    def __init__(
        self,
        encoder: Encoder,
        max_bytes: int,
        max_batch: int,
        convert: Callable[[bytes], bytes] = lambda data: data,  # of an image before it is decoded
    ) -> None:
        self.encoder, self.max_batch, self.convert = encoder, max_batch, convert
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
        images = self.read_strings(body, "images")
        patches = body.get("patches", False)
        if not isinstance(patches, bool):
            raise RequestRefused(422, "patches must be true or false")
        if patches and "patches" not in self.offers:
            raise RequestRefused(422, "this encoder has no patch embeddings")
        vectors = self.embed_images(images, patches)
        spread = None if vectors.patches is None else encode_array(vectors.patches)
        pooled = encode_array(np.asarray(vectors.pooled, np.float32))
        return {"fingerprint": self.fingerprint, "pooled": pooled, "patches": spread}

    def embed_images(self, images: Sequence[str], patches: bool) -> Vectors:
        """Embed images in base64."""
        batch = self.prepare_images(images)
        with self._encoder_lock:
            return self.encoder.embed(batch, patches)

    def text(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if "text" not in self.offers:
            raise RequestRefused(404, "this encoder has no text")
        sentences = self.read_strings(body, "sentences")
        try:
            with self._encoder_lock:
                vectors = self.encoder.embed_text(sentences)
        except SettingsError as error:
            raise RequestRefused(422, str(error)) from error
        return {"fingerprint": self.fingerprint, "pooled": encode_array(vectors.numpy()), "patches": None}

    def read_strings(self, body: Mapping[str, Any], key: str) -> list[str]:
        values = body.get(key) if isinstance(body, dict) else None
        if not isinstance(values, list) or not values or any(type(v) is not str for v in values):
            raise RequestRefused(422, f"the body must be a JSON object with a list of strings {key!r}")
        if len(values) > self.max_batch:
            raise RequestRefused(413, f"{len(values)} {key} in one request; send at most {self.max_batch}")
        return values

    def prepare_images(self, images: Sequence[str]) -> list[Any]:
        """Decode images in base64 for the encoder; refuse one that cannot be decoded by its index."""
        return [self._prepare(index, image) for index, image in enumerate(images)]

    def _prepare(self, index: int, image: str) -> Any:
        from fedvlm.encoders.images import decode

        try:
            data = b64decode(image, validate=True)
        except ValueError as error:
            raise RequestRefused(422, f"image {index} is not base64", index=index) from error
        try:
            with self._decoding:
                data = self.convert(data)
                return data if self.encoder.preprocess is None else self.encoder.preprocess(decode(data))
        except DataError as error:
            raise RequestRefused(422, f"image {index}: {error}", index=index) from error


class Gateway:
    """Check the token and the limits of every request, log it, and reply with JSON."""

    def __init__(self, token: str | None, max_bytes: int) -> None:
        self.token, self.max_bytes = token, max_bytes
        self.room = asyncio.Semaphore(MAX_REQUESTS)
        self.n_requests: Counter[int] = Counter()  # by status
        self.seconds = 0.0

    async def reply(self, request: Any, work: Callable[[Any], tuple[dict[str, Any], int]] | None) -> Any:
        """Reply with what `work` makes of the body, and its number of samples; without `work` only check the token."""
        from fastapi.responses import JSONResponse
        from starlette.concurrency import run_in_threadpool

        began, size, status, count = time.perf_counter(), 0, 200, 0
        content: dict[str, Any] = {}
        try:
            _check_token(self.token, request.headers.get("authorization", ""))
            if work is not None:
                async with self.room:
                    raw = await _body(request, self.max_bytes)
                    size = len(raw)
                    content, count = await run_in_threadpool(lambda: work(_parse(raw)))
        except RequestRefused as refusal:
            status, content = refusal.status, refusal.body
        except Exception:  # details stay in the server's log
            LOG.exception("the request failed")
            status, content = 500, {"detail": "the server failed; see its log"}
        spent = time.perf_counter() - began
        self.n_requests[status] += 1
        self.seconds += spent
        LOG.info("%s rows=%d bytes=%d seconds=%.3f status=%d", request.url.path, count, size, spent, status)
        return JSONResponse(content, status)


def new_application(title: str, **options: Any) -> "FastAPI":
    """Return an empty FastAPI application."""
    module = require("fastapi", "fastapi is not installed", "serve", EncoderError)
    application: FastAPI = module.FastAPI(title=title, **options)
    return application


def create_app(encoder: Encoder, token: str | None, max_bytes: int = MAX_BYTES, max_batch: int = MAX_BATCH) -> Any:
    """Create the ASGI application; with a token, every request must send it."""
    server = new_application("fedvlm encoder", openapi_url=None)
    from fastapi import Request

    service, gateway = Service(encoder, max_bytes, max_batch), Gateway(token, max_bytes)

    @server.get("/info")
    async def info(request: Request) -> Any:
        reply = await gateway.reply(request, None)
        return service.info if reply.status_code == 200 else reply

    @server.post("/embed")
    async def embed(request: Request) -> Any:
        return await gateway.reply(request, lambda body: _counted(service.embed(body)))

    @server.post("/text")
    async def text(request: Request) -> Any:
        return await gateway.reply(request, lambda body: _counted(service.text(body)))

    return server


def _counted(content: dict[str, Any]) -> tuple[dict[str, Any], int]:
    return content, content["pooled"]["shape"][0]


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
    create: Callable[[str | None], Any],
    host: str = "127.0.0.1",
    port: int = 8765,
    token_file: str | Path | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the application that `create` makes for a token until interrupted; `ready` is called with the URL."""
    if token_file is None and not is_loopback(host):
        raise SettingsError(f"{host} can be reached from other machines; name a token_file, or listen on 127.0.0.1")
    if (tls_cert is None) != (tls_key is None):
        raise SettingsError("TLS takes a certificate and its key; name both tls_cert and tls_key")
    for file in (tls_cert, tls_key):
        if file is not None and not Path(file).is_file():
            raise SettingsError(f"there is no TLS file {file}; correct the path")
    made = create(read_token(token_file) if token_file else None)
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
