"""Laws of the paired bootstrap, and that its columns are those of the tables."""

import numpy as np
import pytest

from fedvlm.evaluate import protocols
from fedvlm.evaluate.metrics import unpack_correct
from fedvlm.evaluate.statistics import column_value, compare_with_best, paired_bootstrap, weighted_correct

MEMBERS = {"a1": "a", "a2": "a", "b": "b", "c": "c"}


def hits_of(trainings, seed=0, accuracy=0.6):
    draw = np.random.default_rng(seed)
    size = {id: 20 + 7 * place for place, id in enumerate(MEMBERS)}
    return {
        (training.name, id): draw.random(size[id]) < accuracy
        for training in trainings
        for id in (*training.train, *training.unseen)
    }


PROTOCOLS = [
    ("leave-one-domain-out", {}),
    ("own-test", {}),
    ("source-target", {"target": ("b",)}),
    ("cross-device", {"counts": (1, 2), "unseen": 2}),
]


@pytest.mark.parametrize(("protocol", "options"), PROTOCOLS)
def test_weighted_rows_give_the_numbers_of_the_table(protocol, options):
    rules = protocols.make_protocol(protocol, **options)
    trainings = rules.trainings(MEMBERS, 0)
    correct = hits_of(trainings)
    done = {}
    for training in trainings:
        cells = {id: correct[training.name, id] for id in (*training.train, *training.unseen)}
        scores = {id: {"test_hits": int(h.sum()), "test_rows": len(h)} for id, h in cells.items()}
        done[training.name] = (training, scores)
    table = rules.table(MEMBERS, done, True)
    column_weights = rules.weights({training.name: (training.train, training.unseen) for training in trainings}, True)
    assert len(column_weights) >= 1
    for name, weights in column_weights.items():
        assert column_value(weighted_correct(weights, correct)) == pytest.approx(table[name], abs=1e-12), name


def rows(accuracy, seed=0, count=400):
    draw = np.random.default_rng(seed)
    return {"x": (draw.random(count) < accuracy).astype(float)}


def test_a_run_does_not_differ_from_itself():
    same = [rows(0.5, seed) for seed in range(3)]
    difference = paired_bootstrap(same, same)
    assert (difference.mean, difference.low, difference.high) == (0, 0, 0)
    assert not difference.is_significant


def test_difference_turns_its_sign_with_the_order():
    candidate, theirs = [rows(0.5, s) for s in range(3)], [rows(0.6, 9 + s) for s in range(3)]
    forward, back = paired_bootstrap(candidate, theirs, draws=4000), paired_bootstrap(theirs, candidate, draws=4000)
    assert forward.mean == pytest.approx(-back.mean)
    assert forward.low == pytest.approx(-back.high, abs=0.01)
    assert forward.low <= forward.mean <= forward.high


def test_interval_of_independent_rows_is_the_normal_one():
    candidate, theirs = [rows(0.5, 1, 2000)], [rows(0.5, 2, 2000)]
    gap = candidate[0]["x"] - theirs[0]["x"]
    half_width = 1.96 * gap.std() / 2000**0.5
    difference = paired_bootstrap(candidate, theirs, draws=20000)
    assert difference.high - difference.mean == pytest.approx(half_width, rel=0.05)
    assert difference.mean - difference.low == pytest.approx(half_width, rel=0.05)


def test_pairing_sees_what_two_separate_means_hide():
    """One run hits whatever the other does, and 12 rows more, of 400."""
    base = rows(0.5, 3)
    improved = base["x"].copy()
    improved[np.flatnonzero(improved == 0)[:12]] = 1
    assert paired_bootstrap([{"x": improved}], [base]).is_significant
    mixed = np.random.default_rng(0).permutation(improved)  # the same two means, other rows
    assert not paired_bootstrap([{"x": mixed}], [base]).is_significant


def test_seeds_that_disagree_widen_the_interval():
    base = [rows(0.5, seed) for seed in range(4)]
    steady, wild = [], []
    for number, base_correct in enumerate(base):
        for gain, out in ((0.1, steady), (0.2 if number % 2 else 0.0, wild)):
            x = base_correct["x"].copy()
            missed = np.flatnonzero(x == 0)
            x[missed[: int(gain * len(x))]] = 1
            out.append({"x": x})
    a, b = paired_bootstrap(steady, base), paired_bootstrap(wild, base)
    assert a.mean == pytest.approx(b.mean)
    assert b.high - b.low > 2 * (a.high - a.low)


def test_false_alarms_of_equal_runs_are_about_as_many_as_promised():
    alarms = sum(
        paired_bootstrap([rows(0.6, 2 * k)], [rows(0.6, 2 * k + 1)], draws=300).is_significant for k in range(200)
    )
    assert 2 <= alarms <= 22  # 10 expected of 200


def test_best_is_named_with_what_every_other_run_lacks():
    high, similar = rows(0.7), rows(0.7)
    hit, missed = np.flatnonzero(similar["x"]), np.flatnonzero(similar["x"] == 0)
    similar["x"][hit[:30]], similar["x"][missed[:28]] = 0, 1  # loses 30 rows and wins 28
    best, other_runs = compare_with_best({"low": [rows(0.3)], "high": [high], "near": [similar]})
    assert best == "high"
    assert other_runs["low"].is_significant and other_runs["low"].high < 0
    assert other_runs["near"].mean == pytest.approx(-2 / 400)
    assert not other_runs["near"].is_significant
    assert compare_with_best({"only": [high]}) == ("only", {})


def test_packed_hits_come_back():
    bits = np.random.default_rng(0).random(37) < 0.5
    assert (unpack_correct(np.packbits(bits).tobytes().hex(), 37) == bits).all()
