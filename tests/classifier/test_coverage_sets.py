"""Prediction sets hold the true class as often as they promise, and nothing reads their rows."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import ceil, sqrt
from pathlib import Path

import numpy as np
import pytest
import torch

import fedvlm
from fedvlm.data.arrays import from_arrays
from fedvlm.errors import DataError, SettingsError
from fedvlm.maths.calibration import Calibration, calibrate, min_samples, score_limits
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build

CLASSES, DIM, SPLITS = 4, 12, 200


def rows(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes that overlap, so that sets have something to hold."""
    rng = np.random.default_rng(seed)
    y = rng.integers(CLASSES, size=count)
    return np.eye(DIM)[y] + rng.normal(0, 0.55, (count, DIM)), y


def federation(count: int = 240) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {"a": rows(0, count), "b": rows(1, count)}


@pytest.mark.parametrize("aside", [30, 120])  # too few for each class of its own, and enough
@pytest.mark.parametrize("method", ["auto", "tofa", "alone"])
def test_mean_coverage_over_200_splits_is_what_was_promised(
    method: str, aside: int, record_property: Callable[[str, object], None]
) -> None:
    coverage = 0.9
    text = np.eye(DIM)[:CLASSES]
    classifier = fedvlm.run(method, clients=federation(), text=text).personalised("a")
    x, y = rows(2, 600)
    logits, labels = classifier.logits(x), torch.from_numpy(y)
    assert classifier.calibration is not None
    rng = np.random.default_rng(3)
    covered, sizes, largest = [], [], []
    for _ in range(SPLITS):
        order = torch.from_numpy(rng.permutation(len(y)))
        calibration_rows, new = order[:aside], order[aside:]
        calibrated = replace(
            classifier.calibration,
            scores=-classifier.log_probabilities(logits[calibration_rows]).gather(1, labels[calibration_rows, None])[
                :, 0
            ],
            labels=labels[calibration_rows],
        )
        inside = -classifier.log_probabilities(logits[new]) <= score_limits(
            calibrated, classifier.frozen.classes, coverage
        )
        covered.append(float(inside.gather(1, labels[new, None]).float().mean()))
        sizes.append(float(inside.sum(1).float().mean()))
        counts = np.bincount(y[calibration_rows.numpy()], minlength=CLASSES)
        split = counts.min() >= min_samples(coverage)
        largest.append(np.mean(1 / (counts + 1)) if split else 1 / (aside + 1))
    error = np.std(covered, ddof=1) / sqrt(SPLITS)
    message = f"{method}, {aside} rows: {np.mean(covered):.4f} ± {error:.4f}, {np.mean(sizes):.2f} classes"
    record_property("sets", message)
    assert coverage - 2 * error <= np.mean(covered) <= coverage + np.mean(largest) + 2 * error, message
    assert 1 < np.mean(sizes) < 0.9 * CLASSES, message  # a set of all classes covers too


def test_rows_set_aside_are_read_by_nothing_else() -> None:
    table = from_arrays(federation(), text=np.eye(DIM)[:CLASSES])
    settings = build({"method": "auto", "clients": {"partition": "own"}, "protocol": "own-test"})
    calibration_rows = prepare(settings, table, 0).partition.clients["a"].calibration
    assert len(calibration_rows) == 16  # a third of the 48 validation rows
    x = table.x.clone()
    x[calibration_rows] = torch.nn.functional.normalize(
        torch.ones(len(calibration_rows), DIM) + x[calibration_rows], dim=1
    )
    settings = {"clients": {"partition": "own"}, "protocol": "own-test"}
    first_run, second_run = (
        fedvlm.run("auto", embedded=replace(table, x=values), out=Path(name), **settings)
        for name, values in (("one", table.x), ("other", x))
    )
    assert first_run.tables == second_run.tables
    first, second = first_run.personalised("a"), second_run.personalised("a")
    assert all(torch.equal(first.local[key], second.local[key]) for key in first.local)
    assert all(torch.equal(first.shared[key], second.shared[key]) for key in first.shared)
    assert first.calibration is not None and second.calibration is not None
    assert first.calibration.log_temperature == second.calibration.log_temperature
    assert not torch.equal(first.calibration.scores, second.calibration.scores)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_known_data_keep_their_splits() -> None:
    assert build({"method": "auto"}).clients.calibration_ratio is None
    table = replace(from_arrays(federation()), encoder="another")
    partition = prepare(build({"method": "auto", "clients": {"partition": "own"}}), table, 0).partition
    assert all(not len(member.calibration) for member in partition.clients.values())
    clients = {"partition": "own", "calibration_ratio": 0.5}
    member = prepare(build({"method": "auto", "clients": clients}), table, 0).partition.clients["a"]
    was = partition.clients["a"]
    assert sorted([*member.validation, *member.calibration]) == sorted(was.validation)
    assert len(member.calibration) == len(member.validation) == 24
    assert (member.train == was.train).all() and (member.test == was.test).all()


@pytest.mark.parametrize(("coverage", "rows"), [(0.95, 19), (0.9, 9), (0.5, 1), (0.99, 99)])
def test_a_promise_needs_so_many_rows(coverage: float, rows: int) -> None:
    assert min_samples(coverage) == rows
    names = ("x",)
    calibration = Calibration(0.0, 5, torch.arange(rows).double(), torch.zeros(rows).long())
    assert score_limits(calibration, names, coverage) == rows - 1
    short = Calibration(0.0, 5, calibration.scores[1:], calibration.labels[1:])
    with pytest.raises(DataError, match=f"needs {rows} calibration samples, got {rows - 1}"):
        score_limits(short, names, coverage)


def test_a_class_with_enough_rows_has_a_limit_of_its_own_and_the_rest_share_one() -> None:
    scores = torch.cat([torch.arange(9.0), 100 + torch.arange(6.0), 200 + torch.arange(6.0)])
    labels = torch.tensor([0] * 9 + [1] * 6 + [2] * 6)
    thresholds = score_limits(Calibration(0.0, 9, scores.double(), labels), ("a", "b", "c"), 0.9)
    rest = sorted(scores[9:].tolist())[ceil(13 * Fraction("0.9")) - 1]
    assert thresholds.tolist() == [8.0, rest, rest]
    small = Calibration(0.0, 9, scores[:12].double(), labels[:12])
    assert score_limits(small, ("a", "b", "c"), 0.9).unique().numel() == 1  # three rows promise nothing


def test_temperature_leaves_the_order_and_makes_a_boaster_modest() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (400,), generator=generator)
    logits = 30 * (torch.eye(CLASSES)[y] + torch.randn(400, CLASSES, generator=generator))
    calibration = calibrate(logits, y, logits[:0], y[:0])
    sure = calibration.log_probabilities(logits).exp().amax(1).mean()
    right = (logits.argmax(1) == y).float().mean()
    assert abs(sure - right) < 1e-3 and logits.softmax(1).amax(1).mean() > right + 0.2
    assert (calibration.log_probabilities(logits).argmax(1) == logits.argmax(1)).all()


def test_no_coverage_is_promised_without_rows_or_outside_reason() -> None:
    classifier = fedvlm.run("alone", clients=federation()).personalised("a")
    x, _ = rows(5, 3)
    with pytest.raises(SettingsError, match="coverage must be above 0 and below 1, got 1.5"):
        classifier.predict_set(x, 1.5)
    with pytest.raises(DataError, match="needs 19 calibration samples, got 16.*0.94"):
        classifier.predict_set(x)
    assert classifier.predict_set(x, 0.9)[0][0] == classifier.predict(x)[0]
    with pytest.raises(DataError, match="no samples were set aside"):
        replace(classifier, calibration=None).predict_set(x)
    assert "not calibrated" in replace(classifier, calibration=None).warnings()[0]
    assert not classifier.warnings()
