"""Select, stack and update clients that share a leading client axis."""

from collections.abc import Callable
from typing import Any

import torch

from fedvlm import tensors
from fedvlm.core import Batch, Client, Frozen, Method, Tensors
from fedvlm.tensors import Updated, to_float32

Update = Callable[[Tensors, Tensors, Client], Updated]


def select_clients(clients: Client, index: Any) -> Client:
    """Return one or some of the stacked clients; None gives a single client a client axis."""
    return Client(*(value[index] for value in vars(clients).values()))


def select_tensors(stacked: Tensors, index: Any) -> Tensors:
    """Return the tensors of one or some clients as views, so that what they share is recognised as the same."""
    return {key: value[index] for key, value in stacked.items()}


def update_sequentially(method: Method, frozen: Frozen, sent: Tensors, local: Tensors, clients: Client) -> Updated:
    """Update stacked clients one by one (an `update_many` for updates that gain nothing by stacking)."""
    places = range(len(clients.y))
    parts = [(select_tensors(sent, i), select_tensors(local, i), select_clients(clients, i)) for i in places]
    results = [method.update(frozen, *part) for part in parts]
    uploads, locals_ = zip(*results, strict=True)
    return tensors.stack(uploads), tensors.stack(locals_)


def update_in_chunks(update: Update, size: int, sent: Tensors, local: Tensors, clients: Client) -> Updated:
    """Update so many stacked clients at a time, and join the results."""
    chunks = [slice(first, first + size) for first in range(0, len(clients.y), size)]
    parts = [(select_tensors(sent, c), select_tensors(local, c), select_clients(clients, c)) for c in chunks]
    results = [update(*part) for part in parts]
    if len(results) == 1:
        return results[0]
    uploads, locals_ = zip(*results, strict=True)
    return concatenate(uploads), concatenate(locals_)


def stacked_minibatch(clients: Client, step: int) -> Batch:
    """Return the minibatch of one step, with a leading axis of clients."""
    order = clients.order[:, step]
    client = torch.arange(len(order), device=order.device)[:, None]
    sample, reference = order.clamp(min=0), clients.reference_order[:, step].clamp(min=0)
    x, y = to_float32(clients.x[client, sample]), clients.y[client, sample].clamp(min=0)
    return Batch(x, y, order >= 0, to_float32(clients.reference[client, reference]))


def concatenate(parts: tuple[Tensors, ...]) -> Tensors:
    """Join stacked tensors along the client axis."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
