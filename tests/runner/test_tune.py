"""Tuning by successive halving: what it costs, which samples it uses, and what the record says of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedvlm
from fedvlm import cli
from fedvlm.channel.pipeline import spent_epsilon
from fedvlm.channel.settings import Channel
from fedvlm.encoders.store import save_store
from fedvlm.errors import SettingsError
from fedvlm.maths.privacy import epsilon
from fedvlm.record import Record
from fedvlm.runner import tune
from fedvlm.runner.prepare import prepare
from fedvlm.runner.run import execute
from fedvlm.runner.settings import build
from fedvlm.runner.tune import GRID_FACTORS, MAX_SEARCH_RUNS, halving_schedule, search_rounds, tune_seeds
from fedvlm.storage.files import to_toml

TUNED = {"protocol": "own-test", "clients": "domain", "tune": ["lr"], "workers": 1}
METHOD = {"name": "fedavg", "lr": 1e-3, "rounds": 8}


def run_search(prepared, progress=lambda *_: None):
    """The settings that a seed's race chose, and its record."""
    about = tune_seeds([prepared], Record(Path("nowhere")), progress)[0]
    return tune.with_tuned(prepared.settings, {"tuned": about}, 0), about


def raced(rows, **extra):
    return run_search(prepare(build({**TUNED, "method": METHOD, **extra}), rows, 0))


def test_progress_tells_the_rounds_of_all_trials(rows):
    calls = []
    settings = build({**TUNED, "method": METHOD, "workers": 2})
    run_search(prepare(settings, rows, 0), lambda *args: calls.append(args))
    assert [done for _, done, _ in calls] == [2, 4, 6, 8, 14, 20]
    assert {(task, total) for task, _, total in calls} == {("tuning", 20)}


@pytest.mark.parametrize("rounds", range(1, 60))
def test_a_race_and_its_run_cost_at_most_four_runs(rounds):
    count, first = halving_schedule(rounds, len(GRID_FACTORS))
    assert 1 <= first <= rounds
    assert count >= 3
    assert search_rounds(rounds, count, first) <= MAX_SEARCH_RUNS * rounds


def test_the_record_counts_every_client_update_of_the_trials(rows):
    _, about = raced(rows)
    one_run = 3 * 8  # clients, rounds
    updates = [trial["updates"] for trial in about["trials"]]
    assert sum(updates) <= 3 * one_run
    assert updates == [3 * trial["rounds"] for trial in about["trials"]]
    assert sorted(trial["rounds"] for trial in about["trials"]) == [2, 2, 8, 8]


def test_the_chosen_value_has_the_best_validation_score_of_those_that_went_on_or_is_their_mean(rows):
    settings, about = raced(rows)
    best, second = sorted((t for t in about["trials"] if t["rounds"] == 8), key=lambda trial: -trial["score"])
    standard_error = np.sqrt(best["score"] * (1 - best["score"]) / best["samples"])
    expected = best["values"]["lr"]
    if second["score"] >= best["score"] - standard_error:
        expected = np.sqrt(expected * second["values"]["lr"])
    assert about["chosen"]["lr"] == settings.method.lr == pytest.approx(expected)
    assert about["chosen"]["lr"] > METHOD["lr"]  # which hardly moves in eight rounds


def test_a_score_is_what_a_run_of_that_value_has_on_validation_rows(rows, tmp_path):
    settings, about = raced(rows)
    best = max(about["trials"], key=lambda entry: (entry["rounds"], entry["score"]))
    plain = {key: value for key, value in TUNED.items() if key != "tune"}
    run = fedvlm.run(settings.method, embedded=rows, out=tmp_path / "r", **plain)
    scores = run.trainings()["all"]["scores"].values()
    accuracies = [entry["validation_hits"] / entry["validation_rows"] for entry in scores]
    assert best["score"] == pytest.approx(sum(accuracies) / len(accuracies), abs=1e-12)


def test_any_number_of_workers_makes_the_same_race(rows):
    assert raced(rows, workers=1)[1] == raced(rows, workers=2)[1]


def test_other_test_rows_do_not_change_the_race(rows):
    settings = build({**TUNED, "method": METHOD})
    before = prepare(settings, rows, 0)
    test = np.concatenate([member.test for member in before.partition.clients.values()])
    labels, x = rows.labels.copy(), rows.x.clone()
    labels[test] = (labels[test] + 1) % 4
    x[torch.from_numpy(test)] = x[torch.from_numpy(test[::-1].copy())]
    after = replace(before, rows=replace(rows, labels=labels, x=x))
    assert run_search(before)[1] == run_search(after)[1]


def test_the_run_has_the_chosen_rate_and_the_table_says_how(rows, tmp_path):
    run = fedvlm.run("fedavg", embedded=rows, out=tmp_path / "r", **TUNED)
    chosen = run.manifest["tuned"]["chosen"]["lr"]
    assert run.manifest["identity"]["method"]["lr"] == chosen
    assert "tuned on validation samples (4 trials)" in run.table()
    again = fedvlm.run("fedavg", embedded=rows, out=tmp_path / "r", **TUNED)
    assert again.manifest == run.manifest


def test_a_finished_race_is_not_raced_again(rows, tmp_path, monkeypatch):
    fedvlm.run("fedavg", embedded=rows, out=tmp_path / "r", **TUNED)
    monkeypatch.setattr(tune, "halving_rungs", None)
    fedvlm.run("fedavg", embedded=rows, out=tmp_path / "r", again=True, **TUNED)
    assert fedvlm.resume(tmp_path / "r").manifest["tuned"]


def test_every_seed_is_raced_on_its_own_validation_rows(rows, tmp_path):
    both_seeds = fedvlm.run(METHOD, embedded=rows, out=tmp_path / "r", seeds=[0, 3], **TUNED)
    assert both_seeds.manifest["identity"]["method"]["lr"] == METHOD["lr"]  # what was asked
    for seed in (0, 3):
        alone = fedvlm.run(METHOD, embedded=rows, out=tmp_path / f"{seed}", seeds=[seed], **TUNED)
        tuned = both_seeds.manifest["tuned"]["seeds"][f"{seed}"]
        assert {"asked": {"lr": METHOD["lr"]}, **tuned} == alone.manifest["tuned"]
        assert both_seeds.tables[seed // 3] == alone.tables[0]
    assert "(4 trials a seed)" in both_seeds.table()


def test_several_seeds_that_were_raced_go_on_and_are_found_again(rows, tmp_path, monkeypatch):
    words = {"embedded": rows, "out": tmp_path / "r", "seeds": [0, 3], **TUNED}
    first = fedvlm.run(METHOD, **words)
    tables = first.tables
    (tmp_path / "r" / "result.json").unlink()
    for path in (tmp_path / "r" / "trainings").glob("3-*"):
        path.unlink()
    monkeypatch.setattr(tune, "halving_rungs", None)
    assert fedvlm.run(METHOD, **words).tables == tables
    assert fedvlm.run(METHOD, again=True, **words).tables == tables


def test_every_trials_releases_count_in_epsilon(rows, tmp_path):
    channel = {"clip": 1.0, "noise_multiplier": 5.0}
    method = {**METHOD, "rounds": 4}
    run = fedvlm.run(method, embedded=rows, out=tmp_path / "r", channel=channel, **TUNED)
    trials = sum(trial["rounds"] for trial in run.manifest["tuned"]["trials"])
    assert trials == 10
    assert run.rounds[-1]["epsilon"] == pytest.approx(epsilon(5.0, trials + 4, delta=1e-5))
    assert run.rounds[-1]["epsilon"] > spent_epsilon(Channel(**channel), {}) == 0.0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"method": "alone"}, "alone has nothing to tune"),
        ({"tune": ["momentum"]}, "fedavg has lr to tune"),
        ({"method": "fedot", "warm_start": "tofa"}, "cannot be combined"),
    ],
)
def test_what_cannot_be_raced_is_refused(rows, tmp_path, extra, message):
    with pytest.raises(SettingsError, match=message):
        fedvlm.run(embedded=rows, out=tmp_path / "r", **{**TUNED, "method": "fedavg", **extra})
    assert not (tmp_path / "r").exists()


def test_a_method_that_counts_its_own_noise_is_refused(monkeypatch):
    monkeypatch.setattr(tune, "tunable_settings", lambda method: ("lr",))
    with pytest.raises(SettingsError, match="its own noise"):
        tune.check_tunable(build({**TUNED, "method": "dp-fpl"}))


def test_a_race_without_validation_rows_is_refused(rows):
    before = prepare(build({**TUNED, "method": METHOD}), rows, 0)
    members = {id: replace(member, validation=member.validation[:0]) for id, member in before.partition.clients.items()}
    bare = replace(before, partition=replace(before.partition, clients=members))
    with pytest.raises(SettingsError, match="has validation samples"):
        run_search(bare)


def test_nothing_is_tuned_unless_a_setting_says_so_whoever_builds_the_settings(rows, tmp_path, monkeypatch):
    """The command line, Python, an experiment's file and a deployment have one default."""
    monkeypatch.chdir(tmp_path)
    store = save_store(tmp_path / "rows.safetensors", rows)
    quick = {"protocol": "own-test", "encoder": f"store:{store}"}
    python = fedvlm.run({"name": "fedavg", "rounds": 1}, out=tmp_path / "python", **quick)
    (tmp_path / "mine.toml").write_text(to_toml({**quick, "method": {"name": "fedavg", "rounds": 1}}))
    options = ["--no-report", "--no-baselines"]
    words = ["--method", "fedavg", "--set", "method.rounds=1", "--set", "protocol=own-test"]
    for folder, command in {"line": ["--encoder", f"store:{store}", *words], "file": ["mine.toml"]}.items():
        done = CliRunner().invoke(cli.app, ["run", *command, *options, "--output", folder], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert Record(tmp_path / folder).manifest["identity"] == python.manifest["identity"]
    assert python.manifest["identity"]["tune"] == []
    assert "tuned" not in python.manifest


@pytest.mark.parametrize(
    ("method", "is_noted"), [("fedavg", True), ({"name": "fedavg", "lr": 0.5}, False), ("zero-shot", False)]
)
def test_a_default_lr_on_own_data_is_pointed_out(rows, tmp_path, method, is_noted):
    messages = []
    settings = build({"method": method, "protocol": "own-test"})
    settings = replace(settings, method=replace(settings.method, **({"rounds": 1} if is_noted else {})))
    execute(settings, tmp_path / "r", embedded=rows, log=messages.append)
    assert any("--tune lr" in message for message in messages) == is_noted


def test_a_protocol_with_unseen_domains_is_judged_by_a_source_that_is_left_out(rows):
    settings = build({**TUNED, "protocol": "leave-one-domain-out", "method": METHOD})
    before = prepare(settings, rows, 0)
    trainings = [
        tune.leave_source_out(training, before.partition.domains, i) for i, training in enumerate(before.trainings)
    ]
    for training, trial in zip(before.trainings, trainings, strict=True):
        assert {*trial.train, *trial.unseen} == {*training.train}  # the unseen domain itself takes no part
        assert trial.train and trial.unseen and not {*trial.train} & {*trial.unseen}
    assert len({trial.unseen for trial in trainings}) > 1
    # Other labels of the validation samples of clients that train in no trial but judge change the scores.
    _, about = run_search(before)
    only_judges = {id for trial in trainings for id in trial.unseen}
    labels = rows.labels.copy()
    for id in only_judges:
        validation = before.partition.clients[id].validation
        labels[validation] = (labels[validation] + 1) % len(rows.classes)
    _, wrong = run_search(replace(before, rows=replace(rows, labels=labels)))
    best = max(trial["score"] for trial in about["trials"])
    assert max(trial["score"] for trial in wrong["trials"]) < best - 0.2
    n_judges = sum(len(before.partition.clients[id].validation) for trial in trainings for id in trial.unseen)
    assert {trial["samples"] for trial in about["trials"]} == {n_judges}


def test_nothing_is_left_out_without_unseen_clients_or_of_a_single_source(rows):
    own = prepare(build({**TUNED, "method": METHOD}), rows, 0)
    (training,) = own.trainings
    assert tune.leave_source_out(training, own.partition.domains, 0) == training
    alone = replace(training, train=training.train[:1], unseen=training.train[1:])
    assert tune.leave_source_out(alone, own.partition.domains, 0) == replace(alone, unseen=())


@pytest.mark.parametrize(("samples", "chosen"), [(20, 1e-2), (100_000, 1e-1)])
def test_candidates_that_few_samples_cannot_tell_apart_are_averaged(samples, chosen):
    scores = {1e-3: 0.80, 1e-2: 0.81, 1e-4: 0.60, 1e-1: 0.82}
    trials = [tune.Trial(None, {"lr": lr}, score=score, samples=samples) for lr, score in scores.items()]
    finalists = tune.choose_finalists(trials)
    assert {trial.values["lr"] for trial in finalists} == ({1e-3, 1e-1} if samples == 20 else {1e-2, 1e-1})
    assert tune.choose_values(finalists)["lr"] == pytest.approx(chosen)


def test_a_file_with_a_method_that_has_nothing_to_tune_tunes_the_others(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = save_store(tmp_path / "rows.safetensors", rows)
    methods = [{"name": "alone"}, METHOD]
    values = {"protocol": "own-test", "encoder": f"store:{store}", "tune": ["lr"], "methods": methods}
    (tmp_path / "mine.toml").write_text(to_toml(values))
    command = ["run", "mine.toml", "--no-report", "--no-baselines", "--output", "out"]
    done = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    tuned = {
        path.parent.name: "tuned" in Record(path.parent).manifest for path in (tmp_path / "out").glob("*/manifest.json")
    }
    assert sorted(tuned.values()) == [False, True]
    (tmp_path / "mine.toml").write_text(to_toml({**values, "methods": methods[:1]}))
    with pytest.raises(SettingsError, match="alone has nothing to tune"):
        CliRunner().invoke(cli.app, command, catch_exceptions=False)
