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

from fedvlm.data.table import EmbeddedTable
from fedvlm.devices import is_cpu
from fedvlm.engines.sequential import one_thread
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.machine import count_cores
from fedvlm.record import Record
from fedvlm.runner.load import Progress
from fedvlm.runner.settings import Settings

INLINE_SECONDS = 4.0  # seconds of work that stay in one process, by forecast and by the clock
CAN_FORK = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of Linux: a signal when the parent is gone


@dataclass(frozen=True)
class JobSpec:
    """A training by the settings and rows of its run; whoever has them prepares it alike."""

    settings: Settings
    rows: EmbeddedTable
    seed: int
    training: str


@dataclass(frozen=True)
class Job:
    """One training that is to be done, and whom to tell of it."""

    name: str
    record: Record
    cost: float  # seconds on one core, roughly
    workers: int  # processes that are asked for; 0: as many as cores, if it is worth it
    is_exclusive: bool  # not beside another: it is done already, or fills the memory by itself
    work: Callable[[Record, int, Callable[[int], None]], Any]  # record, processes, rounds done
    report_rounds: Callable[[int], None]  # rounds done
    on_done: Callable[[Any], None]  # what came of it, or the error that did
    spec: JobSpec | None = None  # the same in words, for a machine that is not this one


class ProgressTotal:
    """Rounds that are done, over all runs of a method: they may be side by side."""

    def __init__(self, report: Progress) -> None:
        self.report = report
        self.done: dict[str, list[int]] = {}
        self.total: dict[str, int] = {}

    def add(self, name: str, rounds: int) -> Callable[[int], None]:
        counts = self.done.setdefault(name, [])
        number = len(counts)
        counts.append(0)
        self.total[name] = self.total.get(name, 0) + rounds

        def update(finished: int) -> None:
            counts[number] = finished
            self.report(name, sum(counts), self.total[name])

        return update


def must_run_alone(settings: Settings) -> bool:
    """Whether a training is not beside another: a tower fills the memory, Flower has threads, a
    GPU cannot be used in a forked process, and only Linux forks one safely."""
    tower = "image tower" in settings.method.traits.needs
    return tower or settings.engine == "flower" or not is_cpu(settings.device) or not CAN_FORK


def run_jobs(jobs: Sequence[Job]) -> None:
    """All of them; one that fails is told as such, and the others go on."""
    several = len(jobs) > 1
    parallel_jobs = sorted((job for job in jobs if not job.is_exclusive), key=lambda job: -job.cost)
    n_requested = max((job.workers for job in parallel_jobs), default=1)
    processes = n_requested or count_cores()
    for job in jobs:
        if job.is_exclusive:
            run_inline(job, several)
    started = perf_counter()
    while parallel_jobs:
        remaining = sum(job.cost for job in parallel_jobs) + perf_counter() - started
        if len(parallel_jobs) > 1 and processes > 1 and (n_requested or remaining > INLINE_SECONDS):
            _run_parallel(parallel_jobs, processes, several)
            return
        run_inline(parallel_jobs.pop(0), several)


def run_inline(job: Job, several: bool) -> None:
    try:
        with one_thread():  # as in a process of its own
            outcome = job.work(job.record, job.workers, job.report_rounds)
    except FedVLMError as error:
        outcome = with_job_name(job, error) if several else error
    job.on_done(outcome)


def with_job_name(job: Job, error: FedVLMError) -> FedVLMError:
    renamed = type(error)(f"{job.name}: {error}")
    renamed.__cause__ = error
    return renamed


def _run_parallel(jobs: Sequence[Job], processes: int, several: bool) -> None:
    waiting = list(jobs)
    # clients of one training only share what the trainings leave over
    workers_per_job = max(1, processes // len(jobs))
    busy: dict[Connection[Any, Any], tuple[Job, BaseProcess]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < processes:
                job = waiting.pop(0)
                connection, process = _start(job, workers_per_job, list(busy))
                busy[connection] = job, process
            for ready_connection in wait(list(busy)):
                assert isinstance(ready_connection, Connection)
                job, process = busy[ready_connection]
                answer = _handle_message(ready_connection, job)
                if answer is None:
                    continue
                del busy[ready_connection]
                ready_connection.close()
                process.join()
                (outcome,) = answer
                failed = isinstance(outcome, FedVLMError) and several
                job.on_done(with_job_name(job, outcome) if failed else outcome)
    finally:
        for connection, (_, process) in busy.items():
            process.kill()
            process.join()
            connection.close()


def _start(
    job: Job, workers: int, other_connections: "Sequence[Connection[Any, Any]]"
) -> "tuple[Connection[Any, Any], BaseProcess]":
    context = get_context("fork")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, [*other_connections, parent_end], job, workers))
    with warnings.catch_warnings():  # Python 3.12 warns of any fork beside threads
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    child_end.close()
    return parent_end, process


def _handle_message(connection: "Connection[Any, Any]", job: Job) -> tuple[Any] | None:
    """Takes in what a process says; its outcome, once that is what it says."""
    try:
        kind, *payload = connection.recv()
    except (EOFError, OSError):
        lost = "its process ended without an answer (killed, or out of memory); nothing is lost: "
        return (FederationError(f"{lost}resume the run, with workers = 1 if memory is short"),)
    if kind == "done":
        return (payload[0],)
    if kind == "tell":
        job.report_rounds(*payload)
        return None
    answer = None
    try:
        getattr(job.record, kind)(*payload)
    except FedVLMError as error:  # a full disk is the training's misfortune
        answer = error
    with suppress(OSError):  # it may have been killed meanwhile, which is heard next
        connection.send(answer)
    return None


class _RemoteRecord(Record):
    """A record as such a process has it: others write its lines, and it waits until they have."""

    def __init__(self, folder: Path, connection: "Connection[Any, Any]") -> None:
        super().__init__(folder)
        self.connection = connection

    def add_line(self, line: Mapping[str, Any]) -> None:
        self._request("add_line", line)

    def keep_lines(self, training: str, rounds: int) -> None:
        self._request("keep_lines", training, rounds)

    def _request(self, *request: Any) -> None:
        self.connection.send(request)
        if (error := self.connection.recv()) is not None:
            raise error


def _serve(
    connection: "Connection[Any, Any]",
    other_connections: "Sequence[Connection[Any, Any]]",
    job: Job,
    workers: int,
) -> None:
    """The life of a process: one training, and what came of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who began the run is interrupted, and ends it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if (parent := parent_process()) is None or os.getppid() != parent.pid:
        return  # it was gone before
    for other_connection in other_connections:  # inherited ends would keep a pipe open after its owner is gone
        other_connection.close()
    torch.set_num_threads(1)
    outcome: Any
    try:
        record = _RemoteRecord(job.record.folder, connection)
        outcome = job.work(record, workers, lambda rounds: connection.send(("tell", rounds)))
    except FedVLMError as error:
        outcome = error
    except Exception:
        outcome = FederationError(traceback.format_exc())
    with suppress(OSError):  # nobody may be there to be told
        connection.send(("done", outcome))
    os._exit(0)  # no exit of Python's: a thread of the parent may have held the lock of a stream
