"""The sequential engine: one client after the other in this process; slow, but breakpoints work."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fedvlm.engines import client
from fedvlm.engines.placement import with_resident_rows
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.machine import release_memory
from fedvlm.parts.bodies import adapts
from fedvlm.tensors import without_compiler


class Sequential:
    """Run the verbs exactly as the method wrote them."""

    def __init__(self, world: client.World) -> None:
        self.world = with_resident_rows(world)

    def round(self, number: int, tasks: Sequence[client.Task]) -> client.RoundReplies:
        with one_thread():
            return client.RoundReplies({task.id: run_client(self.world, number, task) for task in tasks})

    def adapt(self, number: int, tasks: Sequence[client.Task]) -> client.RoundReplies:
        with one_thread():
            return client.RoundReplies({task.id: adapt_client(self.world, number, task) for task in tasks})

    def close(self) -> None:
        pass


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: the same kernels, hence the same bits, as in a worker process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@without_compiler()
def run_client(world: client.World, number: int, task: client.Task) -> client.ClientReply:
    """Measure a client with what it was sent, then train it if it takes part in this round."""
    with naming_errors(world, number, task.id):
        rows = len(world.members[task.id].train)
        scores = client.measure(world, task.sent, task.local_tensors, task.id)
        if not task.trains:
            return client.ClientReply(None, task.local_tensors, scores, rows)
        samples = client.limit_small_classes(world, task.id, client.make_client(world, task.id, number))
        upload, local = world.method.update(world.frozen, task.sent, task.local_tensors, samples)
        if "image tower" in world.method.traits.needs:
            release_memory()
        return client.ClientReply(upload, local, scores, rows)


@without_compiler()
def adapt_client(world: client.World, number: int, task: client.Task) -> client.ClientReply:
    """Adapt a client after the rounds and measure it; an unseen client is only measured."""
    with naming_errors(world, number, task.id):
        local = task.local_tensors
        if task.trains and adapts(world.method):
            training_client = client.make_client(world, task.id, number)
            local = world.method.adapt(world.frozen, task.sent, task.local_tensors, training_client)
        scores = client.measure(world, task.sent, local, task.id, last=True)
        return client.ClientReply(None, local, scores, len(world.members[task.id].train))


@contextmanager
def naming_errors(world: client.World, number: int, id: str) -> Iterator[None]:
    """Name method, client and round in errors."""
    try:
        yield
    except FedVLMError as error:
        raise type(error)(f"{error_context(world, number, id)}: {error}") from error
    except Exception as error:
        raise failure(world, number, [id], traceback.format_exc()) from error


def error_context(terms: client.TrainingTerms, number: int, id: str) -> str:
    return f"method {terms.method.name}, client {id}, round {number}"


def failure(world: client.World, number: int, ids: Sequence[str], trace: str) -> FederationError:
    return FederationError(f"{error_context(world, number, ', '.join(ids))} failed:\n{trace}")
