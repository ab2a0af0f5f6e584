"""One client after the other in this process: slow, plain, and breakpoints work."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fedvlm.engines.client import Answers, Done, Task, Terms, World, client, measure
from fedvlm.engines.placed import resident
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.machine import give_back
from fedvlm.parts.bodies import adapts


class Single:
    """Runs the verbs exactly as the method wrote them."""

    def __init__(self, world: World) -> None:
        self.world = resident(world)

    def round(self, number: int, tasks: Sequence[Task]) -> Answers:
        with one_thread():
            return Answers({task.id: one(self.world, number, task) for task in tasks})

    def adapt(self, number: int, tasks: Sequence[Task]) -> Answers:
        with one_thread():
            return Answers({task.id: last(self.world, number, task) for task in tasks})

    def close(self) -> None:
        pass


@contextmanager
def one_thread() -> Iterator[None]:
    """The same kernels, hence the same bits, as in a worker process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def one(world: World, number: int, task: Task) -> Done:
    """Measures what a client was sent, then trains if it takes part in this round."""
    with naming(world, number, task.id):
        rows = len(world.members[task.id].train)
        scores = measure(world, task.sent, task.own, task.id)
        if not task.trains:
            return Done(None, task.own, scores, rows)
        upload, local = world.method.update(
            world.frozen, task.sent, task.own, client(world, task.id, number)
        )
        if "image tower" in world.method.traits.needs:
            give_back()
        return Done(upload, local, scores, rows)


def last(world: World, number: int, task: Task) -> Done:
    """A client's adaptation after the rounds, and how it fares then; an unseen one has none."""
    with naming(world, number, task.id):
        local = task.own
        if task.trains and adapts(world.method):
            own = client(world, task.id, number)
            local = world.method.adapt(world.frozen, task.sent, task.own, own)
        scores = measure(world, task.sent, local, task.id, last=True)
        return Done(None, local, scores, len(world.members[task.id].train))


@contextmanager
def naming(world: World, number: int, id: str) -> Iterator[None]:
    """Errors say which method, client and round they come from."""
    try:
        yield
    except FedVLMError as error:
        raise type(error)(f"{where(world, number, id)}: {error}") from error
    except Exception as error:
        raise failure(world, number, [id], traceback.format_exc()) from error


def where(terms: Terms, number: int, id: str) -> str:
    return f"method {terms.method.name}, client {id}, round {number}"


def failure(world: World, number: int, ids: Sequence[str], trace: str) -> FederationError:
    return FederationError(f"{where(world, number, ', '.join(ids))} failed:\n{trace}")
