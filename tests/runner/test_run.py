"""A run from settings to tables: repeatable, on record, and refusing bad input."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedvlm
from fedvlm.core import make
from fedvlm.encoders.store import save_store
from fedvlm.errors import DataError, FedVLMError, SettingsError
from fedvlm.report.tables import compare_table
from fedvlm.runner import training as trainings
from fedvlm.runner.load import smoke_subset
from fedvlm.storage.files import read_tensors

QUICK = {"name": "fedot", "rounds": 3, "lr": 1e-3, "tau": 20.0}


def test_a_run_gives_g_p_c_and_the_same_files_every_time(rows, files, tmp_path):
    first = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", seeds=[0, 1])
    again = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "b", seeds=[0, 1], workers=2)
    assert files(first.folder) == files(again.folder)
    assert set(first.tables[0]) >= {"G", "P", "C", "G art", "P sketch"}
    assert len(first.rounds) == 2 * 3 * 3


def test_round_zero_of_fedot_is_zero_shot(rows, tmp_path):
    fedot = fedvlm.run({**QUICK, "rounds": 0}, embedded=rows, out=tmp_path / "a")
    zero = fedvlm.run("zero-shot", embedded=rows, out=tmp_path / "b")
    assert fedot.tables == zero.tables


def test_training_beats_zero_shot_on_own_domains(rows, tmp_path):
    settings = {"name": "fedot", "rounds": 20, "lr": 5e-3, "tau": 20.0}
    fedot = fedvlm.run(settings, embedded=rows, out=tmp_path / "a")
    zero = fedvlm.run("zero-shot", embedded=rows, out=tmp_path / "b")
    assert fedot.tables[0]["P"] > zero.tables[0]["P"] + 0.05


def test_a_round_line_has_loss_accuracy_bytes_and_disagreement(rows, tmp_path):
    line = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a").rounds[0]
    assert {"loss", "accuracy", "validation", "unseen", "seconds", "cosine"} <= set(line)
    assert line["difference"] <= line["difference_bound"] == 4 * 20.0
    trained = line["clients"]["photo"]
    assert trained["bytes_up"] == trained["bytes_down"] == 4 * 4 * 16
    assert line["clients"]["art"]["bytes_up"] == 0


def test_the_outcome_has_the_papers_numbers_of_each_map(rows, tmp_path):
    training = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a").trainings()["art"]
    numbers = training["maps"]["photo"]
    assert numbers["condition number"] == pytest.approx(1, abs=1e-4)
    assert numbers["orthogonality error"] < 1e-5
    assert numbers["degrees of freedom"] == 16 * 15 / 2


def test_the_manifest_says_where_the_numbers_come_from(rows, tmp_path):
    manifest = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a").manifest
    assert manifest["encoder"] == "toy@0"
    assert manifest["rows"] == rows.fingerprint
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["identity"]["method"]["rounds"] == 3
    assert {"commit", "dirty", "started"} <= set(manifest)
    assert manifest["clients"]["art"] == {"train": 48, "validation": 16, "test": 16}


def test_a_finished_run_is_not_run_again_unless_asked(rows, files, tmp_path, monkeypatch):
    fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a")
    before = files(tmp_path / "a")
    calls = []
    real = trainings.run_rounds
    monkeypatch.setattr(trainings, "run_rounds", lambda *all, **kwargs: calls.append(1) or real(*all, **kwargs))
    fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a")
    assert calls == []
    fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", again=True)
    assert len(calls) == 3
    assert files(tmp_path / "a") == before


def test_the_default_directory_is_made_of_the_settings(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a = fedvlm.run(QUICK, embedded=rows)
    b = fedvlm.run({**QUICK, "rounds": 2}, embedded=rows)
    assert a.folder == fedvlm.run(QUICK, embedded=rows).folder != b.folder
    assert a.folder.parent.name == "runs"


def test_a_run_on_a_store_is_named_after_the_store(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = save_store(tmp_path / "clinic.safetensors", rows)
    done = fedvlm.run("zero-shot", encoder=f"store:{store}")
    assert done.folder.name.startswith("zero-shot-clinic-")


def test_another_runs_directory_is_refused(rows, rows_like, tmp_path):
    fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a")
    with pytest.raises(SettingsError, match="holds another run, which differs in\n  method"):
        fedvlm.run({**QUICK, "rounds": 2}, embedded=rows, out=tmp_path / "a")
    (tmp_path / "a" / "result.json").unlink()
    with pytest.raises(SettingsError, match="rows: there 'toy-240-16-0', here 'toy-240-32-0'"):
        fedvlm.run(QUICK, embedded=rows_like(dim=32), out=tmp_path / "a")


def test_a_personalised_classifier_survives_saving(rows, tmp_path):
    result = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a", protocol="own-test")
    classifier = result.personalised("photo")
    classifier.save_pretrained(tmp_path / "mine")
    back = fedvlm.Personalised.from_pretrained(tmp_path / "mine")
    assert torch.equal(back.logits(rows.x), classifier.logits(rows.x))
    assert set(back.predict(rows.x)) <= set(rows.classes)
    other_classifier = result.personalised("art")
    assert not torch.equal(other_classifier.logits(rows.x), classifier.logits(rows.x))
    test = result.trainings()["all"]["scores"]["photo"]
    assert 0 <= test["test_hits"] <= test["test_rows"]


def test_a_client_that_joins_later_gets_the_shared_head_and_the_identity(rows, tmp_path):
    result = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a")
    tensors, _ = read_tensors(tmp_path / "a" / "trainings" / "0-art.safetensors")
    classifier = result.unseen("art")
    torch.testing.assert_close(classifier.logits(rows.x), 20.0 * rows.x @ tensors["shared/head"].mT)


def test_predicting_with_other_embeddings_is_refused(rows, tmp_path):
    classifier = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a").personalised("photo")
    with pytest.raises(DataError, match=r"must have the shape \(samples, 16\) and come from .*; got \(5, 8\)"):
        classifier.logits(torch.zeros(5, 8))
    with pytest.raises(DataError, match="NaN or infinite"):
        classifier.logits(torch.full((1, 16), torch.nan))


def test_an_unknown_client_or_seed_of_a_result_is_refused(rows, tmp_path):
    result = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a")
    with pytest.raises(SettingsError, match="no client 'phto' trained .* art, photo, sketch"):
        result.personalised("phto")
    with pytest.raises(SettingsError, match="no seed 4"):
        result.personalised("photo", seed=4)


def spoiled(rows, place, value):
    x = rows.x.clone()
    x[place] = value
    return replace(rows, x=x)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda r: spoiled(r, 7, torch.nan), {}, "1 embeddings hold NaN .* the first in row 7"),
        (lambda r: spoiled(r, (3, 2), torch.inf), {}, "the first in row 3"),
        (
            lambda r: replace(r, labels=np.where(r.labels == 3, 9, r.labels)),
            {},
            "label 9 must be from 0 to 3",
        ),
        (lambda r: replace(r, text=None), {}, "fedot needs text .* head = 'random'"),
        (lambda r: r, {"method": {**QUICK, "blocks": 3}}, "3.*divi.*1, 2, 4, 8, 16"),
        (lambda r: replace(r, classes=(*r.classes, "elk")), {}, "elk"),
        (lambda r: r, {"protocol": "own"}, "did you mean 'own-test'"),
        (lambda r: r, {"fraction": 0.0}, "fraction must be above 0 and at most 1, got 0.0"),
        (lambda r: r, {"seeds": [1, 1]}, "different numbers"),
        (lambda r: r, {"seeds": 3}, r"seeds = 3 .* \[0, 1, 2\] .* three seeds, or \[3\] .* seed 3"),
        (lambda r: r, {"seeds": 1}, r"seeds = 1 .* \[0\] .* one seed, or \[1\] .* seed 1"),
        (lambda r: r, {"seeds": 50}, r"seeds = 50 .* \[0, 1, 2\] .* three seeds, or \[50\]"),
        (lambda r: r, {"seed": 1}, "did you mean 'seeds'"),
        (lambda r: r, {"clients": {"partition": "domian"}}, "did you mean 'domain'"),
        (lambda r: r, {"clients": {"shots": -1}}, "clients.shots must be .*, got -1"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(rows, tmp_path, change, settings, message):
    with pytest.raises(FedVLMError, match=message):
        fedvlm.run(**{"method": QUICK, "embedded": change(rows), "out": tmp_path / "a", **settings})
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_a_method_object_is_taken_as_it_is(rows, tmp_path):
    method = make("fedavg", rounds=1)
    result = fedvlm.run(method, embedded=rows, out=tmp_path / "a")
    assert result.manifest["identity"]["method"]["name"] == "fedavg"


def test_a_smoke_run_is_short_and_says_so(rows_like, tmp_path):
    result = fedvlm.run(
        {**QUICK, "rounds": 200},
        embedded=rows_like(rows=3000),
        out=tmp_path / "a",
        smoke=True,
        seeds=[0, 1],
    )
    assert len(result.rounds) == 3 * 3
    assert sum(sum(counts.values()) for counts in result.manifest["clients"].values()) <= 600
    assert "SMOKE" in result.table()


def test_the_selection_is_in_the_table(rows, tmp_path):
    results = [
        fedvlm.run(QUICK, embedded=rows, out=tmp_path / name, selection=name)
        for name in ("last", "validation", "oracle")
    ]
    text = compare_table(results)
    assert "ORACLE: best test round" in text
    assert "best validation round" in text
    means = [result.tables[0]["C"] for result in results]
    assert means[2] >= means[0]


def test_a_saved_classifier_holds_no_other_clients_tensors(rows, tmp_path):
    odd = replace(rows, domains=np.where(rows.domains == "photo", "art/b", rows.domains))
    result = fedvlm.run(QUICK, embedded=odd, out=tmp_path / "a", protocol="own-test")
    assert set(result.personalised("art").local) == {"skew"}
    assert set(result.personalised("art/b").local) == {"skew"}


def test_a_finished_run_of_other_rows_is_not_passed_off(rows, rows_like, tmp_path):
    fedvlm.run(QUICK, embedded=rows, out=tmp_path / "a")
    with pytest.raises(SettingsError, match="rows: there 'toy-240-16-0'"):
        fedvlm.run(QUICK, embedded=rows_like(seed=1), out=tmp_path / "a")


def test_unreadable_pictures_are_in_the_record(tmp_path):
    from PIL import Image

    for number in range(60):
        path = tmp_path / "data" / f"d{number % 2}" / f"c{number // 2 % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 255 - number, 9)).save(path)
    path.write_bytes(b"no image")
    result = fedvlm.run("zero-shot", data=str(tmp_path / "data"), encoder="demo", out=tmp_path / "a")
    [message] = [entry for entry in result.manifest["notes"] if entry.startswith("skipped ")]
    assert "59.png" in message


def test_cross_device_gives_a_column_for_every_count(rows, tmp_path):
    many_clients = replace(rows, clients=np.array([f"w{i:02}" for i in range(12)])[np.arange(240) // 20])
    result = fedvlm.run(
        QUICK,
        embedded=many_clients,
        out=tmp_path / "a",
        protocol="cross-device",
        clients={"partition": "own"},
        counts=[1, 4, 8],
        unseen=4,
    )
    assert list(result.tables[0]) == [f"{column}, n={n}" for n in (1, 4, 8) for column in ("unseen", "own")]
    assert [len(training["scores"]) for training in result.trainings().values()] == [5, 8, 12]
    assert "unseen, n=8" in result.table()


def test_the_manifest_keeps_what_a_run_reproduces_and_its_identity_does_not(rows, tmp_path):
    named = fedvlm.run("zero-shot", embedded=rows, out=tmp_path / "a", reproduces=["fedot-v1/T1", "fedot-v1/T3"])
    assert named.manifest["reproduces"] == ["fedot-v1/T1", "fedot-v1/T3"]
    plain = fedvlm.run("zero-shot", embedded=rows, out=tmp_path / "b")
    assert plain.manifest["reproduces"] == []
    assert named.manifest["identity"] == plain.manifest["identity"]


def test_a_run_reproduces_names_and_nothing_else(rows):
    with pytest.raises(SettingsError, match="reproduces must be .*, got 7"):
        fedvlm.run("zero-shot", embedded=rows, reproduces=7)


def test_a_smoke_run_of_many_clients_has_few(rows_like, tmp_path):
    clients = {"partition": "dirichlet", "count": 100}
    done = fedvlm.run(
        "zero-shot",
        embedded=rows_like(900),
        out=tmp_path / "a",
        protocol="own-test",
        clients=clients,
        smoke=True,
    )
    assert 1 < len(done.manifest["clients"]) <= 10
    assert done.manifest["identity"]["clients"]["count"] == 100


def test_a_smoke_run_has_rows_of_every_class(rows_like):
    many_classes = replace(rows_like(4000), classes=tuple(map(str, range(100))), labels=np.arange(4000) // 4 % 100)
    class_counts = np.bincount(many_classes.labels[smoke_subset(many_classes)], minlength=100)
    assert class_counts.min() >= 9
    assert class_counts.sum() <= 1200
