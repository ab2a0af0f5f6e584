"""One client after the other in this process: slow, plain, and breakpoints work."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fedvlm.engines.client import Done, Task, World, client, measure
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.machine import give_back


class Single:
    """Runs the verbs exactly as the method wrote them."""

    def __init__(self, world: World) -> None:
        self.world = world

    def round(self, number: int, tasks: Sequence[Task]) -> dict[str, Done]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the same kernels, hence the same bits, as in a worker process
        try:
            return {task.id: one(self.world, number, task) for task in tasks}
        finally:
            torch.set_num_threads(threads)

    def adapt(self, number: int, tasks: Sequence[Task]) -> dict[str, Done]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return {task.id: last(self.world, number, task) for task in tasks}
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        pass


def one(world: World, number: int, task: Task) -> Done:
    """Measures what a client was sent, then trains if it takes part in this round."""
    with naming(world, number, task.id):
        scores = measure(world, task.sent, task.local, task.id)
        if not task.trains:
            return Done(None, task.local, scores)
        upload, local = world.method.update(
            world.frozen, task.sent, task.local, client(world, task.id, number)
        )
        if "image tower" in world.method.traits.needs:
            give_back()
        return Done(upload, local, scores)


def last(world: World, number: int, task: Task) -> Done:
    """A client's adaptation after the rounds, and how it fares then; an unseen one has none."""
    with naming(world, number, task.id):
        local = task.local
        if task.trains:
            own = client(world, task.id, number)
            local = world.method.adapt(world.frozen, task.sent, task.local, own)
        return Done(None, local, measure(world, task.sent, local, task.id, last=True))


@contextmanager
def naming(world: World, number: int, id: str) -> Iterator[None]:
    """Errors say which method, client and round they come from."""
    try:
        yield
    except FedVLMError as error:
        raise type(error)(f"{where(world, number, id)}: {error}") from error
    except Exception as error:
        raise failure(world, number, [id], traceback.format_exc()) from error


def where(world: World, number: int, id: str) -> str:
    return f"method {world.method.name}, client {id}, round {number}"


def failure(world: World, number: int, ids: Sequence[str], trace: str) -> FederationError:
    return FederationError(f"{where(world, number, ', '.join(ids))} failed:\n{trace}")
