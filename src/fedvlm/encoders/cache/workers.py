"""Decoding in processes of its own, ahead of the encoder, in the order asked for."""

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from hashlib import sha256
from multiprocessing import current_process, get_context, parent_process
from types import TracebackType
from typing import Any, NamedTuple

from numpy.typing import NDArray

from fedvlm.encoders.cache.decode import decode
from fedvlm.encoders.interface import Preprocess
from fedvlm.errors import DataError


class Prepared(NamedTuple):
    """An image as the encoder takes it, or the reason why there is none."""

    digest: bytes
    image: NDArray[Any] | bytes | None
    reason: str = ""


class DecoderPool:
    def __init__(self, preprocess: Preprocess | None, workers: int, prefetch: int) -> None:
        self._preprocess, self._prefetch = preprocess, prefetch if workers else 0
        self._inline_images = prefetch // 2  # the first images are decoded here, while the workers start
        # never "fork": a process with an encoder's threads in it cannot be copied safely
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imports once for all workers
        self._pool = workers and ProcessPoolExecutor(workers, context, initializer=_start, initargs=(preprocess,))

    def __enter__(self) -> "DecoderPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def stream(self, images: Iterable[tuple[bytes, bytes]]) -> Iterator[Prepared]:
        """(digest, encoded bytes) in, the same order out; asks for images `ahead` of time."""
        waiting: deque[tuple[bytes, bytes, Future[NDArray[Any] | str | None]]] = deque()
        for digest, data in images:
            waiting.append((digest, data, self._submit(digest, data)))
            if len(waiting) > self._prefetch:
                yield _finish(*waiting.popleft())
        while waiting:
            yield _finish(*waiting.popleft())

    def _submit(self, digest: bytes, data: bytes) -> "Future[NDArray[Any] | str | None]":
        if self._pool and not self._inline_images:
            try:
                return self._pool.submit(_work, digest, data)
            except BrokenProcessPool as error:
                raise _worker_died() from error
        self._inline_images = max(0, self._inline_images - 1)
        now: Future[NDArray[Any] | str | None] = Future()
        now.set_result(prepare(self._preprocess, digest, data))
        return now


def prepare(preprocess: Preprocess | None, digest: bytes, data: bytes) -> NDArray[Any] | str | None:
    """The array an encoder takes, None if it takes the bytes themselves, or what is wrong."""
    if sha256(data).digest() != digest:
        return "the image changed while it was being read; run again"
    try:
        image = decode(data)
    except DataError as error:
        return str(error)
    if preprocess is None:
        return None
    try:
        return preprocess(image)
    except Exception as error:  # whatever an encoder's own code makes of an odd image
        return f"the encoder cannot prepare it ({type(error).__name__}: {error})"


def _finish(digest: bytes, data: bytes, future: "Future[NDArray[Any] | str | None]") -> Prepared:
    try:
        result = future.result()
    except BrokenProcessPool as error:
        raise _worker_died() from error
    if isinstance(result, str):
        return Prepared(digest, None, result)
    return Prepared(digest, data if result is None else result)


def _worker_died() -> DataError:
    return DataError(
        "a decoding process died: too little memory, or a script without "
        '`if __name__ == "__main__":`; mend that or use workers=0'
    )


def check_main_guard() -> None:
    """A new worker runs the main script once more; it must not wait there for its own parent."""
    if getattr(current_process(), "_inheriting", False):
        raise DataError(
            "embedding starts processes which run this script again; "
            'put what it does under `if __name__ == "__main__":`'
        )


_worker_preprocess: Preprocess | None = None  # of this worker process, sent once and not with every image


def _start(preprocess: Preprocess | None) -> None:
    global _worker_preprocess
    _worker_preprocess = preprocess
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and stops its workers
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the other cores belong to the encoder
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """A worker waits for work for ever, also when its parent was killed and none will come."""
    parent = parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _work(digest: bytes, data: bytes) -> NDArray[Any] | str | None:
    return prepare(_worker_preprocess, digest, data)
