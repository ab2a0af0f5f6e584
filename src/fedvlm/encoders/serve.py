"""The encoder as a service: images or sentences in, embeddings out, and nothing else.

Weights and gradients have no way out; images are neither kept nor logged.
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

from fedvlm.encoders import fingerprint
from fedvlm.encoders.arrays import OFFERS, pack, read_token
from fedvlm.encoders.interface import Encoder
from fedvlm.errors import DataError, EncoderError, SettingsError

LOG = logging.getLogger("fedvlm.serve")
MAX_BYTES = 64_000_000  # of one request
MAX_BATCH = 256  # images or sentences in one request
DECODES = 2  # images at once: a small file may claim 64 megapixels, half a gigabyte each
REQUESTS = 8  # bodies in memory at once; others wait unread
BODY_SECONDS = 60.0  # for all of a body


class Refused(Exception):
    """A request that is answered with a status and the reason."""

    def __init__(self, status: int, detail: str, **more: int) -> None:
        super().__init__(detail)
        self.status, self.body = status, {"detail": detail, **more}


class Service:
    """What the server does with a request's body; knows nothing of HTTP but the status."""

    def __init__(self, encoder: Encoder, max_bytes: int, max_batch: int) -> None:
        self.encoder, self.max_batch = encoder, max_batch
        self.fingerprint = fingerprint(encoder)
        self.offers = encoder.offers & OFFERS
        self.info = {
            "name": Path(encoder.name).name,  # where the model lies is nobody's business
            "dim": encoder.dim,
            "scale": encoder.scale,
            "offers": sorted(self.offers),
            "fingerprint": self.fingerprint,
            "preprocess": encoder.identity.get("preprocess", ""),
            "max_batch": max_batch,
            "max_bytes": max_bytes,
        }
        self._decoding = threading.Semaphore(DECODES)
        self._one = threading.Lock()  # encoders are not promised to be safe for many threads

    def embed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        images = self._list(body, "images")
        patches = body.get("patches", False)
        if not isinstance(patches, bool):
            raise Refused(422, "patches must be true or false")
        if patches and "patches" not in self.offers:
            raise Refused(422, "this encoder has no patch embeddings")
        batch = [self._prepare(index, one) for index, one in enumerate(images)]
        with self._one:
            vectors = self.encoder.embed(batch, patches)
        spread = None if vectors.patches is None else pack(vectors.patches)
        return {
            "fingerprint": self.fingerprint,
            "pooled": pack(np.asarray(vectors.pooled, np.float32)),
            "patches": spread,
        }

    def text(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if "text" not in self.offers:
            raise Refused(404, "this encoder has no text")
        sentences = self._list(body, "sentences")
        try:
            with self._one:
                vectors = self.encoder.embed_text(sentences)
        except SettingsError as error:
            raise Refused(422, str(error)) from error
        return {"fingerprint": self.fingerprint, "pooled": pack(vectors.numpy()), "patches": None}

    def _list(self, body: Mapping[str, Any], key: str) -> list[str]:
        values = body.get(key) if isinstance(body, dict) else None
        if not isinstance(values, list) or not values or any(type(v) is not str for v in values):
            raise Refused(422, f"the body must be a JSON object with a list of strings {key!r}")
        if len(values) > self.max_batch:
            raise Refused(413, f"{len(values)} {key} in one request; send at most {self.max_batch}")
        return values

    def _prepare(self, index: int, image: str) -> Any:
        from fedvlm.encoders.cache.decode import decode

        try:
            data = b64decode(image, validate=True)
        except ValueError as error:
            raise Refused(422, f"image {index} is not base64", index=index) from error
        if self.encoder.preprocess is None:
            return data
        try:
            with self._decoding:
                return self.encoder.preprocess(decode(data))
        except DataError as error:
            raise Refused(422, f"image {index}: {error}", index=index) from error


def app(
    encoder: Encoder,
    token: str | None,
    max_bytes: int = MAX_BYTES,
    max_batch: int = MAX_BATCH,
) -> Any:
    """The ASGI application; with a token, every request has to bring it."""
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse
        from starlette.concurrency import run_in_threadpool
    except ImportError as error:
        raise EncoderError("fastapi is not installed; pip install 'fedvlm[serve]'") from error

    service = Service(encoder, max_bytes, max_batch)
    server = FastAPI(title="fedvlm encoder", openapi_url=None)
    room = asyncio.Semaphore(REQUESTS)

    async def answer(
        request: Request, work: Callable[[Mapping[str, Any]], dict[str, Any]] | None
    ) -> JSONResponse:
        began, size, status, count = time.perf_counter(), 0, 200, 0
        try:
            _admit(token, request.headers.get("authorization", ""))
            content: dict[str, Any] = service.info
            if work is not None:
                async with room:
                    raw = await _body(request, max_bytes)
                    size = len(raw)
                    content = await run_in_threadpool(lambda: work(_parse(raw)))
                count = content["pooled"]["shape"][0]
        except Refused as refusal:
            status, content = refusal.status, refusal.body
        except Exception:  # whatever it is, it is the encoder's and not the asker's business
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


def _admit(token: str | None, header: str) -> None:
    given = header.removeprefix("Bearer ").encode()
    if token is not None and not hmac.compare_digest(given, token.encode()):
        raise Refused(401, "the token is missing or wrong")


async def _body(request: Any, most: int) -> bytearray:
    """All of a body, if it is small enough and comes soon enough."""
    raw = bytearray()
    if int(request.headers.get("content-length") or 0) > most:
        raise Refused(413, f"a request may have {most:,} bytes; send fewer images")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > most:
                    raise Refused(413, f"a request may have {most:,} bytes")
    except TimeoutError as error:
        raise Refused(408, f"the body took longer than {BODY_SECONDS:g} seconds") from error
    return raw


def _parse(raw: bytearray) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(422, "the body is not JSON") from error


def serve(
    encoder: Encoder,
    host: str = "127.0.0.1",
    port: int = 8765,
    token_file: str | Path | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serves until it is interrupted; `ready` is told the URL."""
    if token_file is None and not loopback(host):
        raise SettingsError(
            f"{host} can be reached from other machines; name a token_file, or listen on 127.0.0.1"
        )
    if (tls_cert is None) != (tls_key is None):
        raise SettingsError("TLS takes a certificate and its key; name both tls_cert and tls_key")
    for file in (tls_cert, tls_key):
        if file is not None and not Path(file).is_file():
            raise SettingsError(f"there is no TLS file {file}; correct the path")
    made = app(encoder, read_token(token_file) if token_file else None)
    import uvicorn

    from fedvlm.encoders.door import Door

    config = uvicorn.Config(
        made,
        http=Door,
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=3,  # an idle client must not keep the server from stopping
        ssl_certfile=tls_cert,
        ssl_keyfile=str(tls_key) if tls_key else None,
    )
    try:
        config.load()
    except OSError as error:  # the ssl module's errors are of this kind
        raise SettingsError(f"{tls_cert} and {tls_key} are no TLS pair ({error})") from error
    with listening(host, port) as heard:
        if ready is not None:
            shown = f"[{host}]" if ":" in host else host
            ready(f"{'https' if tls_cert else 'http'}://{shown}:{heard.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[heard])


def loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"cannot listen on {host} port {port} ({error}); choose another host or port"
        ) from error
