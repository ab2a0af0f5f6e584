"""Measure how much clients disagree about the head, as in the FedOT paper."""

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientAgreement:
    """The mean cosine over pairs of clients of the pseudo-gradients ΔW_i = W_i - W.

    W is what all clients were sent, W_i what client i uploads, in as many tensors as it has. Clients are added one by
    one, so that they need not be in memory together. A client that did not change has cosine 0 with all others; fewer
    than two clients have no pairs (nan).
    """

    def __init__(self, start: Sequence[Tensor]) -> None:
        self.start, self.clients, self.moved = start, 0, 0
        # The square of the sum of unit vectors contains the cosine of every pair.
        self.totals = [torch.zeros(tensor.shape, dtype=torch.float64) for tensor in start]

    def add(self, end: Sequence[Tensor]) -> None:
        moves = [(tensor - first).double() for tensor, first in zip(end, self.start, strict=True)]
        length = sum(tensor.square().sum().item() for tensor in moves) ** 0.5
        self.clients += 1
        if length > 0:
            self.moved += 1
            for total, move in zip(self.totals, moves, strict=True):
                total += move.div_(length)

    def mean(self) -> float:
        square = sum(total.square().sum().item() for total in self.totals)
        pairs = self.clients * (self.clients - 1)
        return (square - self.moved) / pairs if pairs else float("nan")


def largest_gradient_difference(start: Tensor, ends: Sequence[Tensor], steps: Sequence[int], rate: float) -> float:
    """Return the largest distance between the head gradients of two clients (Frobenius norm; nan below two).

    A client's gradient is the mean over its steps of this round, (W - W_i) / (lr * steps): exact for plain SGD, and off
    by a factor of up to 1 / (1 - momentum) and by weight_decay * W otherwise. Without steps it is zero.
    """
    if len(ends) < 2:
        return float("nan")
    pairs = zip(ends, steps, strict=True)
    gradients = torch.stack([(start - end).flatten() / (rate * max(count, 1)) for end, count in pairs])
    return torch.cdist(gradients, gradients).max().item()


def gradient_difference_bound(tau: float, conditions: Sequence[float]) -> float:
    """Return the bound 2τ (κ_i + κ_j) of theorem 4.1 for the two clients where it is largest.

    κ is the condition number of a client's map; orthogonal maps have κ = 1 and the least bound, 4τ. It holds for every
    minibatch gradient, hence for their mean over a round.
    """
    worst = sorted(conditions)[-2:]
    return 2 * tau * sum(worst) if len(worst) == 2 else float("nan")
