"""Trainings side by side, each in a process of one thread, the longest first.

A process is forked, so it has the rows, the method and what torch has loaded without a copy and
within milliseconds; it ends with its training. Its tensors go to disk from there. The lines of
its record go over a pipe to the process that began the run, which alone writes them: whole, and
before the checkpoint that counts on them. A training computes with one thread wherever it runs,
so the bits are the same for any number of processes.
"""

import ctypes
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from fedvlm.data.table import Embedded
from fedvlm.devices import on_cpu
from fedvlm.engines.single import one_thread
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.machine import cores
from fedvlm.record import Record
from fedvlm.runner.load import Progress
from fedvlm.runner.settings import Settings

SHORT = 4.0  # seconds of work that stay in one process, by forecast and by the clock
FORKS = sys.platform == "linux"
DIE = 1  # PR_SET_PDEATHSIG of Linux: a signal when the parent is gone


@dataclass(frozen=True)
class Order:
    """A training by the settings and rows of its run; whoever has them prepares it alike."""

    settings: Settings
    rows: Embedded
    seed: int
    training: str


@dataclass(frozen=True)
class Piece:
    """One training that is to be done, and whom to tell of it."""

    name: str
    record: Record
    cost: float  # seconds on one core, roughly
    workers: int  # processes that are asked for; 0: as many as cores, if it is worth it
    alone: bool  # not beside another: it is done already, or fills the memory by itself
    work: Callable[[Record, int, Callable[[int], None]], Any]  # record, processes, rounds done
    tell: Callable[[int], None]  # rounds done
    done: Callable[[Any], None]  # what came of it, or the error that did
    order: Order | None = None  # the same in words, for a machine that is not this one


class Tally:
    """Rounds that are done, over all runs of a method: they may be side by side."""

    def __init__(self, report: Progress) -> None:
        self.report = report
        self.done: dict[str, list[int]] = {}
        self.total: dict[str, int] = {}

    def place(self, name: str, rounds: int) -> Callable[[int], None]:
        mine = self.done.setdefault(name, [])
        number = len(mine)
        mine.append(0)
        self.total[name] = self.total.get(name, 0) + rounds

        def tell(finished: int) -> None:
            mine[number] = finished
            self.report(name, sum(mine), self.total[name])

        return tell


def stays(settings: Settings) -> bool:
    """Whether a training is not beside another: a tower fills the memory, Flower has threads, a
    GPU cannot be used in a forked process, and only Linux forks one safely."""
    tower = "image tower" in settings.method.traits.needs
    return tower or settings.engine == "flower" or not on_cpu(settings.device) or not FORKS


def carry(pieces: Sequence[Piece]) -> None:
    """All of them; one that fails is told as such, and the others go on."""
    several = len(pieces) > 1
    beside = sorted((one for one in pieces if not one.alone), key=lambda one: -one.cost)
    asked = max((one.workers for one in beside), default=1)
    processes = asked or cores()
    for piece in pieces:
        if piece.alone:
            here(piece, several)
    begin = perf_counter()
    while beside:
        left = sum(one.cost for one in beside) + perf_counter() - begin
        if len(beside) > 1 and processes > 1 and (asked or left > SHORT):
            _side_by_side(beside, processes, several)
            return
        here(beside.pop(0), several)


def here(piece: Piece, several: bool) -> None:
    try:
        with one_thread():  # as in a process of its own
            found = piece.work(piece.record, piece.workers, piece.tell)
    except FedVLMError as error:
        found = named(piece, error) if several else error
    piece.done(found)


def named(piece: Piece, error: FedVLMError) -> FedVLMError:
    named = type(error)(f"{piece.name}: {error}")
    named.__cause__ = error
    return named


def _side_by_side(pieces: Sequence[Piece], processes: int, several: bool) -> None:
    waiting = list(pieces)
    # clients of one training only share what the trainings leave over
    each = max(1, processes // len(pieces))
    busy: dict[Connection[Any, Any], tuple[Piece, BaseProcess]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < processes:
                piece = waiting.pop(0)
                connection, process = _start(piece, each, list(busy))
                busy[connection] = piece, process
            for one in wait(list(busy)):
                assert isinstance(one, Connection)
                piece, process = busy[one]
                answer = _hear(one, piece)
                if answer is None:
                    continue
                del busy[one]
                one.close()
                process.join()
                (found,) = answer
                failed = isinstance(found, FedVLMError) and several
                piece.done(named(piece, found) if failed else found)
    finally:
        for connection, (_, process) in busy.items():
            process.kill()
            process.join()
            connection.close()


def _start(
    piece: Piece, workers: int, others: "Sequence[Connection[Any, Any]]"
) -> "tuple[Connection[Any, Any], BaseProcess]":
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, [*others, ours], piece, workers))
    with warnings.catch_warnings():  # Python 3.12 warns of any fork beside threads
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return ours, process


def _hear(connection: "Connection[Any, Any]", piece: Piece) -> tuple[Any] | None:
    """Takes in what a process says; its outcome, once that is what it says."""
    try:
        kind, *given = connection.recv()
    except (EOFError, OSError):
        lost = "its process ended without an answer (killed, or out of memory); nothing is lost: "
        return (FederationError(f"{lost}resume the run, with workers = 1 if memory is short"),)
    if kind == "done":
        return (given[0],)
    if kind == "tell":
        piece.tell(*given)
        return None
    answer = None
    try:
        getattr(piece.record, kind)(*given)
    except FedVLMError as error:  # a full disk is the training's misfortune
        answer = error
    with suppress(OSError):  # it may have been killed meanwhile, which is heard next
        connection.send(answer)
    return None


class _Apart(Record):
    """A record as such a process has it: others write its lines, and it waits until they have."""

    def __init__(self, folder: Path, connection: "Connection[Any, Any]") -> None:
        super().__init__(folder)
        self.connection = connection

    def add_line(self, line: Mapping[str, Any]) -> None:
        self._ask("add_line", line)

    def keep_lines(self, training: str, rounds: int) -> None:
        self._ask("keep_lines", training, rounds)

    def _ask(self, *asked: Any) -> None:
        self.connection.send(asked)
        if (error := self.connection.recv()) is not None:
            raise error


def _serve(
    connection: "Connection[Any, Any]",
    others: "Sequence[Connection[Any, Any]]",
    piece: Piece,
    workers: int,
) -> None:
    """The life of a process: one training, and what came of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who began the run is interrupted, and ends it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE, signal.SIGKILL)
    if (parent := parent_process()) is None or os.getppid() != parent.pid:
        return  # it was gone before
    for other in others:  # inherited ends would keep a pipe open after its owner is gone
        other.close()
    torch.set_num_threads(1)
    found: Any
    try:
        record = _Apart(piece.record.folder, connection)
        found = piece.work(record, workers, lambda rounds: connection.send(("tell", rounds)))
    except FedVLMError as error:
        found = error
    except Exception:
        found = FederationError(traceback.format_exc())
    with suppress(OSError):  # nobody may be there to be told
        connection.send(("done", found))
    os._exit(0)  # no exit of Python's: a thread of the parent may have held the lock of a stream
