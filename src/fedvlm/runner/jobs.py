"""Run trainings as parallel jobs, each in a process with one thread, the longest first.

A process is forked, so it has samples, method and torch without a copy and within milliseconds; it ends with its
training and writes its tensors itself. The lines of its record go through a pipe to the parent process, which alone
writes them, before the checkpoint that depends on them. A training always computes with one thread, so the bits are
the same for any number of processes.
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
from typing import Any, TypeAlias

import torch

from fedvlm.data.table import EmbeddedTable
from fedvlm.devices import is_cpu
from fedvlm.engines.sequential import one_thread
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.machine import count_cores
from fedvlm.record import Record
from fedvlm.runner.load import Progress
from fedvlm.runner.settings import Settings

Pipe: TypeAlias = "Connection[Any, Any]"  # to or from the process of a job
INLINE_SECONDS = 4.0  # work up to this stays in one process, by forecast and by the clock
CAN_FORK = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # of Linux: send a signal to this process when its parent ends


@dataclass(frozen=True)
class JobSpec:
    """Identify a training, so that another machine can prepare the same one."""

    settings: Settings
    rows: EmbeddedTable
    seed: int
    training: str


@dataclass(frozen=True)
class Job:
    """One piece of work, such as a training, with its callbacks."""

    name: str
    record: Record
    cost: float  # seconds on one core, roughly
    workers: int  # processes requested; 0: one per core, if it is worth it
    is_exclusive: bool  # do not run in parallel: it is finished, or needs the whole memory
    work: Callable[[Record, int, Callable[[int], None]], Any]  # gets record, processes and a callback for rounds
    report_rounds: Callable[[int], None]  # rounds done
    on_done: Callable[[Any], None]  # gets the result or the error
    spec: JobSpec | None = None  # for a cluster


class ProgressTotal:
    """Sum up the finished rounds of all runs of a method, which may run in parallel."""

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
    """Return whether a training cannot run in a forked process.

    An image tower fills the memory, Flower has threads, a GPU does not survive a fork, and only Linux forks safely.
    """
    tower = "image tower" in settings.method.traits.needs
    return tower or settings.engine == "flower" or not is_cpu(settings.device) or not CAN_FORK


def run_jobs(jobs: Sequence[Job]) -> None:
    """Run all jobs; a failed one reports its error, and the others go on."""
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
    # clients of one training share the processes that trainings leave free
    workers_per_job = max(1, processes // len(jobs))
    busy: dict[Pipe, tuple[Job, BaseProcess]] = {}
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


def _start(job: Job, workers: int, other_connections: Sequence[Pipe]) -> tuple[Pipe, BaseProcess]:
    context = get_context("fork")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, [*other_connections, parent_end], job, workers))
    with warnings.catch_warnings():  # Python 3.12 warns of any fork beside threads
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    child_end.close()
    return parent_end, process


def _handle_message(connection: Pipe, job: Job) -> tuple[Any] | None:
    """Handle one message of a job's process; return its outcome once it is sent."""
    try:
        kind, *payload = connection.recv()
    except (EOFError, OSError):
        lost = "its process ended without an answer (killed, or out of memory); nothing is lost: "
        return (FederationError(f"{lost}resume the run, with workers = 1 if memory is short"),)
    if kind == "done":
        return (payload[0],)
    if kind == "rounds":
        job.report_rounds(*payload)
        return None
    answer = None
    try:
        getattr(job.record, kind)(*payload)
    except FedVLMError as error:  # as a full disk, which fails the training
        answer = error
    with suppress(OSError):  # the process may have been killed meanwhile, which the next message shows
        connection.send(answer)
    return None


class _RemoteRecord(Record):
    """A record in a job's process: the parent writes its lines, and the job waits until they are written."""

    def __init__(self, folder: Path, connection: Pipe) -> None:
        super().__init__(folder)
        self.connection = connection

    def add_line(self, line: Mapping[str, Any]) -> None:
        self._request("add_line", line)

    def drop_lines_after(self, training: str, rounds: int) -> None:
        self._request("drop_lines_after", training, rounds)

    def _request(self, *request: Any) -> None:
        self.connection.send(request)
        if (error := self.connection.recv()) is not None:
            raise error


def _serve(connection: Pipe, other_connections: Sequence[Pipe], job: Job, workers: int) -> None:
    """Run a job in a forked process and send its outcome."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends this process
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if (parent := parent_process()) is None or os.getppid() != parent.pid:
        return  # the parent ended before
    for other_connection in other_connections:  # inherited ends would keep a pipe open after its owner is gone
        other_connection.close()
    torch.set_num_threads(1)
    outcome: Any
    try:
        record = _RemoteRecord(job.record.folder, connection)
        outcome = job.work(record, workers, lambda rounds: connection.send(("rounds", rounds)))
    except FedVLMError as error:
        outcome = error
    except Exception:
        outcome = FederationError(traceback.format_exc())
    with suppress(OSError):  # the parent may have ended
        connection.send(("done", outcome))
    os._exit(0)  # not sys.exit: a thread of the parent may have held the lock of a stream
