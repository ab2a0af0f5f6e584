"""Solve one logistic regression over all clients by quasi-Newton steps of the server (auto, probe).

The server's state is a NamedTuple; its tensors are saved under the name of the field and a prefix, and never sent.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fedvlm.core import Client, Frozen, Tensors
from fedvlm.errors import FederationError
from fedvlm.maths import gaussian_classes
from fedvlm.maths.logistic_regression import (
    MAX_GRADIENT_NORM,
    MAX_SAMPLE_LOSS,
    Evaluations,
    Head,
    QuasiNewtonState,
    loss_and_gradient,
    split_head,
    start_state,
    summed_cross_entropy,
    take_quasi_newton_step,
)

SERVER, OPTIMISER = "server ", "optimiser "  # prefixes of the server's tensors
S = TypeVar("S", bound=NamedTuple)


class ServerState(NamedTuple):
    """What the server keeps beside the head and the optimiser's state."""

    round: Tensor  # rounds that are done
    anchor: Tensor  # (classes, dim + 1): the zero-shot head, to which a ridge draws the solution
    gram: Tensor  # packed Σ x xᵀ over the samples of all clients, with a last coordinate of 1


def save_state(prefix: str, state: NamedTuple) -> Tensors:
    """Return the fields of a state as tensors."""
    return {f"{prefix}{key}": value for key, value in state._asdict().items()}


def load_state(prefix: str, kind: type[S], shared: Tensors) -> S:
    """Invert `save_state`."""
    return kind._make(shared[f"{prefix}{key}"] for key in kind._fields)


def is_server_state(shared: Tensors) -> bool:
    """Return False for a site's classifier, which has what the server sent after the last round."""
    return f"{SERVER}round" in shared


def zero_shot_head(frozen: Frozen) -> Tensor:
    """Return (classes, dim + 1): the zero-shot head, or zeros if the encoder has no text."""
    if frozen.text is None:
        return torch.zeros(len(frozen.classes), frozen.dim + 1)
    return torch.cat([frozen.scale * frozen.text, torch.zeros(len(frozen.classes), 1)], dim=1)


def initial_tensors(frozen: Frozen) -> Tensors:
    """Return the head and the server's state before the first round."""
    anchor, size = zero_shot_head(frozen), frozen.dim + 1
    state = ServerState(torch.zeros((), dtype=torch.int64), anchor, torch.zeros(size * (size + 1) // 2))
    return {**optimiser_tensors(start_state(anchor)), **save_state(SERVER, state)}


def optimiser_tensors(state: QuasiNewtonState) -> Tensors:
    """Return the head that clients evaluate next, and the optimiser's state."""
    return {**head_tensors(state.point), **save_state(OPTIMISER, state)}


def head_tensors(point: Tensor) -> Tensors:
    """Return the weight and bias of a head as they are sent."""
    return {key: value.float() for key, value in split_head(point)._asdict().items()}


def local_statistics(sent: Tensors, client: Client, min_samples: int) -> Tensors:
    """Return sums over a client's samples at the head it was sent: loss, gradient and validation loss.

    A client with too few samples returns zeros.
    """
    head = Head(sent["weight"], sent["bias"])
    loss, gradient = loss_and_gradient(head, client.x, client.y, MAX_SAMPLE_LOSS)
    n_samples, n_val = (client.y >= 0).sum(), (client.val_y >= 0).sum()
    val_loss = summed_cross_entropy(head.logits(client.val_x), client.val_y, MAX_SAMPLE_LOSS)
    totals = torch.stack([loss, n_samples, val_loss, n_val]).float()
    has_enough = n_samples >= min_samples
    return {"gradient": torch.where(has_enough, gradient, 0.0), "totals": torch.where(has_enough, totals, 0.0)}


def class_statistics(client: Client, n_classes: int, min_samples: int, sent: Tensors) -> Tensors:
    """Return class sums; samples of small classes form one unnamed class, if they are enough together.

    In a verified sum only of open classes, and of few samples only the diagonal of second moments.
    """
    is_small = gaussian_classes.class_membership(client.y, n_classes).sum(0) < min_samples
    rest = is_small[client.y.clamp(min=0)] & (client.y >= 0)
    has_enough = rest.sum() >= min_samples
    y = torch.where(rest, torch.where(has_enough, n_classes, -1), client.y)
    if "open" in sent:
        y = gaussian_classes.suppress_closed_classes(y, torch.cat([sent["open"], sent["open rest"][None]]) > 0)
    x = torch.where((y >= 0)[:, None], client.x, 0.0)
    sums = x.new_zeros(n_classes + 1, x.shape[1]).double().index_add(0, y.clamp(min=0), x.double())
    counts = gaussian_classes.class_membership(y, n_classes + 1).sum(0)
    gram = packed_gram(replace(client, y=y), 1)
    if "diagonal" in sent:
        gram = gaussian_classes.diagonal_of(gram, x.shape[1] + 1)
    key = "gram diagonal" if "diagonal" in sent else "gram"
    return {"counts": counts.float(), "sums": sums.float(), key: gram}


def total_gram(total: Tensors) -> Tensor:
    """Return the packed Σ x xᵀ over all clients, with a last coordinate of 1."""
    if "gram" in total:
        return total["gram"]
    sums = torch.cat([total["sums"], total["counts"][:, None]], dim=1)
    return gaussian_classes.gram_from_diagonal(total["gram diagonal"], total["counts"], sums)


def packed_gram(client: Client, min_samples: int) -> Tensor:
    """Return the packed Σ x xᵀ over samples with a last coordinate of 1; zeros for too few samples."""
    real = client.y >= 0
    x = torch.where(real[:, None], client.x.double(), 0.0)
    x = torch.cat([x, real.double()[:, None]], dim=1)
    return torch.where(real.sum() >= min_samples, gaussian_classes.gram(x), 0.0).float()


def check_norms(name: str, heads: Tensor, limit: float) -> None:
    """Refuse heads (..., classes, dim) with a class whose weights are longer than an honest one's."""
    if not (norm := float(heads.norm(dim=-1).max())) <= limit * (1 + 1e-5):
        problem = f"{name}: the verified sum leads to a head of norm {norm:.4g}, above the limit of {limit:g}"
        raise FederationError(f"{problem}; a member's upload was damaged or forged, and the round is void")


def sum_uploads(uploads: Sequence[Tensors]) -> Tensors:
    """Return the sum of the uploads in float64."""
    zero = torch.zeros((), dtype=torch.float64)
    return {key: sum((upload[key].double() for upload in uploads), start=zero) for key in uploads[0]}


def bound_moments(total: Tensors, gram: Tensor) -> gaussian_classes.Moments:
    """Return the moments of the named classes, with no more than samples of norm 1 can have."""
    counts = total["counts"].clamp(min=0)
    norms = total["sums"].norm(dim=1).clamp(min=1e-30)
    sums = total["sums"] * (counts / norms).clamp(max=1)[:, None]
    return gaussian_classes.pooled_moments(counts, sums, gram)


def add_evaluations(known: Evaluations, points: Tensor, total: Tensors) -> Evaluations:
    """Return the known evaluations and those of the points in the clients' sums."""
    losses, n_samples, val_losses, _ = total["totals"].unbind(1)
    n_samples = n_samples.clamp(min=1)
    gradients = total["gradient"] / n_samples[:, None, None]
    gradients = gradients * (MAX_GRADIENT_NORM / gradients.norm(dim=(1, 2), keepdim=True).clamp(min=1e-30)).clamp(max=1)
    new = Evaluations(points.double(), gradients, losses / n_samples, val_losses)
    return Evaluations(*(torch.cat([before, after]) for before, after in zip(known, new, strict=True)))


def take_server_step(shared: Tensors, total: Tensors, gram: Tensor, anchor: Tensor, ridge: float) -> Tensors:
    """Return the head and the optimiser's state after a step by the clients' sums."""
    n_samples = total["totals"][1].clamp(min=1)
    moments = gaussian_classes.unpack(gram.double(), anchor.shape[1])
    mean = moments / moments[-1, -1].clamp(min=1)  # the last entry is the number of samples
    loss, gradient = total["totals"][0] / n_samples, total["gradient"] / n_samples
    state = load_state(OPTIMISER, QuasiNewtonState, shared)
    return optimiser_tensors(take_quasi_newton_step(state, loss, gradient, mean, anchor.double(), ridge))


def gaussian_part(gaussian: Tensor) -> Tensors:
    """Return the head of the Gaussian classes, if all classes have statistics."""
    has_all_classes = (gaussian[:, -1] > gaussian_classes.ABSENT_CLASS_LOGIT).all()
    return {"gaussian": gaussian} if has_all_classes else {}


def heads_to_mix(sent: Tensors, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """Return candidates for the shared regression, the anchor last, and the heads that each of them is mixed with."""
    mean = Head(sent["weight"], sent["bias"]).joined()[None]
    fixed = [anchor[None]] * bool(anchor.any()) + [sent[key][None] for key in ("gaussian",) if key in sent]
    return torch.cat([sent["candidates"], mean, anchor[None]]), torch.cat([mean[:0], *fixed])
