"""Logistic regression by its laws: scikit-learn's solution, anchor, padding, clients."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.func import vmap

from fedvlm.maths import calibration, logistic_regression
from fedvlm.record import MAX_CONVERGED_GRADIENT

CLASSES, DIM, ROWS = 5, 24, 90
ALL = torch.ones(CLASSES, dtype=torch.bool)
NOTHING = logistic_regression.Head(torch.zeros(CLASSES, DIM), torch.zeros(CLASSES))


def rows(seed=0, count=ROWS):
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(1)) + 1
    y = torch.arange(count) % CLASSES
    noise = 1.5 * torch.randn(count, DIM, generator=draw)
    return torch.nn.functional.normalize(centres[y] + noise, dim=1), y


def ridges(*values):
    return torch.tensor(values, dtype=torch.float64)


def anchor(seed=3):
    draw = torch.Generator().manual_seed(seed)
    return logistic_regression.Head(torch.randn(CLASSES, DIM, generator=draw), torch.zeros(CLASSES))


@pytest.mark.parametrize("ridge", [1e-1, 1e-3, 1e-5])
def test_fit_is_the_solution_of_scikit_learn(ridge):
    x, y = rows()
    theirs = LogisticRegression(C=1 / (ROWS * ridge), tol=1e-12, max_iter=20_000)
    theirs.fit(x.double().numpy(), y.numpy())
    actual = (
        logistic_regression.fit_ridge_path(x, y, ridges(ridge), NOTHING, ALL).heads.logits(x.double())[0].softmax(1)
    )
    gap = actual - torch.from_numpy(theirs.predict_proba(x.double().numpy()))
    assert gap.abs().max() < 1e-4


def test_a_strong_ridge_is_the_anchor_and_a_weak_one_fits_the_rows():
    x, y = rows()
    path = logistic_regression.fit_ridge_path(x, y, ridges(1e6, 1e-7), anchor(), ALL)
    assert torch.allclose(path.heads.weight[0], anchor().weight.double(), atol=1e-5)
    assert (path.heads.logits(x.double())[1].argmax(1) == y).all()


def test_heads_for_all_ridges_at_once_are_those_one_by_one():
    x, y = rows()
    path = logistic_regression.fit_ridge_path(x, y, ridges(1e-2, 1e-3), anchor(), ALL)
    for number, ridge in enumerate((1e-2, 1e-3)):
        head = logistic_regression.fit_ridge_path(x, y, ridges(ridge), anchor(), ALL).heads
        assert torch.allclose(path.heads.weight[number], head.weight[0], atol=1e-6)


def test_padding_and_vmap_change_nothing():
    x, y = rows()
    plain = logistic_regression.fit_ridge_path(x, y, ridges(1e-3), NOTHING, ALL).heads.weight
    wide = torch.cat([x, torch.full((7, DIM), 7.0)])
    labels = torch.cat([y, torch.full((7,), -1)])
    weights = vmap(lambda x, y: logistic_regression.fit_ridge_path(x, y, ridges(1e-3), NOTHING, ALL).heads.weight)(
        torch.stack([wide, wide]), torch.stack([labels, labels])
    )
    assert torch.allclose(weights[1], plain, atol=1e-7)


def test_a_class_that_is_not_open_keeps_the_row_of_its_anchor():
    x, y = rows()
    has_samples = torch.tensor([True, True, False, True, True])
    path = logistic_regression.fit_ridge_path(x, torch.where(y == 2, 0, y), ridges(1e-3), anchor(), has_samples)
    assert torch.equal(path.heads.weight[0, 2], anchor().weight[2].double())
    assert path.max_gradient.max() < 1e-6


def test_a_fit_that_has_arrived_stays_where_it_is():
    x, y = rows()
    short, long = (logistic_regression.fit_ridge_path(x, y, ridges(1e-1), NOTHING, ALL, steps) for steps in (40, 80))
    assert short.max_gradient.max() < logistic_regression.GRADIENT_TOLERANCE
    assert torch.equal(short.heads.weight, long.heads.weight)


@pytest.mark.parametrize(("count", "classes"), [(120, 40), (80, 20), (40, 2)])
def test_a_fit_of_many_classes_arrives_at_every_ridge(count, classes):
    draw = torch.Generator().manual_seed(0)
    centres, y = torch.randn(classes, 64, generator=draw), torch.arange(count) % classes
    x = torch.nn.functional.normalize(centres[y] + torch.randn(count, 64, generator=draw), dim=1)
    nothing = logistic_regression.Head(torch.zeros(classes, 64), torch.zeros(classes))
    all_classes = torch.ones(classes, dtype=torch.bool)
    assert (
        logistic_regression.fit_ridge_path(
            x, y, ridges(*logistic_regression.RIDGES), nothing, all_classes
        ).max_gradient.max()
        < 1e-4
    )


@pytest.mark.parametrize(("count", "classes"), [(60, 2), (256, 16), (120, 40)])
def test_newton_steps_converge_at_every_ridge_also_for_separable_classes(count, classes):
    draw = torch.Generator().manual_seed(1)
    centres, y = torch.randn(classes, 64, generator=draw), torch.arange(count) % classes
    x = torch.nn.functional.normalize(centres[y] + 1.5 * torch.randn(count, 64, generator=draw), dim=1)
    nothing = logistic_regression.Head(torch.zeros(classes, 64), torch.zeros(classes))
    samples = (x, y, ridges(*logistic_regression.RIDGES), nothing, torch.ones(classes, dtype=torch.bool))
    fast, exact = (
        fit(*samples) for fit in (logistic_regression.fit_ridge_path, logistic_regression.fit_converged_path)
    )
    assert exact.max_gradient.max() < MAX_CONVERGED_GRADIENT
    converged = fast.max_gradient < logistic_regression.GRADIENT_TOLERANCE  # there both are the solution
    assert converged.any()
    assert torch.allclose(fast.heads.weight[converged], exact.heads.weight[converged], rtol=1e-4, atol=1e-4)


def test_slopes_of_clients_add_up_to_those_of_all_rows_and_are_the_derivative():
    x, y = rows()
    loss, gradient = logistic_regression.loss_and_gradient(anchor(), x, y)
    parts = [logistic_regression.loss_and_gradient(anchor(), x[part], y[part]) for part in (slice(40), slice(40, None))]
    assert torch.allclose(sum(part[1] for part in parts), gradient, atol=1e-4)
    joined = anchor().joined().requires_grad_()
    total_loss = logistic_regression.summed_cross_entropy(logistic_regression.split_head(joined).logits(x), y)
    total_loss.backward()
    assert torch.allclose(total_loss, loss) and torch.allclose(joined.grad, gradient, atol=1e-4)


def test_without_validation_rows_the_usual_ridge_is_chosen():
    x, y = rows()
    all_ridges = ridges(*logistic_regression.RIDGES)
    path = logistic_regression.fit_ridge_path(x, y, all_ridges, NOTHING, ALL, steps=5)
    assert (
        all_ridges[logistic_regression.select_ridge(path, all_ridges, x[:0], y[:0])]
        == logistic_regression.DEFAULT_RIDGE
    )


@pytest.mark.parametrize("ridge", [1e-2, 1e-4])
def test_the_servers_steps_reach_the_pooled_solution(ridge):
    x, y = rows()
    start = anchor().joined()
    bordered = torch.cat([x, torch.ones(ROWS, 1)], dim=1).double()
    state = logistic_regression.start_state(start)

    def objective(joined):
        loss = (
            logistic_regression.summed_cross_entropy(
                logistic_regression.split_head(joined.double()).logits(x.double()), y
            )
            / ROWS
        )
        return loss + ridge / 2 * (joined - start)[:, :-1].double().square().sum()

    for _ in range(20):
        loss, gradient = logistic_regression.loss_and_gradient(
            logistic_regression.split_head(state.point.float()), x, y
        )
        mean_loss_and_gradient = loss.double() / ROWS, gradient.double() / ROWS
        state = logistic_regression.take_quasi_newton_step(
            state, *mean_loss_and_gradient, bordered.mT @ bordered / ROWS, start.double(), ridge
        )
    best = objective(logistic_regression.fit_ridge_path(x, y, ridges(ridge), anchor(), ALL, 150).heads.joined()[0])
    assert best <= objective(state.base) <= best * (1 + 1e-3)


def test_a_point_that_is_worse_is_not_kept():
    state = logistic_regression.start_state(anchor().joined())
    gradient = torch.ones_like(state.point)
    gram = torch.eye(DIM + 1, dtype=torch.float64)
    first = logistic_regression.take_quasi_newton_step(state, torch.tensor(1.0), gradient, gram, state.point, 1e-3)
    second = logistic_regression.take_quasi_newton_step(first, torch.tensor(2.0), gradient, gram, state.point, 1e-3)
    assert torch.equal(second.base, state.point) and second.loss == 1.0
    assert second.step_fraction < first.step_fraction


def test_a_blend_without_rows_is_where_it_starts():
    start = torch.tensor([0.3, -2.0], dtype=torch.float64)
    logits = torch.zeros(2, 6, CLASSES, dtype=torch.float64)
    assert torch.equal(calibration.fit_log_weights(logits, torch.full((6,), -1), start), start)


def test_a_blend_prefers_the_classifier_that_is_right():
    _, y = rows()
    draw = torch.Generator().manual_seed(5)
    signal, noise = torch.randn(2, ROWS, CLASSES, generator=draw).double()
    right = signal + torch.nn.functional.one_hot(y, CLASSES)
    weight = calibration.fit_log_weights(torch.stack([right, noise]), y, torch.zeros(2).double()).exp()
    assert weight[0] > 2 * weight[1]


def test_heat_undoes_a_scale():
    draw = torch.Generator().manual_seed(6)
    true = torch.randn(4000, CLASSES, generator=draw).double()
    y = torch.multinomial(true.softmax(1), 1, generator=draw)[:, 0]
    assert abs(calibration.fit_log_scale(8 * true, y).exp() - 1 / 8) < 0.02


@pytest.mark.parametrize(("classes", "count"), [(2, 60), (5, 90), (20, 120)])
def test_a_fit_that_counts_as_converged_is_the_solution_of_scikit_learn(classes, count):
    draw = torch.Generator().manual_seed(classes)
    centres, y = torch.randn(classes, DIM, generator=draw), torch.arange(2 * count) % classes
    x = centres[y] + torch.randn(2 * count, DIM, generator=draw)
    x = torch.nn.functional.normalize(x, dim=1).double()
    new_x, x, y = x[count:], x[:count], y[:count]
    nothing = logistic_regression.Head(torch.zeros(classes, DIM), torch.zeros(classes))
    all_classes, n_converged = torch.ones(classes, dtype=torch.bool), 0
    for ridge in (1e-2, 1e-3, 1e-4):
        ridge_factor = 2 if classes == 2 else 1  # its one row of two classes bears the ridge of both
        theirs = LogisticRegression(C=ridge_factor / (count * ridge), tol=1e-10, max_iter=20_000)
        expected = torch.from_numpy(theirs.fit(x.numpy(), y.numpy()).predict_proba(new_x.numpy()))
        for steps in (10, 20, 30, 40):
            path = logistic_regression.fit_ridge_path(x, y, ridges(ridge), nothing, all_classes, steps)
            if path.max_gradient[0] <= MAX_CONVERGED_GRADIENT:
                n_converged += 1
                actual = path.heads.logits(new_x)[0].softmax(1)
                assert (actual - expected).abs().max() < 1e-2
    assert n_converged >= 6
