"""How much clients disagree about the head, as the FedOT paper measures it."""

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientAgreement:
    """The mean cosine over pairs of clients of the pseudo-gradients ΔW_i = W_i - W.

    W is what all clients were sent, W_i what client i sends back, in as many tensors as it has.
    Clients come one by one: no two of them have to be there at once. One that did not move has no
    direction and agrees with none (0); fewer than two clients have no pairs (nan).
    """

    def __init__(self, start: Sequence[Tensor]) -> None:
        self.start, self.clients, self.moved = start, 0, 0
        # The sum of unit vectors has every pair in its square.
        self.totals = [torch.zeros(tensor.shape, dtype=torch.float64) for tensor in start]

    def add(self, end: Sequence[Tensor]) -> None:
        moves = [_move(tensor, first) for tensor, first in zip(end, self.start, strict=True)]
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


def _move(end: Tensor, start: Tensor) -> Tensor:
    return (end - start).double()


def largest_gradient_difference(start: Tensor, ends: Sequence[Tensor], steps: Sequence[int], rate: float) -> float:
    """The largest distance between two clients' head gradients (Frobenius norm; nan below two).

    A client's gradient is the mean over its steps of this round, (W - W_i) / (rate * steps): exact
    for plain SGD, and off by a factor within 1 / (1 - momentum) and by decay * W otherwise.
    A client without steps has gradient zero.
    """
    if len(ends) < 2:
        return float("nan")
    gradients = torch.stack(
        [(start - end).flatten() / (rate * max(count, 1)) for end, count in zip(ends, steps, strict=True)]
    )
    return torch.cdist(gradients, gradients).max().item()


def gradient_difference_bound(tau: float, conditions: Sequence[float]) -> float:
    """The bound 2τ (κ_i + κ_j) of theorem 4.1 for the two clients where it is largest.

    κ is the condition number of a client's map; orthogonal maps have κ = 1 and the least
    bound, 4τ. Every minibatch gradient obeys it, hence so does their mean over a round.
    """
    worst = sorted(conditions)[-2:]
    return 2 * tau * sum(worst) if len(worst) == 2 else float("nan")
