"""What the methods that solve one logistic regression over clients share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedvlm.core import Client, Frozen, Tensors
from fedvlm.maths import gaussian, probe, quasi

WALK = "walk "  # starts the names of the server's own tensors, which are never sent


def anchor_of(frozen: Frozen) -> Tensor:
    """(classes, dim + 1): the zero-shot classifier, or nothing at all without text."""
    if frozen.text is None:
        return torch.zeros(len(frozen.classes), frozen.dim + 1)
    return torch.cat([frozen.scale * frozen.text, torch.zeros(len(frozen.classes), 1)], dim=1)


def keep(walk: quasi.Walk) -> Tensors:
    """The server's tensors, and the head that the clients are asked about."""
    named = {f"{WALK}{key}": value for key, value in walk._asdict().items()}
    return {**head(walk.point), **named}


def head(point: Tensor) -> Tensors:
    return {key: value.float() for key, value in probe.split(point)._asdict().items()}


def kept(shared: Tensors) -> quasi.Walk:
    return quasi.Walk(*(shared[f"{WALK}{key}"] for key in quasi.Walk._fields))


def answer(sent: Tensors, client: Client, smallest: int) -> Tensors:
    """Sums of a client's rows at the head it was sent: loss and slope, and the validation loss.

    A client with too few rows says nothing.
    """
    asked = probe.Head(sent["weight"], sent["bias"])
    loss, slope = probe.pull_of(asked, client.x, client.y)
    rows, held = (client.y >= 0).sum(), (client.held_y >= 0).sum()
    judged = probe.losses(asked.logits(client.held_x), client.held_y)
    counted = torch.stack([loss, rows, judged, held]).float()
    enough = rows >= smallest
    return {"slope": torch.where(enough, slope, 0.0), "counted": torch.where(enough, counted, 0.0)}


def second(client: Client, smallest: int) -> Tensor:
    """Σ x xᵀ over rows with a last coordinate of 1, packed; of too few rows it stays at home."""
    real = client.y >= 0
    x = torch.where(real[:, None], client.x.double(), 0.0)
    x = torch.cat([x, real.double()[:, None]], dim=1)
    return torch.where(real.sum() >= smallest, gaussian.pack(x.mT @ x), 0.0).float()


def summed(uploads: Sequence[Tensors]) -> Tensors:
    return {
        key: sum((one[key].double() for one in uploads), start=torch.zeros((), dtype=torch.float64))
        for key in uploads[0]
    }


def step(shared: Tensors, total: Tensors, gram: Tensor, anchor: Tensor, ridge: float) -> Tensors:
    """The server's next point from what the clients said of the last one."""
    rows = total["counted"][1].clamp(min=1)
    moments = gaussian.unpack(gram.double(), anchor.shape[1])
    mean = moments / moments[-1, -1].clamp(min=1)  # its last corner is the number of rows
    loss, slope = total["counted"][0] / rows, total["slope"] / rows
    return keep(quasi.advance(kept(shared), loss, slope, mean, anchor.double(), ridge))
