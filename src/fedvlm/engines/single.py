"""One client after the other in this process: slow, plain, and breakpoints work."""

import traceback
from collections.abc import Sequence

import torch

from fedvlm.engines.work import Done, Task, World, client, measure
from fedvlm.errors import FederationError, FedVLMError


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

    def close(self) -> None:
        pass


def one(world: World, number: int, task: Task) -> Done:
    try:
        scores = measure(world, task.sent, task.local, task.id)
        if not task.trains:
            return Done(None, task.local, scores)
        upload, local = world.method.update(
            world.frozen, task.sent, task.local, client(world, task.id, number)
        )
        return Done(upload, local, scores)
    except FedVLMError as error:
        raise type(error)(f"{where(world, number, task.id)}: {error}") from error
    except Exception as error:
        raise failure(world, number, [task.id], traceback.format_exc()) from error


def where(world: World, number: int, id: str) -> str:
    return f"method {world.method.name}, client {id}, round {number}"


def failure(world: World, number: int, ids: Sequence[str], trace: str) -> FederationError:
    return FederationError(f"{where(world, number, ', '.join(ids))} failed:\n{trace}")
