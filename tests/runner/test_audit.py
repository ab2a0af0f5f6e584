"""The audit: fields and bytes as they were sent, and an attack that works where it should."""

import json
import sys

import pytest
import torch

import fedvlm
from fedvlm import cli
from fedvlm.encoders.store import save_store
from fedvlm.engines.loop import initial_state
from fedvlm.errors import DataError, SettingsError
from fedvlm.maths.privacy import mean_similarities, roc_auc, roc_auc_by_class
from fedvlm.report.tables import audit_table
from fedvlm.runner.audit import audit


def rows_of(rows_like, count, dim=16):
    return rows_like(rows=count, dim=dim)


def upload_areas(lines):
    return [line["AUC upload"] for line in lines if line["AUC upload"] is not None]


def test_area_is_one_half_for_the_same_scores_and_one_for_higher_ones():
    scores = torch.arange(5.0)
    assert roc_auc(scores, scores) == 0.5
    assert roc_auc(scores + 9, scores) == 1.0
    assert roc_auc(scores - 9, scores) == 0.0
    assert roc_auc(torch.tensor([1.0, 3.0]), torch.tensor([2.0])) == 0.5


def test_area_by_class_cannot_be_earned_by_knowing_the_common_classes():
    members, outsiders = torch.tensor([5.0, 5.0, 1.0]), torch.tensor([5.0, 1.0, 1.0])
    labels, other_labels = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    assert roc_auc(members, outsiders) > 0.6
    assert roc_auc_by_class(members, labels, outsiders, other_labels) == 0.5
    assert roc_auc_by_class(members, labels, outsiders, torch.tensor([2, 2, 2])) is None


def test_sixteen_rows_of_512_numbers_are_recognised_in_their_mean():
    """On real embeddings the area was 0.97."""
    draw = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize
    centre = unit(torch.randn(1, 512, generator=draw), dim=1)
    x = unit(centre + 0.5 * unit(torch.randn(800, 512, generator=draw), dim=1), dim=1)
    inside, outside, reference = x[:16], x[16:400], x[400:].mean(0, keepdim=True)
    zeros = torch.zeros(384, dtype=torch.long)
    mean = inside.mean(0, keepdim=True)
    plain, centred = (
        roc_auc(a, b)
        for a, b in zip(
            mean_similarities(inside, zeros[:16], mean, reference),
            mean_similarities(outside, zeros, mean, reference),
            strict=True,
        )
    )
    assert centred >= plain > 0.95


def test_one_shot_means_give_their_rows_away(rows_like, tmp_path):
    rows = rows_of(rows_like, 480)
    run = {
        "clients": {"partition": "domain", "shots": 1},
        "protocol": "own-test",
        "allow_small": True,
    }
    done = fedvlm.run("tofa", embedded=rows, out=tmp_path / "a", **run)
    lines = audit(done.folder, embedded=rows)
    assert [line["smallest class"] for line in lines] == [1, 1, 1]
    assert min(upload_areas(lines)) > 0.97


def test_means_of_many_rows_say_little_of_each(rows_like, tmp_path):
    rows = rows_of(rows_like, 6000)
    done = fedvlm.run("tofa", embedded=rows, out=tmp_path / "a", protocol="own-test")
    lines = audit(done.folder, embedded=rows)
    assert min(line["smallest class"] for line in lines) >= 250
    assert upload_areas(lines) == pytest.approx([0.5] * 3, abs=0.06)


def test_noise_hides_even_a_single_row(rows_like, tmp_path):
    rows = rows_of(rows_like, 480)
    run = {
        "clients": {"partition": "domain", "shots": 1},
        "protocol": "own-test",
        "allow_small": True,
    }
    method = {"name": "tofa", "noise_multiplier": 3.0}
    done = fedvlm.run(method, embedded=rows, out=tmp_path / "a", **run)
    lines = audit(done.folder, embedded=rows)
    areas = upload_areas(lines)
    assert not areas or sum(areas) / len(areas) < 0.8
    assert all(0 < line["epsilon"] < 10 for line in lines)


def test_without_noise_epsilon_is_said_to_be_infinite(rows, tmp_path):
    done = fedvlm.run("tofa", embedded=rows, out=tmp_path / "a", protocol="own-test")
    lines = audit(done.folder, embedded=rows)
    assert [line["epsilon"] for line in lines] == [None] * 3
    assert audit_table(lines).splitlines()[-1].endswith("inf")


def test_fields_and_bytes_are_those_of_the_record(rows, tmp_path):
    done = fedvlm.run("tofa", embedded=rows, out=tmp_path / "a", protocol="own-test")
    for line in audit(done.folder, embedded=rows):
        recorded = done.rounds[0]["clients"][line["client"]]
        assert line["bytes"] == recorded["bytes_up"]
        assert line["bytes"] == sum(field["bytes"] for field in line["fields"].values())
        assert line["fields"]["counts"] == {"shape": [4], "dtype": "int32", "bytes": 16}


def test_a_memorised_head_is_recognised_by_its_loss(rows_like, tmp_path):
    """Few rows in many dimensions and long training: members have the smaller loss."""
    rows = rows_of(rows_like, 240, dim=64)
    method = {"name": "fedot", "rounds": 20, "lr": 0.05, "tau": 20.0}
    run = {"clients": {"partition": "domain", "shots": 3}, "protocol": "own-test"}
    done = fedvlm.run(method, embedded=rows, out=tmp_path / "a", **run)
    lines = audit(done.folder, embedded=rows)
    assert {line["exchange"] for line in lines} == {"first", "next"}
    last = [line for line in lines if line["exchange"] == "next"]
    first = [line for line in lines if line["exchange"] == "first"]
    assert all(line["AUC personal"] > 0.7 for line in last)
    assert max(upload_areas(first)) < min(line["AUC personal"] for line in last)


def test_a_warm_start_is_audited_too(rows, tmp_path):
    run = {"warm_start": "tofa", "protocol": "own-test"}
    done = fedvlm.run({"name": "fedavg", "rounds": 2}, embedded=rows, out=tmp_path / "a", **run)
    lines = audit(done.folder, embedded=rows)
    assert [line["exchange"] for line in lines] == ["warm start"] * 3 + ["next"] * 3
    assert set(lines[0]["fields"]) >= {"counts", "sums", "moments"}
    assert set(lines[3]["fields"]) == {"head"}


def test_zero_shot_uploads_nothing(rows, tmp_path):
    done = fedvlm.run("zero-shot", embedded=rows, out=tmp_path / "a")
    assert audit(done.folder, embedded=rows) == []
    assert audit_table([]) == "nothing is uploaded\n"


def test_rows_of_another_run_and_rows_that_are_gone_are_refused(rows, rows_like, tmp_path):
    done = fedvlm.run("tofa", embedded=rows, out=tmp_path / "a")
    with pytest.raises(DataError, match="audit it with the data it was run on"):
        audit(done.folder, embedded=rows_like(seed=4))
    with pytest.raises(SettingsError, match="took its samples from memory"):
        audit(done.folder)
    with pytest.raises(SettingsError, match="no training of this run is called 'nowhere'"):
        audit(done.folder, training="nowhere", embedded=rows)


def test_command_prints_a_table_or_json(rows, tmp_path, monkeypatch, capsys):
    store = save_store(tmp_path / "rows.safetensors", rows)
    out = tmp_path / "r"
    fedvlm.run("tofa", encoder=f"store:{store}", out=out, protocol="own-test")

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fedvlm", "audit", str(out), *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0
        return capsys.readouterr().out

    assert "AUC upload" in call()
    lines = json.loads(call("--json"))
    assert [line["client"] for line in lines] == ["art", "photo", "sketch"]


def test_epsilon_is_that_of_the_training_and_the_seed(rows, tmp_path):
    """By chance a client takes part more often in one training than any does in another."""
    run = {"fraction": 0.5, "channel": {"clip": 1.0, "noise_multiplier": 2.0}, "seeds": [0, 1]}
    method = {"name": "fedavg", "rounds": 5}
    done = fedvlm.run(method, embedded=rows, out=tmp_path / "a", **run)
    last = {line["training"]: line["epsilon"] for line in done.rounds}
    assert len(set(last.values())) > 1
    for seed in (0, 1):
        for training in ("art", "photo", "sketch"):
            lines = audit(done.folder, training, seed, embedded=rows)
            assert {line["epsilon"] for line in lines} == {last[f"{seed}-{training}"]}


def test_an_epsilon_of_nothing_is_no_infinite_one(rows, tmp_path):
    done = fedvlm.run("tofa", embedded=rows, out=tmp_path / "a", protocol="own-test")
    lines = [{**line, "epsilon": 0.0} for line in audit(done.folder, embedded=rows)]
    assert audit_table(lines).splitlines()[-1].endswith("0.00")


def test_every_client_is_audited_through_the_channel(rows, tmp_path):
    method = {"name": "fedavg", "rounds": 2, "lr": 0.1}
    run = {"protocol": "own-test", "channel": {"clip": 1.0, "noise_multiplier": 0.5}}
    done = fedvlm.run(method, embedded=rows, out=tmp_path / "a", **run)
    lines = audit(done.folder, embedded=rows)
    assert len(lines) == 6
    assert all(line["epsilon"] > 0 for line in lines)


def test_audit_of_a_target_beside_dirichlet_clients_knows_the_run_s_clients(rows, tmp_path):
    run = {"protocol": "source-target", "target": ["sketch"]}
    run |= {"clients": {"partition": "dirichlet", "count": 3, "alpha": 5.0}}
    done = fedvlm.run({"name": "fedavg", "rounds": 1}, embedded=rows, out=tmp_path / "a", **run)
    lines = audit(done.folder, embedded=rows)
    assert [line["client"] for line in lines] == ["client-0", "client-1", "client-2"]


def test_audit_divides_as_the_run_did_when_rows_are_set_aside(rows, tmp_path, monkeypatch):
    worlds = []

    def recording_start(world):
        worlds.append(world)
        return initial_state(world)

    monkeypatch.setattr("fedvlm.runner.audit.initial_state", recording_start)
    run = {"protocol": "source-target", "target": ["photo"], "clients": {"public_ratio": 0.2}}
    method = {"name": "faa-clip", "rounds": 1}
    done = fedvlm.run(method, embedded=rows, out=tmp_path / "a", **run)
    audit(done.folder, embedded=rows)
    for id, counts in done.manifest["clients"].items():
        assert len(worlds[0].members[id].train) == counts["train"]
    assert len(worlds[0].members) == 3
