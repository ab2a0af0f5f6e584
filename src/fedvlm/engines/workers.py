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
from fedvlm.engines.chunks import adapt_chunk, run_chunk
from fedvlm.engines.client import ClientReply, Task, World
from fedvlm.errors import FederationError, FedVLMError

SHARED_MEMORY_BYTES = 64 << 20  # shared with each worker; what exceeds it goes through the pipe
ALIGNMENT_BYTES = 64
POLL_SECONDS = 0.5  # after which a waiting pool checks whether it is stopped


class WorkerPool:
    def __init__(self, world: World, workers: int) -> None:
        context = get_context("fork")
        self.workers: dict[Connection[Any, Any], WorkerConnection] = {}
        self.processes = []
        self.is_stopped = False  # also by another thread; then it can only be closed
        for _ in range(workers):
            parent_end, child_end = context.Pipe()
            memory = mmap(-1, SHARED_MEMORY_BYTES)
            self.workers[parent_end] = WorkerConnection(parent_end, memory)
            process = context.Process(
                target=run_worker, args=(WorkerConnection(child_end, memory), list(self.workers), world), daemon=True
            )
            with warnings.catch_warnings():  # Python 3.12 warns of any fork while threads run
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            child_end.close()
            self.processes.append(process)

    def round(self, number: int, chunks: Sequence[Sequence[Task]], last: bool = False) -> dict[str, ClientReply]:
        """Run the update of every chunk, or with `last` its adaptation after the rounds."""
        try:
            return self._round(number, chunks, last)
        except BaseException:
            self.is_stopped = True  # late replies belong to no round
            raise

    def _round(self, number: int, chunks: Sequence[Sequence[Task]], last: bool) -> dict[str, ClientReply]:
        self._check_stopped(number)
        todo = list(reversed(chunks))
        busy: list[Connection[Any, Any]] = []
        done: dict[str, ClientReply] = {}
        for connection in self.workers:
            if todo:
                busy.append(self._send_tasks(connection, number, todo.pop(), last))
        while busy:
            ready = wait(busy, POLL_SECONDS)
            self._check_stopped(number)
            for connection in [entry for entry in busy if entry in ready]:
                line = self.workers[connection]
                try:
                    kind, answer = line.receive()
                except (EOFError, OSError) as error:
                    raise lost_worker(number) from error
                if kind == "error":
                    raise answer
                done.update({id: _read_reply(line, entry) for id, entry in answer.items()})
                busy.remove(connection)
                if todo:
                    busy.append(self._send_tasks(connection, number, todo.pop(), last))
        return done

    def _check_stopped(self, number: int) -> None:
        if self.is_stopped:
            raise FederationError(f"round {number} was given up")

    def _send_tasks(
        self, connection: "Connection[Any, Any]", number: int, tasks: Sequence[Task], last: bool
    ) -> "Connection[Any, Any]":
        line = self.workers[connection]
        bare = [replace(t, sent=line.put_if_new(t.sent), local=line.put(t.local_tensors)) for t in tasks]
        try:
            line.send((number, bare, last))
        except OSError as error:
            raise lost_worker(number) from error
        return connection

    def close(self) -> None:
        for connection in self.workers:
            connection.close()  # the worker reads the end of its pipe and exits
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


Place = tuple[int, torch.dtype, torch.Size]  # offset, type and shape of a tensor in shared memory


class WorkerConnection:
    """A connection to one worker: one message at a time through a pipe, tensors through shared memory."""

    def __init__(self, connection: "Connection[Any, Any]", room: mmap) -> None:
        self.connection, self.memory = connection, room
        self.sent: Tensors = {}  # with the latest task; the worker still has it
        self.used_bytes = 0
        # a tensor of several clients is copied once; it is referenced here, so that its id is not reused meanwhile
        self.places: dict[int, tuple[Tensor, Place]] = {}
        self.read: dict[int, Tensor] = {}

    def put(self, tensors: Tensors) -> Any:
        """Put tensors into shared memory and return their places; arrays if it is full or they are empty."""
        return {key: self._place(tensor) for key, tensor in tensors.items()}

    def _place(self, tensor: Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        if id(tensor) in self.places:
            return self.places[id(tensor)][1]
        if not size or self.used_bytes + size > SHARED_MEMORY_BYTES:
            return tensor.detach().numpy()
        place = self.used_bytes, tensor.dtype, tensor.shape
        self._view(place).copy_(tensor.detach())
        self.used_bytes += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.places[id(tensor)] = tensor, place
        return place

    def _view(self, place: Place) -> Tensor:
        start, kind, shape = place
        count = shape.numel()
        return torch.frombuffer(self.memory, dtype=kind, count=count, offset=start).reshape(shape)

    def put_if_new(self, sent: Tensors) -> Any:
        """Put what a task was sent and return its places, or None if the task before was sent the same."""
        previous, self.sent = self.sent, sent
        if sent.keys() == previous.keys() and all(tensor is previous[key] for key, tensor in sent.items()):
            return None
        return self.put(sent)

    def send(self, message: Any) -> None:
        self.used_bytes = 0
        self.places.clear()
        self.connection.send(message)

    def receive(self) -> Any:
        self.read.clear()
        return self.connection.recv()

    def get(self, places: Any) -> Tensors:
        """Return the tensors of a received message."""
        out: Tensors = {}
        for key, place in places.items():
            if not isinstance(place, tuple):
                out[key] = torch.from_numpy(place)
                continue
            if place[0] not in self.read:
                self.read[place[0]] = self._view(place).clone()
            out[key] = self.read[place[0]]
        return out


def lost_worker(number: int) -> FederationError:
    return FederationError(
        f"a worker process ended in round {number} without an answer (killed, or out of memory); "
        "nothing is lost: resume the run, with workers = 1 if memory is short"
    )


def run_worker(line: WorkerConnection, inherited: "Sequence[Connection[Any, Any]]", world: World) -> None:
    """Run chunks and reply until the pipe closes."""
    for connection in inherited:  # inherited ends would keep a pipe open after the parent has exited
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and closes the pipe
    torch.set_num_threads(1)
    while True:
        try:
            number, bare, last = line.receive()
        except (EOFError, OSError):
            return
        tasks = []
        for task in bare:
            if task.sent is not None:
                line.sent = line.get(task.sent)
            tasks.append(replace(task, sent=line.sent, local=line.get(task.local)))
        try:
            done = (adapt_chunk if last else run_chunk)(world, number, tasks)
            line.send(("done", {id: _write_reply(line, reply) for id, reply in done.items()}))
        except FedVLMError as error:
            line.send(("error", error))
        except Exception:
            line.send(("error", FederationError(traceback.format_exc())))


# Places or plain arrays: tensors would be sent by file handles, which a long run exhausts.
def _write_reply(line: WorkerConnection, done: ClientReply) -> Any:
    upload = None if done.upload is None else line.put(done.upload)
    return upload, line.put(done.local_tensors), done.scores, done.rows


def _read_reply(line: WorkerConnection, answer: Any) -> ClientReply:
    upload, local, *rest = answer
    return ClientReply(None if upload is None else line.get(upload), line.get(local), *rest)
