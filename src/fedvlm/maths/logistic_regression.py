"""Fit multinomial logistic regression with a ridge towards an anchor, at one client or over a federation.

The objective is the mean cross-entropy plus ridge/2 · |W - W_anchor|²; the bias has nearly no ridge. With
C = 1/(samples · ridge) it is scikit-learn's LogisticRegression. It is our own code because it fits all ridges in one
singular basis and under vmap: iterations are fixed and a fit that has converged stays where it is.

Over a federation the server takes quasi-Newton steps from summed gradients. Points are (classes, dim + 1), the last
column being the bias. Gradients are those of the cross-entropy alone; the ridge is added at the server, so that it may
change from step to step.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from fedvlm.tensors import remember_latest

RIDGES = tuple(10.0**-k for k in range(1, 8))  # from hardly any change to nearly separable
DEFAULT_RIDGE = 1e-4  # without validation samples
BIAS_RIDGE = 1e-9  # of the bias: keeps that of a class without samples finite
MAX_STEPS = 60
LINE_SEARCH_STEPS = 4
NEWTON_STEPS, CONJUGATE_STEPS = 24, 40  # of a fit that must converge
CONJUGATE_TOLERANCE = 1e-6  # of the squared residual, at which a Newton direction is good enough
LBFGS_MEMORY = 10  # steps that the curvature is estimated from
CURVATURE = 0.25  # of a sample's loss in the metric: half of the bound 1/2, which few samples reach
GRADIENT_TOLERANCE = 1e-10  # at which a fit has converged
QUASI_NEWTON_MEMORY = 8
RELATIVE_RIDGES = (4e-2, 4e-3, 4e-4, 4e-5, 4e-6)  # of a path over clients, per curvature
MIN_RELATIVE_CURVATURE = 1e-3  # of the largest; directions below it are left to the metric
MAX_SAMPLE_LOSS = 10.0  # to which a sample's loss is clipped before it is added up and uploaded
MAX_GRADIENT_NORM = 2.0  # of a sample with a unit embedding and a coordinate of 1: √2 · √2
SHRINK_FACTOR, GROWTH_FACTOR = 0.25, 2.0  # of the step fraction, after a step that failed or succeeded


class Head(NamedTuple):
    """A linear classifier, or several."""

    weight: Tensor  # (..., classes, dim)
    bias: Tensor  # (..., classes)

    def logits(self, x: Tensor) -> Tensor:
        """Return (..., samples, classes)."""
        return x @ self.weight.mT + self.bias[..., None, :]

    def joined(self) -> Tensor:
        """Return (..., classes, dim + 1): the bias as the weight of a coordinate that is 1."""
        return torch.cat([self.weight, self.bias[..., None]], dim=-1)


def split_head(joined: Tensor) -> Head:
    """Invert `Head.joined`."""
    return Head(joined[..., :-1], joined[..., -1])


class RidgePath(NamedTuple):
    """One head per ridge."""

    heads: Head
    max_gradient: Tensor  # (ridges,) largest entry of the remaining gradient


def fit_ridge_path(
    x: Tensor,
    y: Tensor,
    ridges: Tensor,
    anchor: Head,
    open_classes: Tensor,
    steps: int = MAX_STEPS,
    bias_ridge: float | Tensor = BIAS_RIDGE,
    class_weights: Tensor | None = None,
) -> RidgePath:
    """Fit a head per ridge over the classes that are open; the others keep the anchor's row. y = -1 is padding.

    The anchor may be one for each ridge.

    W - W_anchor lies in the span of the samples, so it is fitted in their singular basis, in which the metric
    curvature · S² / n + ridge is diagonal for every ridge at once. The fit has the precision of `ridges`.
    """
    regression = _prepare_regression(x, y, ridges, anchor, open_classes, bias_ridge, class_weights)
    position = regression.zeros()
    logits, current_gradient = regression.start, regression.first_gradient()
    past: list[tuple[Tensor, Tensor]] = []
    for _ in range(steps):
        direction = -lbfgs_direction(current_gradient, past, lambda q: q)
        step, logit_step = regression.search(logits, position, direction, LINE_SEARCH_STEPS)
        has_converged = (current_gradient.abs().amax((1, 2)) < GRADIENT_TOLERANCE)[:, None, None]
        step = torch.where(has_converged, 0.0, step)
        position, logits = position + step, logits + torch.where(has_converged, 0.0, logit_step)
        if not is_functorch_wrapped_tensor(has_converged) and bool(has_converged.all()):
            break  # further steps would be zero
        next_gradient = regression.gradient(logits, position)
        past = [*past, (step, next_gradient - current_gradient)][-LBFGS_MEMORY:]
        current_gradient = next_gradient
    return regression.path(position, current_gradient)


def fit_converged_path(
    x: Tensor, y: Tensor, ridges: Tensor, anchor: Head, open_classes: Tensor, class_weights: Tensor | None = None
) -> RidgePath:
    """Fit what `fit_ridge_path` fits by Newton steps, which also converge where classes are nearly separable."""
    regression = _prepare_regression(x, y, ridges, anchor, open_classes, BIAS_RIDGE, class_weights)
    position, logits = regression.zeros(), regression.start
    for _ in range(NEWTON_STEPS):
        direction = regression.newton_direction(logits, position)
        step, logit_step = regression.search(logits, position, direction, 2 * LINE_SEARCH_STEPS)
        points = ((logits, position), (logits + logit_step, position + step))
        before, after = (regression.objective(*point) for point in points)
        is_better = (after <= before)[:, None, None]
        position = position + torch.where(is_better, step, 0.0)
        logits = logits + torch.where(is_better, logit_step, 0.0)
    return regression.path(position, regression.gradient(logits, position))


class _Regression(NamedTuple):
    """A regression in the singular basis of its samples, with coordinates scaled by the metric of every ridge."""

    rows: Tensor  # (samples, rank + 1) in the basis, with a last coordinate of 1
    right: Tensor  # (rank, dim) the basis
    truth: Tensor  # (samples, classes) 1 for the true class
    sample_weights: Tensor  # (samples,) 1 / number of samples, times the weight of the class; 0 for padding
    ridge_weights: Tensor  # (ridges, rank + 1, 1) of the scaled coordinates
    scale: Tensor  # (ridges, rank + 1, 1)
    start: Tensor  # (ridges, samples, classes) logits of the anchor
    anchor: Head

    def zeros(self) -> Tensor:
        return self.rows.new_zeros(len(self.scale), self.rows.shape[1], self.truth.shape[1])

    def objective(self, logits: Tensor, position: Tensor) -> Tensor:
        """Return (ridges,)."""
        losses = logits.logsumexp(-1) - torch.where(self.truth > 0, logits, 0.0).sum(-1)
        return (losses * self.sample_weights).sum(-1) + (self.ridge_weights * position.square()).sum((1, 2)) / 2

    def gradient(self, logits: Tensor, position: Tensor) -> Tensor:
        error = (logits.softmax(-1) - self.truth) * self.sample_weights[:, None]
        return self.scale * multiply_all(self.rows.mT, error) + self.ridge_weights * position

    def first_gradient(self) -> Tensor:
        """Return the gradient at the anchor, whose logits are the same for all ridges."""
        return self.scale * (self.rows.mT @ ((self.start[0].softmax(-1) - self.truth) * self.sample_weights[:, None]))

    def search(self, logits: Tensor, position: Tensor, direction: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Return the step along a direction that minimises the convex objective, and the change of the logits by it.

        A Newton step that leaves the bracket of the minimum, or crosses half of it, is replaced by bisection or growth.
        """
        change = multiply_all(self.rows, self.scale * direction)
        ridge_curvature = (self.ridge_weights * direction * direction).sum((1, 2))
        ridge_gradient = (self.ridge_weights * direction * position).sum((1, 2))
        length = torch.ones_like(ridge_curvature)
        low, high = torch.zeros_like(ridge_curvature), torch.full_like(ridge_curvature, torch.inf)
        derivatives = self.derivatives(logits, change)
        for _ in range(steps):
            loss_first, loss_second = derivatives(length)
            first, second = loss_first + ridge_gradient + length * ridge_curvature, loss_second + ridge_curvature
            low, high = torch.where(first < 0, length, low), torch.where(first < 0, high, length)
            middle = torch.where(high.isinf(), 4 * length, (low + high) / 2)
            newton_length = length - first / second.clamp(min=1e-30)
            max_move = torch.minimum((high - low) / 2, 16 * length.clamp(min=1))
            is_near = (newton_length >= low) & (newton_length <= high) & ((newton_length - length).abs() <= max_move)
            length = torch.where(is_near, newton_length, middle)
        length = length[:, None, None]
        return length * direction, length * change

    def derivatives(self, logits: Tensor, change: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return what gives the first two derivatives of the loss at (ridges,) fractions of a change of the logits."""
        if logits.shape[-1] == 2:  # only the difference of the two matters
            margin, margin_change = logits[..., 1] - logits[..., 0], change[..., 1] - change[..., 0]
            weighted, truth = margin_change * self.sample_weights, self.truth[:, 1]

            def binary(length: Tensor) -> tuple[Tensor, Tensor]:
                p = torch.sigmoid(margin + length[:, None] * margin_change)
                return ((p - truth) * weighted).sum(-1), (p * (1 - p) * weighted * margin_change).sum(-1)

            return binary
        true_change = (self.truth * change).sum(-1)

        def several(length: Tensor) -> tuple[Tensor, Tensor]:
            p = (logits + length[:, None, None] * change).softmax(-1)
            mean = (p * change).sum(-1)
            spread = (p * change.square()).sum(-1) - mean.square()
            return ((mean - true_change) * self.sample_weights).sum(-1), (spread * self.sample_weights).sum(-1)

        return several

    def newton_direction(self, logits: Tensor, position: Tensor) -> Tensor:
        """Return the Newton direction by conjugate gradients, with the diagonal of the Hessian as the metric."""
        p = logits.softmax(-1)
        weighted = p * self.sample_weights[:, None]
        diagonal = multiply_all(self.rows.square().mT, weighted * (1 - p)).abs()
        diagonal = self.scale.square() * diagonal + self.ridge_weights

        def multiply_hessian(v: Tensor) -> Tensor:
            change = multiply_all(self.rows, self.scale * v)
            curved = weighted * (change - (p * change).sum(-1, keepdim=True))
            return self.scale * multiply_all(self.rows.mT, curved) + self.ridge_weights * v

        return conjugate_gradients(multiply_hessian, -self.gradient(logits, position), diagonal)

    def path(self, position: Tensor, gradient: Tensor) -> RidgePath:
        change = self.scale * position
        weight = self.anchor.weight + (self.right.mT @ change[:, :-1]).mT  # of the anchor or of each ridge's
        return RidgePath(Head(weight, self.anchor.bias + change[:, -1]), gradient.abs().amax((1, 2)))


def _prepare_regression(
    x: Tensor,
    y: Tensor,
    ridges: Tensor,
    anchor: Head,
    open_classes: Tensor,
    bias_ridge: float | Tensor,
    class_weights: Tensor | None,
) -> _Regression:
    dtype, real = ridges.dtype, y >= 0
    sample_weights = real.to(dtype) / real.sum().clamp(min=1)
    if class_weights is not None:
        sample_weights = sample_weights * class_weights[y.clamp(min=0)]
    x = x.to(dtype)
    rows, size, right = _singular_basis(x, y)
    ridges = ridges[:, None]
    ridge_weights = torch.cat([ridges.expand(-1, len(size)), ridges * 0 + bias_ridge], 1)
    curvature = torch.cat([CURVATURE * size.square() / real.sum().clamp(min=1), size.new_full((1,), CURVATURE)])
    scale = (curvature + ridge_weights).rsqrt()[:, :, None]  # (ridges, rank + 1, 1)
    ridge_weights = ridge_weights[:, :, None] * scale.square()
    truth = (y.clamp(min=0)[:, None] == torch.arange(len(open_classes), device=y.device)).to(dtype)
    closed = torch.where(open_classes, 0.0, -torch.inf)
    x = torch.where(real[:, None], x, 0.0).to(anchor.weight.dtype)
    start = (anchor.logits(x).to(dtype) + closed).expand(len(ridges), -1, -1)
    return _Regression(rows, right, truth, sample_weights, ridge_weights, scale, start, anchor)


@remember_latest  # one decomposition serves several anchors
def _singular_basis(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (samples, rank + 1) samples in their singular basis with a last coordinate of 1, values and the basis."""
    x = torch.where((y >= 0)[:, None], x, 0.0)
    left_vectors, size, right = torch.linalg.svd(x, full_matrices=False)
    return torch.cat([left_vectors * size, torch.ones_like(x[:, :1])], dim=1), size, right


def conjugate_gradients(multiply: Callable[[Tensor], Tensor], target: Tensor, diagonal: Tensor) -> Tensor:
    """Solve positive definite systems, one for each leading index, until the residual is small or steps are over."""
    solution, residual = torch.zeros_like(target), target
    direction = residual / diagonal
    first = size = dot(residual, direction)
    for _ in range(CONJUGATE_STEPS):
        product = multiply(direction)
        curvature = dot(direction, product)
        is_active = (size > CONJUGATE_TOLERANCE * first) & (curvature > 0)
        length = torch.where(is_active, size / torch.where(is_active, curvature, 1.0), 0.0)
        solution, residual = solution + length * direction, residual - length * product
        next_size = dot(residual, residual / diagonal)
        ratio = next_size / torch.where(is_active, size, 1.0)
        direction = torch.where(is_active, residual / diagonal + ratio * direction, direction)
        size = torch.where(is_active, next_size, size)
    return solution


def multiply_all(matrix: Tensor, matrices: Tensor) -> Tensor:
    """Return the matrix times each of the matrices, as one product, because narrow products are slow.

    Of two classes the second column is computed: here the first is always its negative, as probabilities add up to 1.
    """
    if matrices.shape[-1] == 2:
        column = multiply_all(matrix, matrices[..., 1:])
        return torch.cat([-column, column], dim=-1)
    wide = matrix @ matrices.transpose(0, 1).flatten(1)
    return wide.reshape(len(matrix), len(matrices), -1).transpose(0, 1)


def lbfgs_direction(
    gradient: Tensor, history: list[tuple[Tensor, Tensor]], metric: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the gradient times the inverse curvature estimated from past steps (L-BFGS).

    `metric` applies the prior inverse curvature. A pair without curvature is skipped.
    """
    pairs = []
    for step, gradient_change in reversed(history):
        inner = dot(step, gradient_change)
        inverse_product = torch.where(inner > 1e-30, 1 / inner.clamp(min=1e-30), 0.0)
        coefficient = inverse_product * dot(step, gradient)
        gradient = gradient - coefficient * gradient_change
        pairs.append((step, gradient_change, inverse_product, coefficient, inner))
    gradient, gain = metric(gradient), torch.ones_like(dot(gradient, gradient))
    for _, gradient_change, inverse_product, _, inner in pairs:  # from the latest, which sets the scale
        is_first = (gain == 1.0) & (inverse_product > 0)
        gain = torch.where(is_first, inner / dot(gradient_change, metric(gradient_change)).clamp(min=1e-30), gain)
    gradient = gain * gradient
    for step, gradient_change, inverse_product, coefficient, _ in reversed(pairs):
        gradient = gradient + (coefficient - inverse_product * dot(gradient_change, gradient)) * step
    return gradient


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of matrices, over leading axes."""
    return (a * b).sum((-2, -1), keepdim=True)


def summed_cross_entropy(
    logits: Tensor, y: Tensor, max_loss: float = torch.inf, class_weights: Tensor | None = None
) -> Tensor:
    """Return the (...,) summed cross-entropy of (..., samples, classes), each at most `max_loss`; y = -1 is padding."""
    log_probabilities = logits.log_softmax(-1)
    index = y.clamp(min=0).expand(log_probabilities.shape[:-1])[..., None]
    losses = (-log_probabilities.gather(-1, index)[..., 0]).clamp(max=max_loss)
    if class_weights is not None:
        losses = losses * class_weights[y.clamp(min=0)]
    return torch.where(y >= 0, losses, 0.0).sum(-1)


def loss_and_gradient(head: Head, x: Tensor, y: Tensor, max_loss: float = torch.inf) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy and its gradient (classes, dim + 1) as sums over samples, which add up over clients."""
    real, index = (y >= 0)[:, None], y.clamp(min=0)[:, None]
    x = torch.where(real, x, 0.0)
    log_probabilities = head.logits(x).log_softmax(-1)
    losses = (-log_probabilities.gather(1, index)).clamp(max=max_loss)
    error = log_probabilities.exp().scatter_add(1, index, torch.full_like(losses, -1.0))
    bordered = torch.cat([x, real.to(x.dtype)], dim=1)  # zero for padding
    return torch.where(real, losses, 0.0).sum(), error.mT @ bordered


def select_ridge(path: RidgePath, ridges: Tensor, x: Tensor, y: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Return the index of the ridge with the highest validation likelihood, under a weak prior around DEFAULT_RIDGE."""
    distance = (ridges / DEFAULT_RIDGE).log10()
    losses = summed_cross_entropy(path.heads.logits(x.double()), y, class_weights=class_weights)
    return (losses + distance.square() / 8).argmin()


def fit_best_head(
    x: Tensor,
    y: Tensor,
    val_x: Tensor,
    val_y: Tensor,
    anchor: Head,
    open_classes: Tensor,
    class_weights: Tensor | None = None,
) -> tuple[Head, Tensor, Tensor]:
    """Return the head of the ridge with the highest validation likelihood, the ridge and the remaining gradient.

    The ridge is chosen among fits of few steps; that of the chosen one is continued until it converges.
    """
    ridges = torch.tensor(RIDGES, dtype=torch.float64)
    first = fit_ridge_path(x, y, ridges, anchor, open_classes, class_weights=class_weights)
    best = select_ridge(first, ridges, val_x, val_y, class_weights)
    ridge = ridges.index_select(0, best[None])
    path = fit_converged_path(x, y, ridge, anchor, open_classes, class_weights)
    return Head(path.heads.weight[0], path.heads.bias[0]), ridge[0], path.max_gradient[0]


class QuasiNewtonState(NamedTuple):
    """The server's state between rounds."""

    point: Tensor  # that clients evaluate next
    base: Tensor  # best point so far
    gradient: Tensor  # at the base
    loss: Tensor  # at the base; infinite before the first
    step_fraction: Tensor  # of a full step that is taken
    steps: Tensor  # (QUASI_NEWTON_MEMORY, ...) between points, zero where there was none
    gradient_changes: Tensor  # (QUASI_NEWTON_MEMORY, ...) of these steps


def start_state(point: Tensor) -> QuasiNewtonState:
    """Return the state before the first round."""
    point, none = point.double(), torch.zeros(QUASI_NEWTON_MEMORY, *point.shape, dtype=torch.float64)
    unit = torch.ones((), dtype=torch.float64)
    return QuasiNewtonState(point, point, torch.zeros_like(point), unit * torch.inf, unit, none, none)


def take_quasi_newton_step(
    state: QuasiNewtonState, loss: Tensor, gradient: Tensor, gram: Tensor, anchor: Tensor, ridge: float
) -> QuasiNewtonState:
    """Take one step by the mean loss and gradient at `state.point`; `gram` is the mean of bordered x xᵀ.

    A point that is worse than the base is dropped, but its curvature is used.
    """
    ridge_weights = torch.full_like(gram[0], ridge)
    ridge_weights[-1] = BIAS_RIDGE
    root = _root(CURVATURE * gram.double(), ridge_weights)

    def objective(loss: Tensor, at: Tensor) -> Tensor:
        return loss + (ridge_weights * (at - anchor).square()).sum() / 2

    step, gradient_change = state.point - state.base, gradient - state.gradient
    steps = torch.cat([state.steps[1:], step[None]])
    gradient_changes = torch.cat([state.gradient_changes[1:], gradient_change[None]])
    is_better = objective(loss, state.point) <= objective(state.loss, state.base)
    base, gradient = torch.where(is_better, state.point, state.base), torch.where(is_better, gradient, state.gradient)
    longer, shorter = (state.step_fraction * GROWTH_FACTOR).clamp(max=1.0), state.step_fraction * SHRINK_FACTOR
    step_fraction = torch.where(is_better, longer, shorter)
    history = [(s, t + ridge_weights * s) for s, t in zip(steps, gradient_changes, strict=True)]
    objective_gradient = gradient + ridge_weights * (base - anchor)
    direction = lbfgs_direction(objective_gradient, history, lambda q: torch.cholesky_solve(q.mT, root).mT)
    point = (base - step_fraction * direction).float().double()  # as it is sent
    loss = torch.where(is_better, loss, state.loss)
    return QuasiNewtonState(point, base, gradient, loss, step_fraction, steps, gradient_changes)


class Evaluations(NamedTuple):
    """Objective of all clients' samples at several points; a point is (classes, dim + 1)."""

    points: Tensor  # (points, classes, dim + 1)
    gradients: Tensor  # (points, classes, dim + 1) of the mean loss
    losses: Tensor  # (points,) mean loss of the training samples
    val_losses: Tensor  # (points,) summed loss of the validation samples


def path_points(known: Evaluations, gram: Tensor, anchor: Tensor) -> Tensor:
    """Return (RELATIVE_RIDGES, classes, dim + 1): the next point of the regression for every ridge.

    `gram` is Σ x xᵀ with a last coordinate of 1. At an anchor of zero all classes are equally likely, so the curvature
    is known, and the first points are the solutions of a ridge regression.
    """
    mean = gram / gram[-1, -1].clamp(min=1)  # the last entry is the number of samples
    curvature = CURVATURE if anchor.any() else 1 / len(anchor)
    return torch.stack(
        [
            within_radius(multisecant_step(known, mean, anchor, ridge, curvature), anchor, ridge)
            for ridge in (curvature * relative_ridge for relative_ridge in RELATIVE_RIDGES)
        ]
    )


def within_radius(point: Tensor, anchor: Tensor, ridge: float) -> Tensor:
    """Return the point, or the one in its direction that is as far from the anchor as a minimiser can be.

    At a minimiser ridge/2 · |W - W_anchor|² is at most the loss at the anchor, of which MAX_SAMPLE_LOSS is a bound.
    """
    change = point - anchor
    radius = (2 * MAX_SAMPLE_LOSS / ridge) ** 0.5
    bounded: Tensor = anchor + change * (radius / change.norm().clamp(min=1e-30)).clamp(max=1)
    return bounded


def multisecant_step(known: Evaluations, gram: Tensor, anchor: Tensor, ridge: float, curvature: float) -> Tensor:
    """Return the minimiser of a quadratic model of mean loss + ridge/2 · |W - W_anchor|².

    The model is exact at the best point. Its curvature is `curvature` · gram, corrected by the changes of the gradient
    between the best and all other points (block BFGS). From one point this is a step in the Gram metric.
    """
    ridge_weights = torch.full_like(gram[0], ridge)
    ridge_weights[-1] = BIAS_RIDGE
    root = _root(curvature * gram, ridge_weights)
    offsets = known.points - anchor
    penalties = torch.stack([(ridge_weights * offset.square()).sum() for offset in offsets]) / 2
    gradients = offsets.mul_(ridge_weights).add_(known.gradients)
    best = int((known.losses + penalties).argmin())
    others = [i for i in range(len(gradients)) if i != best]
    steps, changes = (values[others].sub_(values[best]) for values in (known.points, gradients))
    direction = block_bfgs_direction(
        gradients[best], steps, changes, lambda q: torch.cholesky_solve(q.mT.contiguous(), root).mT
    )
    return known.points[best] - direction


def block_bfgs_direction(
    gradient: Tensor, steps: Tensor, changes: Tensor, metric: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the inverse curvature times the gradient; the curvature maps all `steps` to `changes` at once.

    `metric` is the inverse curvature known beforehand, which is rescaled to agree with the shortest step.
    Directions without curvature do not count.
    """
    lengths = steps.flatten(1).norm(dim=1)
    keep = lengths > 0
    if not keep.any():
        return metric(gradient)
    if not keep.all():
        steps, changes, lengths = steps[keep], changes[keep], lengths[keep]
    shortest, s, y = int(lengths.argmin()), steps.flatten(1), changes.flatten(1)
    inner = s @ y.mT / (lengths[:, None] * lengths)
    values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    known = values > MIN_RELATIVE_CURVATURE * values.max().clamp(min=1e-30)
    inverse = (vectors[:, known] / values[known]) @ vectors[:, known].mT  # of the curvature in the span of the steps
    scaled = metric(changes[shortest] / lengths[shortest]).flatten()
    gain = (inner[shortest, shortest] / (y[shortest] @ scaled / lengths[shortest]).clamp(min=1e-30)).clamp(1e-6)
    along = inverse @ (s @ gradient.flatten() / lengths)
    rest = gain * metric((gradient.flatten() - y.mT @ (along / lengths)).view_as(gradient)).flatten()
    direction: Tensor = rest + s.mT @ ((along - inverse @ (y @ rest / lengths)) / lengths)
    return direction.view_as(gradient)


def _root(curvature: Tensor, ridge_weights: Tensor) -> Tensor:
    """Return the Cholesky factor of the sum.

    Of a curvature that is not positive (robust means, or an attack) negative eigenvalues are dropped, so that the step
    stays a descent step.
    """
    jitter = 1e-12 * (curvature.diagonal() + ridge_weights).abs().mean()
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(_add_diagonal(curvature, ridge_weights + jitter))
    if int(failed):
        values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
        curvature = (vectors * values.clamp(min=0)) @ vectors.mT
        jitter = 1e-12 * (curvature.diagonal() + ridge_weights).mean()
        root = torch.linalg.cholesky(_add_diagonal((curvature + curvature.mT) / 2, ridge_weights + jitter))
    return root


def _add_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    matrix = matrix.clone()
    matrix.diagonal().add_(diagonal)
    return matrix
