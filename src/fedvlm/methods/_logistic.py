"""What the methods that solve one logistic regression over clients share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedvlm.core import Client, Frozen, Tensors
from fedvlm.maths import gaussian_classes, logistic_regression

STATE_PREFIX = "walk "  # starts the names of the server's own tensors, which are never sent


def zero_shot_head(frozen: Frozen) -> Tensor:
    """(classes, dim + 1): the zero-shot classifier, or nothing at all without text."""
    if frozen.text is None:
        return torch.zeros(len(frozen.classes), frozen.dim + 1)
    return torch.cat([frozen.scale * frozen.text, torch.zeros(len(frozen.classes), 1)], dim=1)


def state_to_tensors(state: logistic_regression.QuasiNewtonState) -> Tensors:
    """The server's tensors, and the head that the clients are asked about."""
    named = {f"{STATE_PREFIX}{key}": value for key, value in state._asdict().items()}
    return {**head_tensors(state.point), **named}


def head_tensors(point: Tensor) -> Tensors:
    return {key: value.float() for key, value in logistic_regression.split_head(point)._asdict().items()}


def state_from_tensors(shared: Tensors) -> logistic_regression.QuasiNewtonState:
    return logistic_regression.QuasiNewtonState(
        *(shared[f"{STATE_PREFIX}{key}"] for key in logistic_regression.QuasiNewtonState._fields)
    )


def local_statistics(sent: Tensors, client: Client, smallest: int) -> Tensors:
    """Sums of a client's rows at the head it was sent: loss and slope, and the validation loss.

    A client with too few rows says nothing.
    """
    sent_head = logistic_regression.Head(sent["weight"], sent["bias"])
    loss, gradient = logistic_regression.loss_and_gradient(sent_head, client.x, client.y)
    rows, held = (client.y >= 0).sum(), (client.val_y >= 0).sum()
    judged = logistic_regression.summed_cross_entropy(sent_head.logits(client.val_x), client.val_y)
    counted = torch.stack([loss, rows, judged, held]).float()
    has_enough = rows >= smallest
    return {"slope": torch.where(has_enough, gradient, 0.0), "counted": torch.where(has_enough, counted, 0.0)}


def packed_gram(client: Client, smallest: int) -> Tensor:
    """Σ x xᵀ over rows with a last coordinate of 1, packed; of too few rows it stays at home."""
    real = client.y >= 0
    x = torch.where(real[:, None], client.x.double(), 0.0)
    x = torch.cat([x, real.double()[:, None]], dim=1)
    return torch.where(real.sum() >= smallest, gaussian_classes.pack(x.mT @ x), 0.0).float()


def sum_uploads(uploads: Sequence[Tensors]) -> Tensors:
    return {
        key: sum((upload[key].double() for upload in uploads), start=torch.zeros((), dtype=torch.float64))
        for key in uploads[0]
    }


def take_server_step(shared: Tensors, total: Tensors, gram: Tensor, anchor: Tensor, ridge: float) -> Tensors:
    """The server's next point from what the clients said of the last one."""
    rows = total["counted"][1].clamp(min=1)
    moments = gaussian_classes.unpack(gram.double(), anchor.shape[1])
    mean = moments / moments[-1, -1].clamp(min=1)  # its last corner is the number of rows
    loss, gradient = total["counted"][0] / rows, total["slope"] / rows
    return state_to_tensors(
        logistic_regression.take_quasi_newton_step(
            state_from_tensors(shared), loss, gradient, mean, anchor.double(), ridge
        )
    )
