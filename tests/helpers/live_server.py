"""Real servers on free ports of this machine, and what they serve."""

import io
import threading
import time
from contextlib import contextmanager

import numpy as np
import uvicorn
from PIL import Image

from fedvlm.encoders import Vectors

QUICK = {"wait": 0.01, "timeout": 5.0}


def image(seed=0, size=(20, 14)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


class Fake:
    """An encoder whose vectors a test decides."""

    name, dim, scale, preprocess = "fake:/secret/place/model", 3, 50.0, None
    offers = frozenset({"image", "patches", "text tower"})

    def __init__(self, answer=None):
        self.identity = {"weights": "one"}
        self.calls = []
        self.answer = answer or (lambda batch, call: np.ones((len(batch), 3), np.float32))

    def embed(self, batch, patches):
        self.calls.append(len(batch))
        pooled = self.answer(batch, len(self.calls))
        return Vectors(pooled, np.zeros((len(batch), 2, 3), np.float16) if patches else None)

    def embed_text(self, sentences):
        raise AssertionError("not offered")


class Moody:
    """Answers the first requests for a path itself, then lets them through."""

    def __init__(self, inner, path, status, times, headers=()):
        self.inner, self.path, self.status, self.left = inner, path, status, times
        self.headers, self.at = list(headers), []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == self.path:
            self.at.append(time.monotonic())
            if self.left > 0:
                self.left -= 1
                start = {"type": "http.response.start", "status": self.status}
                await send({**start, "headers": self.headers})
                await send({"type": "http.response.body", "body": b"{}"})
                return
        await self.inner(scope, receive, send)


@contextmanager
def running(served, **settings):
    """A real uvicorn server on a free port of this machine."""
    config = uvicorn.Config(served, port=0, log_config=None, ws="none", lifespan="off", **settings)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"{'https' if 'ssl_certfile' in settings else 'http'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
