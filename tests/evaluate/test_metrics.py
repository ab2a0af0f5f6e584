"""The metrics agree with scikit-learn and, for net benefit, with dcurves."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    recall_score,
    roc_auc_score,
)

from fedvlm.evaluate import metrics


def made(rows=300, classes=5, seed=0, ties=False):
    draw = torch.Generator().manual_seed(seed)
    p = torch.softmax(2 * torch.randn(rows, classes, generator=draw), dim=1)
    if ties:
        p = (p * 8).round() / 8
    guess = torch.rand(rows, generator=draw) < 0.6
    y = torch.where(guess, p.argmax(1), torch.randint(classes, (rows,), generator=draw))
    return p, y


@pytest.mark.parametrize("seed", range(4))
def test_balanced_accuracy_and_f1_are_those_of_scikit_learn(seed):
    p, y = made(seed=seed)
    assert metrics.balanced_accuracy(p, y) == pytest.approx(balanced_accuracy_score(y, p.argmax(1)), abs=1e-12)
    assert metrics.macro_f1(p, y) == pytest.approx(f1_score(y, p.argmax(1), average="macro"), abs=1e-12)


@pytest.mark.parametrize("ties", [False, True])
def test_auc_is_that_of_scikit_learn_also_with_ties(ties):
    p, y = made(ties=ties)
    per_class = [roc_auc_score((y == c).numpy(), p[:, c].numpy()) for c in range(5)]
    assert metrics.auc(p, y) == pytest.approx(np.mean(per_class), abs=1e-12)


def test_auc_leaves_out_a_class_without_rows():
    p, y = made()
    y = torch.where(y == 2, 3, y)
    per_class = [roc_auc_score((y == c).numpy(), p[:, c].numpy()) for c in (0, 1, 3, 4)]
    assert metrics.auc(p, y) == pytest.approx(np.mean(per_class), abs=1e-12)


def test_classes_without_rows_count_in_f1_only_if_predicted():
    p = torch.eye(4)[[0, 0, 1, 2]]
    y = torch.tensor([0, 0, 1, 1])
    assert metrics.macro_f1(p, y) == pytest.approx(f1_score(y, p.argmax(1), average="macro"))
    assert metrics.balanced_accuracy(p, y) == 0.75


def test_rows_of_one_class_have_no_auc_and_it_is_left_out():
    p, _ = made()
    y = torch.zeros(300, dtype=torch.long)
    assert math.isnan(metrics.auc(p, y))
    assert set(metrics.compute_metrics(p, y)) == set(metrics.METRICS) - {"AUC"}


def test_net_benefit_of_a_class_is_that_of_dcurves():
    import dcurves
    import pandas

    p, y = made(classes=3)
    expected = []
    for c in range(3):
        table = pandas.DataFrame({"y": (y == c).int().numpy(), "p": p[:, c].double().numpy()})
        expected_curve = dcurves.dca(data=table, outcome="y", modelnames=["p"], thresholds=list(metrics.THRESHOLDS))
        expected.append(expected_curve[expected_curve["model"] == "p"].sort_values("threshold")["net_benefit"])
    curve = metrics.net_benefit(p.double(), y)
    assert np.allclose(curve.numpy(), np.mean(expected, axis=0), atol=1e-12)


def test_net_benefit_of_a_perfect_classifier_is_the_share_of_its_class():
    y = torch.arange(40) % 4
    assert torch.allclose(metrics.net_benefit(torch.eye(4)[y], y), torch.tensor(0.25).double())


def test_ece_is_the_gap_of_confidence_and_hits():
    p = torch.tensor([[0.9, 0.1]]).repeat(10, 1)
    y = torch.tensor([0] * 6 + [1] * 4)
    diagram = metrics.reliability(p, y)
    assert diagram.error == pytest.approx(0.3, abs=1e-6)
    assert diagram.rows.sum() == 10
    assert diagram.rows[13] == 10  # 0.9 lies in (13/15, 14/15]


def test_ece_agrees_with_a_loop_over_bins():
    p, y = made(rows=500)
    confidence, guess = p.double().max(1)
    hit = (guess == y).double()
    total = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            gap = (confidence[inside].mean() - hit[inside].mean()).abs().item()
            total += inside.double().mean().item() * gap
    assert metrics.reliability(p, y).error == pytest.approx(total, abs=1e-12)


def test_full_confidence_is_in_the_last_bin():
    diagram = metrics.reliability(torch.eye(3), torch.arange(3))
    assert diagram.rows[-1] == 3
    assert diagram.error == 0


def test_the_tables_net_benefit_is_the_mean_up_to_one_half():
    p, y = made()
    curve = metrics.net_benefit(p, y)
    assert metrics.compute_metrics(p, y)["net benefit"] == pytest.approx(curve[:10].mean().item())


def test_details_agree_with_scikit_learn_and_add_up():
    p, y = made(rows=200)
    details = metrics.prediction_details(p, y)
    confusion = np.zeros((5, 5), int)
    for true, guess, rows in details["confusion"]:
        confusion[true, guess] = rows
    assert (confusion == confusion_matrix(y, p.argmax(1))).all()
    assert details["recall"] == pytest.approx(recall_score(y, p.argmax(1), average=None))
    correct = metrics.unpack_correct(details["hits"], 200)
    assert (correct == (p.argmax(1) == y).numpy()).all()
    true_scores, other_scores = details["scores"]
    assert (sum(true_scores), sum(other_scores)) == (200, 800)


def test_class_without_rows_has_no_recall():
    p, y = made(rows=60)
    assert metrics.prediction_details(p[y != 2], y[y != 2])["recall"][2] is None
