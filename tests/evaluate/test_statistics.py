"""Laws of the paired bootstrap, and that its columns are those of the tables."""

import numpy as np
import pytest

from fedvlm.evaluate import protocols
from fedvlm.evaluate.metrics import unpack_hits
from fedvlm.evaluate.statistics import paired, rows_of, ties, value

MEMBERS = {"a1": "a", "a2": "a", "b": "b", "c": "c"}


def hits_of(trainings, seed=0, share=0.6):
    draw = np.random.default_rng(seed)
    size = {id: 20 + 7 * place for place, id in enumerate(MEMBERS)}
    return {
        (training.name, id): draw.random(size[id]) < share
        for training in trainings
        for id in (*training.train, *training.unseen)
    }


PROTOCOLS = [
    ("leave-one-domain-out", {}),
    ("own-test", {}),
    ("source-target", {"target": ("b",)}),
    ("cross-device", {"counts": (1, 2), "unseen": 2}),
]


@pytest.mark.parametrize(("protocol", "more"), PROTOCOLS)
def test_weighted_rows_give_the_numbers_of_the_table(protocol, more):
    rules = protocols.make(protocol, **more)
    trainings = rules.trainings(MEMBERS, 0)
    hits = hits_of(trainings)
    done = {}
    for training in trainings:
        cells = {id: hits[training.name, id] for id in (*training.train, *training.unseen)}
        told = {id: {"test_hits": int(h.sum()), "test_rows": len(h)} for id, h in cells.items()}
        done[training.name] = (training, told)
    table = rules.table(MEMBERS, done, True)
    found = rules.weights(
        {training.name: (training.train, training.unseen) for training in trainings}, True
    )
    assert len(found) >= 1
    for name, weights in found.items():
        assert value(rows_of(weights, hits)) == pytest.approx(table[name], abs=1e-12), name


def rows(share, seed=0, count=400):
    draw = np.random.default_rng(seed)
    return {"x": (draw.random(count) < share).astype(float)}


def test_a_run_does_not_differ_from_itself():
    same = [rows(0.5, seed) for seed in range(3)]
    found = paired(same, same)
    assert (found.mean, found.low, found.high) == (0, 0, 0)
    assert not found.told_apart


def test_difference_turns_its_sign_with_the_order():
    ours, theirs = [rows(0.5, s) for s in range(3)], [rows(0.6, 9 + s) for s in range(3)]
    there, back = paired(ours, theirs, draws=4000), paired(theirs, ours, draws=4000)
    assert there.mean == pytest.approx(-back.mean)
    assert there.low == pytest.approx(-back.high, abs=0.01)
    assert there.low <= there.mean <= there.high


def test_interval_of_independent_rows_is_the_normal_one():
    ours, theirs = [rows(0.5, 1, 2000)], [rows(0.5, 2, 2000)]
    gap = ours[0]["x"] - theirs[0]["x"]
    half = 1.96 * gap.std() / 2000**0.5
    found = paired(ours, theirs, draws=20000)
    assert found.high - found.mean == pytest.approx(half, rel=0.05)
    assert found.mean - found.low == pytest.approx(half, rel=0.05)


def test_pairing_sees_what_two_separate_means_hide():
    """One run hits whatever the other does, and 12 rows more, of 400."""
    base = rows(0.5, 3)
    more = base["x"].copy()
    more[np.flatnonzero(more == 0)[:12]] = 1
    assert paired([{"x": more}], [base]).told_apart
    mixed = np.random.default_rng(0).permutation(more)  # the same two means, other rows
    assert not paired([{"x": mixed}], [base]).told_apart


def test_seeds_that_disagree_widen_the_interval():
    base = [rows(0.5, seed) for seed in range(4)]
    steady, wild = [], []
    for number, one in enumerate(base):
        for share, out in ((0.1, steady), (0.2 if number % 2 else 0.0, wild)):
            x = one["x"].copy()
            missed = np.flatnonzero(x == 0)
            x[missed[: int(share * len(x))]] = 1
            out.append({"x": x})
    a, b = paired(steady, base), paired(wild, base)
    assert a.mean == pytest.approx(b.mean)
    assert b.high - b.low > 2 * (a.high - a.low)


def test_false_alarms_of_equal_runs_are_about_as_many_as_promised():
    alarms = sum(
        paired([rows(0.6, 2 * k)], [rows(0.6, 2 * k + 1)], draws=300).told_apart for k in range(200)
    )
    assert 2 <= alarms <= 22  # 10 expected of 200


def test_best_is_named_with_what_every_other_run_lacks():
    high, near = rows(0.7), rows(0.7)
    hit, missed = np.flatnonzero(near["x"]), np.flatnonzero(near["x"] == 0)
    near["x"][hit[:30]], near["x"][missed[:28]] = 0, 1  # loses 30 rows and wins 28
    best, others = ties({"low": [rows(0.3)], "high": [high], "near": [near]})
    assert best == "high"
    assert others["low"].told_apart and others["low"].high < 0
    assert others["near"].mean == pytest.approx(-2 / 400)
    assert not others["near"].told_apart
    assert ties({"only": [high]}) == ("only", {})


def test_packed_hits_come_back():
    bits = np.random.default_rng(0).random(37) < 0.5
    assert (unpack_hits(np.packbits(bits).tobytes().hex(), 37) == bits).all()
