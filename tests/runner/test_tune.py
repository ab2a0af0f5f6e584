"""The race for a rate: what it costs, what it looks at, and what the record says of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedvlm
from fedvlm.channel.settings import Channel
from fedvlm.channel.uploads import spent_epsilon
from fedvlm.errors import SettingsError
from fedvlm.maths.accounting import epsilon
from fedvlm.record import Record
from fedvlm.runner import tune
from fedvlm.runner.prepare import prepare
from fedvlm.runner.races import races
from fedvlm.runner.settings import build
from fedvlm.runner.tune import FACTORS, MOST, cost, plan

ASKED = {"protocol": "own-test", "clients": "domain", "tune": ["lr"], "workers": 1}
METHOD = {"name": "fedavg", "lr": 1e-3, "rounds": 8}


def race(prepared, progress=lambda *_: None):
    """The settings that a seed's race chose, and its record."""
    about = races([prepared], Record(Path("nowhere")), progress)[0]
    return tune.settled(prepared.settings, {"tuned": about}, 0), about


def raced(rows, **more):
    return race(prepare(build({**ASKED, "method": METHOD, **more}), rows, 0))


def test_progress_tells_the_rounds_of_all_trials(rows):
    told = []
    settings = build({**ASKED, "method": METHOD, "workers": 2})
    race(prepare(settings, rows, 0), lambda *said: told.append(said))
    assert [done for _, done, _ in told] == [2, 4, 6, 8, 14, 20]
    assert {(what, total) for what, _, total in told} == {("tuning", 20)}


@pytest.mark.parametrize("rounds", range(1, 60))
def test_a_race_and_its_run_cost_at_most_four_runs(rounds):
    count, first = plan(rounds, len(FACTORS))
    assert 1 <= first <= rounds
    assert count >= 3
    assert cost(rounds, count, first) <= MOST * rounds


def test_the_record_counts_every_client_update_of_the_trials(rows):
    _, about = raced(rows)
    one_run = 3 * 8  # clients, rounds
    updates = [one["updates"] for one in about["trials"]]
    assert sum(updates) <= 3 * one_run
    assert updates == [3 * one["rounds"] for one in about["trials"]]
    assert sorted(one["rounds"] for one in about["trials"]) == [2, 2, 8, 8]


def test_the_chosen_value_has_the_best_validation_score_of_those_that_went_on(rows):
    settings, about = raced(rows)
    last = [one for one in about["trials"] if one["rounds"] == 8]
    best = max(last, key=lambda one: one["score"])
    assert about["chosen"] == best["values"] == {"lr": settings.method.lr}
    assert about["chosen"]["lr"] > METHOD["lr"]  # which hardly moves in eight rounds


def test_a_score_is_what_a_run_of_that_value_has_on_validation_rows(rows, tmp_path):
    settings, about = raced(rows)
    best = max(about["trials"], key=lambda one: (one["rounds"], one["score"]))
    plain = {key: value for key, value in ASKED.items() if key != "tune"}
    run = fedvlm.run(settings.method, embedded=rows, out=tmp_path / "r", **plain)
    scores = run.trainings()["all"]["scores"].values()
    shares = [one["validation_hits"] / one["validation_rows"] for one in scores]
    assert best["score"] == pytest.approx(sum(shares) / len(shares), abs=1e-12)


def test_any_number_of_workers_makes_the_same_race(rows):
    assert raced(rows, workers=1)[1] == raced(rows, workers=2)[1]


def test_other_test_rows_do_not_change_the_race(rows):
    settings = build({**ASKED, "method": METHOD})
    before = prepare(settings, rows, 0)
    test = np.concatenate([one.test for one in before.division.members.values()])
    labels, x = rows.labels.copy(), rows.x.clone()
    labels[test] = (labels[test] + 1) % 4
    x[torch.from_numpy(test)] = x[torch.from_numpy(test[::-1].copy())]
    after = replace(before, rows=replace(rows, labels=labels, x=x))
    assert race(before)[1] == race(after)[1]


def test_the_run_has_the_chosen_rate_and_the_table_says_how(rows, tmp_path):
    run = fedvlm.run("fedavg", embedded=rows, out=tmp_path / "r", **ASKED)
    chosen = run.manifest["tuned"]["chosen"]["lr"]
    assert run.manifest["identity"]["method"]["lr"] == chosen
    assert "tuned on validation rows (4 trials)" in run.table()
    again = fedvlm.run("fedavg", embedded=rows, out=tmp_path / "r", **ASKED)
    assert again.manifest == run.manifest


def test_a_finished_race_is_not_raced_again(rows, tmp_path, monkeypatch):
    fedvlm.run("fedavg", embedded=rows, out=tmp_path / "r", **ASKED)
    monkeypatch.setattr(tune, "heats", None)
    fedvlm.run("fedavg", embedded=rows, out=tmp_path / "r", again=True, **ASKED)
    assert fedvlm.resume(tmp_path / "r").manifest["tuned"]


def test_every_seed_is_raced_on_its_own_validation_rows(rows, tmp_path):
    both = fedvlm.run(METHOD, embedded=rows, out=tmp_path / "r", seeds=[0, 3], **ASKED)
    assert both.manifest["identity"]["method"]["lr"] == METHOD["lr"]  # what was asked
    for seed in (0, 3):
        alone = fedvlm.run(METHOD, embedded=rows, out=tmp_path / f"{seed}", seeds=[seed], **ASKED)
        mine = both.manifest["tuned"]["seeds"][f"{seed}"]
        assert {"asked": {"lr": METHOD["lr"]}, **mine} == alone.manifest["tuned"]
        assert both.tables[seed // 3] == alone.tables[0]
    assert "(4 trials a seed)" in both.table()


def test_several_seeds_that_were_raced_go_on_and_are_found_again(rows, tmp_path, monkeypatch):
    words = {"embedded": rows, "out": tmp_path / "r", "seeds": [0, 3], **ASKED}
    first = fedvlm.run(METHOD, **words)
    tables = first.tables
    (tmp_path / "r" / "result.json").unlink()
    for path in (tmp_path / "r" / "trainings").glob("3-*"):
        path.unlink()
    monkeypatch.setattr(tune, "heats", None)
    assert fedvlm.run(METHOD, **words).tables == tables
    assert fedvlm.run(METHOD, again=True, **words).tables == tables


def test_every_trials_releases_count_in_epsilon(rows, tmp_path):
    channel = {"clip": 1.0, "noise_multiplier": 5.0}
    method = {**METHOD, "rounds": 4}
    run = fedvlm.run(method, embedded=rows, out=tmp_path / "r", channel=channel, **ASKED)
    trials = sum(one["rounds"] for one in run.manifest["tuned"]["trials"])
    assert trials == 10
    assert run.rounds[-1]["epsilon"] == pytest.approx(epsilon(5.0, trials + 4, delta=1e-5))
    assert run.rounds[-1]["epsilon"] > spent_epsilon(Channel(**channel), {}) == 0.0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"method": "alone"}, "alone has nothing to tune"),
        ({"tune": ["momentum"]}, "fedavg has lr to tune"),
        ({"method": "fedot", "warm_start": "tofa"}, "do not go together"),
    ],
)
def test_what_cannot_be_raced_is_refused(rows, tmp_path, more, says):
    with pytest.raises(SettingsError, match=says):
        fedvlm.run(embedded=rows, out=tmp_path / "r", **{**ASKED, "method": "fedavg", **more})
    assert not (tmp_path / "r").exists()


def test_a_method_that_counts_its_own_noise_is_refused(monkeypatch):
    monkeypatch.setattr(tune, "tunable", lambda method: ("lr",))
    with pytest.raises(SettingsError, match="its own noise"):
        tune.check(build({**ASKED, "method": "dp-fpl"}))


def test_a_race_without_validation_rows_is_refused(rows):
    before = prepare(build({**ASKED, "method": METHOD}), rows, 0)
    members = {
        id: replace(one, validation=one.validation[:0])
        for id, one in before.division.members.items()
    }
    bare = replace(before, division=replace(before.division, members=members))
    with pytest.raises(SettingsError, match="has validation rows"):
        race(bare)


@pytest.mark.parametrize(
    ("more", "said", "there"),
    [
        ({}, (), ("lr",)),
        ({}, ("method.lr",), ()),
        ({"seeds": [0, 1]}, (), ("lr",)),
        ({"method": "tofa"}, (), ()),
        ({"method": "fedavg-tower"}, (), ()),
        ({"channel": {"clip": 1.0, "noise_multiplier": 1.0}}, (), ()),
    ],
)
def test_own_data_race_for_a_rate_nobody_set_where_that_is_cheap(more, said, there):
    assert tune.by_default(build({"method": "fedavg", **more}), said).tune == there
