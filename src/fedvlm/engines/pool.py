"""Worker processes of one thread each, fed with chunks over pipes.

They are forked, so they have the world (also a method written in a notebook) without a copy and
start in milliseconds. That is safe here as in torch's own data loaders: a child of one thread
never enters the parent's thread pools.
"""

import signal
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedvlm.core import Tensors
from fedvlm.engines.client import Done, Task, World
from fedvlm.errors import FederationError, FedVLMError


class Pool:
    def __init__(self, world: World, workers: int) -> None:
        context = get_context("fork")
        self.connections: list[Connection[Any, Any]] = []
        self.processes = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            self.connections.append(ours)
            process = context.Process(
                target=serve, args=(theirs, list(self.connections), world), daemon=True
            )
            with warnings.catch_warnings():  # Python 3.12 warns of any fork beside threads
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self.processes.append(process)

    def round(
        self, number: int, chunks: Sequence[Sequence[Task]], last: bool = False
    ) -> dict[str, Done]:
        """Every chunk's update, or with `last` its adaptation after the rounds."""
        todo = list(reversed(chunks))
        busy: list[Connection[Any, Any]] = []
        done: dict[str, Done] = {}
        for connection in self.connections:
            if todo:
                busy.append(self._give(connection, number, todo.pop(), last))
        while busy:
            ready = wait(busy)
            for connection in [one for one in busy if one in ready]:
                try:
                    kind, answer = connection.recv()
                except (EOFError, OSError) as error:
                    raise lost(number) from error
                if kind == "error":
                    raise answer
                done.update({id: _from_arrays(one) for id, one in answer.items()})
                busy.remove(connection)
                if todo:
                    busy.append(self._give(connection, number, todo.pop(), last))
        return done

    def _give(
        self, connection: "Connection[Any, Any]", number: int, tasks: Sequence[Task], last: bool
    ) -> "Connection[Any, Any]":
        seen: dict[int, Any] = {}  # what several clients are sent travels once
        bare = [replace(t, sent=_arrays(t.sent, seen), local=_arrays(t.own)) for t in tasks]
        try:
            connection.send((number, bare, last))
        except OSError as error:
            raise lost(number) from error
        return connection

    def close(self) -> None:
        for connection in self.connections:
            connection.close()  # the worker reads the end of its pipe and leaves
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def lost(number: int) -> FederationError:
    return FederationError(
        f"a worker process ended in round {number} without an answer (killed, or out of memory); "
        "nothing is lost: resume the run, with workers = 1 if memory is short"
    )


def serve(
    connection: "Connection[Any, Any]", others: "Sequence[Connection[Any, Any]]", world: World
) -> None:
    """A worker's life: take a chunk, answer, until the pipe closes."""
    from fedvlm.engines.batched import last_chunk, run_chunk

    for other in others:  # inherited ends would keep a pipe open after the server is gone
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server is interrupted, and closes the pipe
    torch.set_num_threads(1)
    while True:
        try:
            number, bare, last = connection.recv()
        except (EOFError, OSError):
            return
        tasks = [replace(t, sent=_tensors(t.sent), local=_tensors(t.own)) for t in bare]
        try:
            done = (last_chunk if last else run_chunk)(world, number, tasks)
            connection.send(("done", {id: _to_arrays(one) for id, one in done.items()}))
        except FedVLMError as error:
            connection.send(("error", error))
        except Exception:
            connection.send(("error", FederationError(traceback.format_exc())))


# Plain arrays on the wire: tensors would travel by file handles, which a long run exhausts.
def _arrays(tensors: Tensors, seen: dict[int, Any] | None = None) -> Any:
    known = {} if seen is None else seen
    return {key: known.setdefault(id(value), value.numpy()) for key, value in tensors.items()}


def _tensors(arrays: Any) -> Tensors:
    return {key: torch.from_numpy(value) for key, value in arrays.items()}


def _to_arrays(done: Done) -> Any:
    upload = None if done.upload is None else _arrays(done.upload)
    return upload, _arrays(done.own), done.scores, done.rows


def _from_arrays(answer: Any) -> Done:
    upload, local, *more = answer
    return Done(None if upload is None else _tensors(upload), _tensors(local), *more)
