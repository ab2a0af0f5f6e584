"""The client of an encoder server: images are sent as they are, embeddings come back.

POST /embed takes {"images": [base64 of a file, ...], "patches": false}, POST /text takes {"sentences": [...]}; both
return {"fingerprint": ..., "pooled": array, "patches": array or null}. An array is {"dtype": "float32", "shape": [...],
"data": base64 of little-endian values}. GET /info returns name, dim, scale, offers, fingerprint, preprocess, max_batch
and max_bytes.
"""

import os
import random
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from fedvlm.encoders import Vectors
from fedvlm.errors import EncoderError, SettingsError
from fedvlm.plugins import require

TOKEN_VARIABLE = "FEDVLM_ENCODER_TOKEN"
MAX_REPLY_SECONDS = 600.0  # for a complete reply, however slowly it arrives
MAX_DIM = 1 << 16  # of an embedding; known ones have at most a few thousand
MAX_PATCHES = 1 << 14
MAX_REPLY_BYTES = 1 << 30
MAX_WAIT_SECONDS = 60.0  # between two attempts, whatever the server asks for


class Http:
    """The client of `fedvlm serve-encoder`, or of any server with the same interface.

    `drift` is how far the same image's two embeddings were apart; None before the first batch.
    """

    preprocess = None  # the server takes the encoded bytes themselves
    max_seconds = MAX_REPLY_SECONDS
    warn: Callable[[str], None] | None = None

    def __init__(
        self,
        url: str,
        *,
        token_file: str | Path | None = None,
        ca_file: str | Path | None = None,
        timeout: float = 60.0,
        retries: int = 5,
        wait: float = 0.5,  # seconds before the first retry; doubles with every retry
        tolerance: float = 1e-3,
    ) -> None:
        self.url = url.rstrip("/")
        self.name = f"http:{self.url}"
        self.drift: float | None = None
        self._retries, self._wait, self._tolerance = retries, wait, tolerance
        self._client = _client(self.url, token_file, ca_file, timeout)
        finalize(self, self._client.close)
        info = self._request("GET", "/info")
        try:
            self.dim, self.scale = int(info["dim"]), float(info["scale"])
            if not 0 < self.dim <= MAX_DIM:
                raise ValueError(f"dim = {self.dim}")
            self.offers = frozenset(info["offers"]) & REMOTE_OFFERS
            self._max_batch, self._max_bytes = int(info["max_batch"]), int(info["max_bytes"])
            self.identity = {"kind": "http", "server": str(info["fingerprint"])}
        except (KeyError, TypeError, ValueError) as error:
            problem = f"is not the reply of an encoder server ({error!r})"
            raise EncoderError(f"{self.url}/info {problem}; check the URL") from error
        if "image" not in self.offers:
            raise EncoderError(f"{self.url} offers no image embeddings; use another server")

    def embed(self, batch: Sequence[NDArray[Any]] | Sequence[bytes], patches: bool) -> Vectors:
        if patches and "patches" not in self.offers:
            raise EncoderError(f"{self.name} has no patch embeddings; use an hf: encoder")
        files = [bytes(image) for image in batch]
        parts = [self._embed(part, patches) for part in self._parts(files)]
        if self.drift is None and files:
            self._probe(files[0], parts[0].pooled[0])
        spread = [part.patches for part in parts if part.patches is not None]
        return Vectors(np.concatenate([part.pooled for part in parts]), np.concatenate(spread) if patches else None)

    def embed_text(self, sentences: Sequence[str]) -> Tensor:
        if "text" not in self.offers:
            raise EncoderError(f"{self.name} has no text; its server offers images only")
        max_bytes = max_reply_bytes(len(sentences), self.dim)
        answer = self._request("POST", "/text", {"sentences": list(sentences)}, max_bytes)
        vectors = self._array(answer, "pooled", len(sentences), 2)
        return normalize(torch.from_numpy(vectors.astype(np.float32)), dim=-1)

    def _parts(self, files: list[bytes]) -> Iterator[list[bytes]]:
        """Split images into requests that the server accepts."""
        part: list[bytes] = []
        used, room = 0, self._max_bytes - 1000  # for the braces around the images
        for file in files:
            size = 4 * len(file) // 3 + 10
            if size > room:
                limit = f"{self.url} accepts ({self._max_bytes:,} per request)"
                raise EncoderError(f"an image of {len(file):,} bytes is more than {limit}; scale it down first")
            if part and (used + size > room or len(part) == self._max_batch):
                yield part
                part, used = [], 0
            part.append(file)
            used += size
        if part:
            yield part

    def _embed(self, files: list[bytes], patches: bool) -> Vectors:
        images = [b64encode(file).decode() for file in files]
        max_bytes = max_reply_bytes(len(files), self.dim, patches)
        answer = self._request("POST", "/embed", {"images": images, "patches": patches}, max_bytes)
        pooled = self._array(answer, "pooled", len(files), 2).astype(np.float32)
        if not patches:
            return Vectors(pooled, None)
        return Vectors(pooled, self._array(answer, "patches", len(files), 3).astype(np.float16))

    def _probe(self, file: bytes, first: NDArray[np.float32]) -> None:
        """Embed the same image again to measure the drift; the first vector is used."""
        again = self._embed([file], patches=False).pooled[0]
        first_unit, second_unit = (value / max(float(np.linalg.norm(value)), 1e-12) for value in (first, again))
        self.drift = float(np.abs(first_unit - second_unit).max())
        if self.drift > self._tolerance and self.warn is not None:
            result = f"two embeddings of the same image that differ by {self.drift:.2g}"
            self.warn(f"{self.name} returned {result}; the first is used, and the run cannot be reproduced exactly")

    def _array(self, answer: dict[str, Any], key: str, rows: int, axes: int) -> NDArray[Any]:
        if answer.get("fingerprint") != self.identity["server"]:
            raise EncoderError(f"the encoder behind {self.url} was changed while it was in use; run again")
        try:
            values = decode_array(answer[key])
        except (KeyError, TypeError, ValueError) as error:
            raise EncoderError(f"{self.url} returned no array {key!r} ({error!r}); tell the server's owner") from error
        if values.ndim != axes or len(values) != rows or values.shape[-1] != self.dim:
            problem = f"{self.url} returned {key} of {values.shape} for {rows} rows"
            raise EncoderError(f"{problem}; its vectors must have length {self.dim}: report it to the server's owner")
        good = np.isfinite(values).all(axis=tuple(range(1, axes)))
        if not good.all():
            row = int(np.flatnonzero(~good)[0])
            raise EncoderError(f"{self.url} returned NaN or infinity in {key} of row {row} of {rows}; report it")
        return values

    def _request(
        self, verb: str, path: str, body: dict[str, Any] | None = None, max_bytes: int = 1 << 16
    ) -> dict[str, Any]:
        """Send a request; retry temporary errors (429, 5xx, no reply) with exponential backoff."""
        import httpx

        problem = ""
        for attempt in range(self._retries + 1):
            retry_after = None
            try:
                answer = self._read_response(verb, path, body, max_bytes)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                if "CERTIFICATE_VERIFY" in problem:
                    reason = f"the certificate of {self.url} is not trusted ({error})"
                    raise EncoderError(f"{reason}; name its issuer in ca_file") from error
            else:
                if answer.status_code == 200:
                    return self._object(answer)
                problem = f"{answer.status_code} {_detail(answer)}"
                if answer.status_code in (401, 403):
                    raise EncoderError(f"{self.url} refuses the token ({problem}); set {TOKEN_VARIABLE} or token_file")
                if answer.status_code != 429 and answer.status_code < 500:
                    raise EncoderError(f"{self.url}{path} refuses the request: {problem}")
                retry_after = _retry_after(answer.headers.get("retry-after"))
            if attempt < self._retries:
                backoff = self._wait * 2**attempt * random.uniform(0.5, 1.0)
                time.sleep(min(max(backoff, retry_after or 0.0), MAX_WAIT_SECONDS))
        remedy = "check the URL and whether the server runs, then run again: finished embeddings are cached"
        raise EncoderError(f"{self.url}{path} failed {self._retries + 1} times ({problem}); {remedy}")

    def _read_response(self, verb: str, path: str, body: dict[str, Any] | None, max_bytes: int) -> Any:
        """Read one complete reply within its limits of bytes and of time."""
        import httpx

        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            self._client.close()  # ends also a reply whose header never completes

        timer = threading.Timer(self.max_seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            with self._client.stream(verb, path, json=body) as answer:
                if coding := answer.headers.get("content-encoding"):
                    problem = f"{self.url}{path} returned a compressed reply ({coding}), which was not requested"
                    raise EncoderError(f"{problem}; switch that off at the server or the proxy before it")
                raw = bytearray()
                for part in answer.iter_raw():
                    raw += part
                    if len(raw) > max_bytes:
                        raise EncoderError(f"{self.url}{path} returned more than {max_bytes:,} bytes; report it")
                return httpx.Response(answer.status_code, headers=answer.headers, content=bytes(raw))
        except (httpx.TransportError, RuntimeError) as error:
            if timed_out.is_set():
                limit = f"{self.max_seconds:g} seconds for one reply"
                raise EncoderError(f"{self.url}{path} took longer than {limit}; tell the server's owner") from error
            raise
        finally:
            timer.cancel()

    def _object(self, answer: Any) -> dict[str, Any]:
        try:
            value = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise EncoderError(f"{self.url} does not return JSON objects; check the URL")
        return value


def max_reply_bytes(rows: int, dim: int, patches: bool = False) -> int:
    """Return the largest size of a valid reply: float32 in base64, and MAX_PATCHES patches."""
    bytes_per_value = 6 + (3 * MAX_PATCHES if patches else 0)
    return min((1 << 16) + rows * dim * bytes_per_value, MAX_REPLY_BYTES)


def _client(url: str, token_file: str | Path | None, ca_file: str | Path | None, timeout: float) -> Any:
    httpx = require("httpx", "httpx is not installed", "http", EncoderError)
    token = read_token(token_file) if token_file else os.environ.get(TOKEN_VARIABLE, "")
    # the size of a compressed reply is not known before it is unpacked
    headers = {"Accept-Encoding": "identity"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    try:
        verify = ssl.create_default_context(cafile=ca_file) if ca_file else True
        # A proxy would read the token of a plain call; TLS goes through it unread.
        is_encrypted = url.startswith("https:")
        return httpx.Client(base_url=url, headers=headers, timeout=timeout, verify=verify, trust_env=is_encrypted)
    except (OSError, ValueError, httpx.InvalidURL) as error:
        raise EncoderError(f"{url} cannot be used ({error}); check the URL and ca_file") from error


def _detail(answer: Any) -> str:
    try:
        return str(answer.json()["detail"])[:300]
    except (ValueError, KeyError, TypeError):
        return str(answer.reason_phrase)


def _retry_after(value: str | None) -> float | None:
    """Parse a Retry-After header, a number of seconds or a date."""
    if value is None:
        return None
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(value).timestamp() - time.time()
    except ValueError:
        return None


DTYPES = {"float32": "<f4", "float16": "<f2"}
REMOTE_OFFERS = frozenset({"image", "text", "patches"})  # never weights or gradients


def encode_array(values: NDArray[Any]) -> dict[str, Any]:
    dtype = values.dtype.name
    data = b64encode(np.ascontiguousarray(values, DTYPES[dtype]).tobytes()).decode()
    return {"dtype": dtype, "shape": list(values.shape), "data": data}


def decode_array(array: Any) -> NDArray[Any]:
    """Decode an array of `encode_array`; raise ValueError, KeyError or TypeError for anything else."""
    data = b64decode(array["data"], validate=True)
    return np.frombuffer(data, DTYPES[array["dtype"]]).reshape(array["shape"])


def read_token(file: str | Path) -> str:
    try:
        token = Path(file).expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the token file {file} cannot be read ({error}); correct it") from error
    if not token or not token.isascii() or not token.isprintable():
        raise SettingsError(f"the token file {file} must hold one line of visible ASCII; write one")
    return token
