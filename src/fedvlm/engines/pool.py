"""Worker processes of one thread each, fed with chunks over pipes and shared memory.

They are forked, so they have the world (also a method written in a notebook) without a copy and
start in milliseconds. That is safe here as in torch's own data loaders: a child of one thread
never enters the parent's thread pools.
"""

import signal
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from mmap import mmap
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from fedvlm.core import Tensors
from fedvlm.engines.client import Done, Task, World
from fedvlm.errors import FederationError, FedVLMError

ROOM = 64 << 20  # bytes of memory that a worker shares with us; what is more goes by the pipe
ALIGNED = 64
LOOK = 0.5  # seconds until a pool that waits for answers sees that it is stopped


class Pool:
    def __init__(self, world: World, workers: int) -> None:
        context = get_context("fork")
        self.lines: dict[Connection[Any, Any], Line] = {}
        self.processes = []
        self.stopped = False  # also by another thread; then it is only to be closed
        for _ in range(workers):
            ours, theirs = context.Pipe()
            room = mmap(-1, ROOM)
            self.lines[ours] = Line(ours, room)
            process = context.Process(
                target=serve, args=(Line(theirs, room), list(self.lines), world), daemon=True
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
        try:
            return self._round(number, chunks, last)
        except BaseException:
            self.stopped = True  # what workers still answer is of no round
            raise

    def _round(self, number: int, chunks: Sequence[Sequence[Task]], last: bool) -> dict[str, Done]:
        self._go_on(number)
        todo = list(reversed(chunks))
        busy: list[Connection[Any, Any]] = []
        done: dict[str, Done] = {}
        for connection in self.lines:
            if todo:
                busy.append(self._give(connection, number, todo.pop(), last))
        while busy:
            ready = wait(busy, LOOK)
            self._go_on(number)
            for connection in [one for one in busy if one in ready]:
                line = self.lines[connection]
                try:
                    kind, answer = line.take()
                except (EOFError, OSError) as error:
                    raise lost(number) from error
                if kind == "error":
                    raise answer
                done.update({id: _read(line, one) for id, one in answer.items()})
                busy.remove(connection)
                if todo:
                    busy.append(self._give(connection, number, todo.pop(), last))
        return done

    def _go_on(self, number: int) -> None:
        if self.stopped:
            raise FederationError(f"round {number} was given up")

    def _give(
        self, connection: "Connection[Any, Any]", number: int, tasks: Sequence[Task], last: bool
    ) -> "Connection[Any, Any]":
        line = self.lines[connection]
        bare = [replace(t, sent=line.new(t.sent), local=line.put(t.own)) for t in tasks]
        try:
            line.give((number, bare, last))
        except OSError as error:
            raise lost(number) from error
        return connection

    def close(self) -> None:
        for connection in self.lines:
            connection.close()  # the worker reads the end of its pipe and leaves
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


Place = tuple[int, torch.dtype, torch.Size]  # of a tensor in the room


class Line:
    """To one worker and back: words through a pipe, numbers through memory that both have.

    A message is put together, given, taken and read before there is another one.
    """

    def __init__(self, connection: "Connection[Any, Any]", room: mmap) -> None:
        self.connection, self.room = connection, room
        self.sent: Tensors = {}  # of the latest task; the worker still has it
        self.used = 0
        # what several clients have travels once; held, so that nobody else has its id meanwhile
        self.places: dict[int, tuple[Tensor, Place]] = {}
        self.read: dict[int, Tensor] = {}

    def put(self, tensors: Tensors) -> Any:
        """Where tensors are in the room; as arrays if it is full, or there is nothing to them."""
        return {key: self._place(one) for key, one in tensors.items()}

    def _place(self, one: Tensor) -> Any:
        size = one.numel() * one.element_size()
        if id(one) in self.places:
            return self.places[id(one)][1]
        if not size or self.used + size > ROOM:
            return one.detach().numpy()
        place = self.used, one.dtype, one.shape
        self._at(place).copy_(one.detach())
        self.used += -(-size // ALIGNED) * ALIGNED
        self.places[id(one)] = one, place
        return place

    def _at(self, place: Place) -> Tensor:
        start, kind, shape = place
        count = shape.numel()
        return torch.frombuffer(self.room, dtype=kind, count=count, offset=start).reshape(shape)

    def new(self, sent: Tensors) -> Any:
        """Where the tensors are that a task was sent, or None if the one before was sent them."""
        known, self.sent = self.sent, sent
        if sent.keys() == known.keys() and all(one is known[key] for key, one in sent.items()):
            return None
        return self.put(sent)

    def give(self, message: Any) -> None:
        self.used = 0
        self.places.clear()
        self.connection.send(message)

    def take(self) -> Any:
        self.read.clear()
        return self.connection.recv()

    def get(self, places: Any) -> Tensors:
        """The tensors of a message that was taken."""
        out: Tensors = {}
        for key, one in places.items():
            if not isinstance(one, tuple):
                out[key] = torch.from_numpy(one)
                continue
            if one[0] not in self.read:
                self.read[one[0]] = self._at(one).clone()
            out[key] = self.read[one[0]]
        return out


def lost(number: int) -> FederationError:
    return FederationError(
        f"a worker process ended in round {number} without an answer (killed, or out of memory); "
        "nothing is lost: resume the run, with workers = 1 if memory is short"
    )


def serve(line: Line, others: "Sequence[Connection[Any, Any]]", world: World) -> None:
    """A worker's life: take a chunk, answer, until the pipe closes."""
    from fedvlm.engines.batched import last_chunk, run_chunk

    for other in others:  # inherited ends would keep a pipe open after the server is gone
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server is interrupted, and closes the pipe
    torch.set_num_threads(1)
    while True:
        try:
            number, bare, last = line.take()
        except (EOFError, OSError):
            return
        tasks = []
        for task in bare:
            if task.sent is not None:
                line.sent = line.get(task.sent)
            tasks.append(replace(task, sent=line.sent, local=line.get(task.own)))
        try:
            done = (last_chunk if last else run_chunk)(world, number, tasks)
            line.give(("done", {id: _written(line, one) for id, one in done.items()}))
        except FedVLMError as error:
            line.give(("error", error))
        except Exception:
            line.give(("error", FederationError(traceback.format_exc())))


# Places or plain arrays: tensors would travel by file handles, which a long run exhausts.
def _written(line: Line, done: Done) -> Any:
    upload = None if done.upload is None else line.put(done.upload)
    return upload, line.put(done.own), done.scores, done.rows


def _read(line: Line, answer: Any) -> Done:
    upload, local, *more = answer
    return Done(None if upload is None else line.get(upload), line.get(local), *more)
