"""Export and predict: a classifier leaves a run, and meets images again with its own encoder."""

import csv
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedvlm import cli
from fedvlm.classifier.export import ONNX_FILE, ONNX_SCRIPT_FILE, export, linear_head, to_onnx
from fedvlm.classifier.personalised import Personalised
from fedvlm.classifier.predict import predict
from fedvlm.data import open_dataset
from fedvlm.encoders import huggingface
from fedvlm.errors import DataError, SettingsError
from fedvlm.runner.load import encode, open_encoder_with_notes

QUICK = {"rounds": 2, "lr": 1e-3}


METHODS = {
    "fedot": {**QUICK, "lr": 0.05},
    "fedavg": QUICK,
    "zero-shot": {},
    "fedadapter": QUICK,
    "tofa": {},
    "promptfl": {**QUICK, "n_ctx": 2},
}


@pytest.mark.parametrize("name", METHODS)
def test_an_exported_classifier_predicts_as_the_run_did(runs, folder, tmp_path, name):
    result = runs(name, **METHODS[name])
    export(result.folder, "site-1", tmp_path / "c")
    back, original = Personalised.from_pretrained(tmp_path / "c"), result.personalised("site-1")
    assert (back.encoder, back.method, back.client) == (original.encoder, original.method, "site-1")
    dataset = open_dataset(str(folder))
    rows = encode(dataset, open_encoder_with_notes("demo", {})[0], False, "float32", lambda *_: None).embedded
    chances = torch.from_numpy(original.predict_proba(rows.x)).max(1)
    expected = {
        dataset.source.name(row): (original.frozen.classes[label], chance)
        for row, (label, chance) in enumerate(zip(chances.indices.tolist(), chances.values.tolist(), strict=True))
    }
    predictions = predict(tmp_path / "c", [folder])
    assert predictions.skipped == []
    answers = {
        prediction.file.removeprefix(f"{folder}/"): (prediction.label, prediction.probability)
        for prediction in predictions.rows
    }
    assert answers.keys() == expected.keys()
    for key, (label, chance) in expected.items():
        assert answers[key][1] == pytest.approx(chance, abs=1e-4)
        assert answers[key][0] == label or chance < 0.51


def test_the_card_says_what_it_is_and_what_not_to_expect(runs, tmp_path):
    result = runs("fedot", **METHODS["fedot"])
    export(result.folder, "site-0", tmp_path / "c", onnx=True)
    card = (tmp_path / "c" / "README.md").read_text()
    for words in (result.manifest["encoder"], "blue, red", "`lr` | 0.05", "site-0", ONNX_FILE):
        assert words in card
    assert "protect the\nfolder as you protect the samples" in card


def test_a_client_whose_own_tensors_are_at_its_site_is_sent_there(runs, tmp_path, monkeypatch):
    result = runs("fedot", **METHODS["fedot"])
    classifier = result.personalised("site-0")
    shared = runs("fedavg", **QUICK).personalised("site-0")
    version = {"version": torch.tensor(3)}  # what a server has in place of local tensors
    monkeypatch.setattr("fedvlm.classifier.export.client_classifier", lambda *_: replace(classifier, local=version))
    with pytest.raises(DataError, match="'skew' of site-0 never left its site; the classifier is"):
        export(result.folder, "site-0", tmp_path / "c")
    for novelty, words in ((shared.novelty, "protect the\nfolder"), (None, "no tensor of this client's own")):
        bare = replace(shared, local=version, novelty=novelty)
        monkeypatch.setattr("fedvlm.classifier.export.client_classifier", lambda *_, bare=bare: bare)
        export(runs("fedavg", **QUICK).folder, "site-0", tmp_path / "c")
        assert words in (tmp_path / "c" / "README.md").read_text()
    assert Personalised.from_pretrained(tmp_path / "c").local == {}
    assert "no tensor of this client's own" in (tmp_path / "c" / "README.md").read_text()


def session(data):
    import onnxruntime

    return onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", ["fedot", "fedavg", "promptfl"])
def test_the_onnx_head_gives_torchs_logits_for_rows_of_any_length(runs, tmp_path, name):
    result = runs(name, **METHODS[name])
    export(result.folder, "site-0", tmp_path / "c", onnx=True)
    classifier = result.personalised("site-0")
    x = 7 * torch.randn(33, classifier.frozen.dim, generator=torch.Generator().manual_seed(3))
    model = session((tmp_path / "c" / ONNX_FILE).read_bytes())
    logits, chances = model.run(["logits", "probabilities"], {"embeddings": x.numpy()})
    expected = classifier.logits(x)
    assert np.abs(logits - expected.numpy()).max() < 1e-5 * expected.abs().max()
    assert np.abs(chances - classifier.predict_proba(x)).max() < 1e-5
    metadata = model.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == list(classifier.frozen.classes)
    assert metadata["encoder"] == classifier.encoder


def test_a_classifier_that_is_not_linear_is_traced(runs):
    classifier = runs("fedadapter", **QUICK).personalised("site-0")
    bent = replace(classifier, local={key: torch.ones_like(value) for key, value in classifier.local.items()})
    assert linear_head(bent) is None
    x = torch.randn(50, bent.frozen.dim, generator=torch.Generator().manual_seed(5))
    (probabilities,) = session(to_onnx(bent)).run(["probabilities"], {"embeddings": x.numpy()})
    assert np.abs(probabilities - bent.predict_proba(x)).max() < 1e-5


@pytest.mark.parametrize(
    "name", ["alone", "auto", "clip-gda", "fedclip", "fedgh", "gh-ofl", "ridge", "tip-adapter", "tofa"]
)
def test_methods_over_embeddings_equal_their_onnx_and_the_ten_lines_run_it(runs, tmp_path, name):
    result = runs(name)
    export(result.folder, "site-0", tmp_path, onnx=True)
    classifier = result.personalised("site-0")
    assert len((tmp_path / ONNX_SCRIPT_FILE).read_text().splitlines()) <= 11
    x = torch.nn.functional.normalize(torch.randn(20, classifier.frozen.dim), dim=1).numpy()
    np.save(tmp_path / "x.npy", x)
    command = [sys.executable, ONNX_SCRIPT_FILE, "x.npy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    printed = [line.split() for line in done.stdout.splitlines()]
    probabilities = np.array([row[1:] for row in printed], float)
    assert np.abs(probabilities - classifier.predict_proba(x)).max() < 1e-5
    assert [row[0] for row in printed] == classifier.predict(x)


def test_a_classifier_without_a_form_in_onnx_is_refused_and_nothing_is_written(runs, tmp_path):
    result = runs("cocoop", rounds=1)
    with pytest.raises(SettingsError, match="cocoop cannot be written as ONNX: its prediction is not linear"):
        export(result.folder, "site-0", tmp_path / "c", onnx=True)
    with pytest.raises(SettingsError, match="no client 'site-9' trained"):
        export(result.folder, "site-9", tmp_path / "c", onnx=True)
    assert not (tmp_path / "c").exists()


def test_a_bias_is_part_of_the_head(runs):
    classifier = runs("fedavg", **QUICK).personalised("site-0")

    class Shifted(Personalised):
        def logits(self, x):
            return super().logits(x) + torch.tensor([3.0, -4.0])

    head = linear_head(Shifted(**vars(classifier)))
    assert head is not None
    weight, bias = head
    assert bias.tolist() == pytest.approx([3.0, -4.0], abs=1e-4)
    assert torch.allclose(weight, classifier.frozen.scale * classifier.shared["head"], atol=1e-4)


def test_another_encoder_than_its_own_is_refused_by_fingerprint(runs, folder, tmp_path, monkeypatch):
    export(runs("fedavg", **QUICK).folder, "site-0", tmp_path / "c")

    def other_encoder():
        box = real()
        box.identity = {**box.identity, "weights": "0" * 64}
        return box

    real = huggingface.demo
    monkeypatch.setattr(huggingface, "demo", other_encoder)
    with pytest.raises(SettingsError, match="demo is not the encoder this was trained on: its finger"):
        predict(tmp_path / "c", [folder])


def test_a_broken_picture_is_named_and_the_others_go_on(runs, folder, tmp_path):
    export(runs("fedavg", **QUICK).folder, "site-0", tmp_path / "c")
    good = tmp_path / "good.png"
    good.write_bytes((folder / "site-0" / "red" / "0.png").read_bytes())
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:60])
    (tmp_path / "empty.jpg").write_bytes(b"")
    predictions = predict(tmp_path / "c", [tmp_path / "cut.png", good, tmp_path / "empty.jpg"])
    assert [prediction.file for prediction in predictions.rows] == [str(good)]
    assert [name for name, _ in predictions.skipped] == [str(tmp_path / n) for n in ("cut.png", "empty.jpg")]


def test_a_nan_of_the_encoder_is_said_of_its_picture_only(runs, folder, tmp_path, monkeypatch):
    from fedvlm.encoders.huggingface import HuggingFace

    export(runs("fedavg", **QUICK).folder, "site-0", tmp_path / "c")
    real = HuggingFace.embed

    def spoilt(self, batch, patches):
        answer = real(self, batch, patches)
        answer.pooled[1] = np.nan
        return answer

    monkeypatch.setattr(HuggingFace, "embed", spoilt)
    predictions = predict(tmp_path / "c", [folder / "site-0" / "red"])
    assert len(predictions.rows) == 19
    assert "demo answered with NaN" in predictions.skipped[0][1]


@pytest.mark.parametrize(
    ("images", "message"),
    [(["nowhere"], "there is no "), (["empty"], "has no images"), (["note.txt"], "does not end as")],
)
def test_places_without_pictures_are_refused(runs, tmp_path, images, message):
    export(runs("fedavg", **QUICK).folder, "site-0", tmp_path / "c")
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("x")
    with pytest.raises(DataError, match=message):
        predict(tmp_path / "c", [tmp_path / name for name in images])


def test_a_folder_without_a_classifier_and_a_damaged_one_are_refused(runs, tmp_path):
    with pytest.raises(DataError, match="holds no classifier; `fedvlm export` writes one"):
        predict(tmp_path, [tmp_path])
    export(runs("fedavg", **QUICK).folder, "site-0", tmp_path / "c")
    path = tmp_path / "c" / "classifier.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match="not a complete safetensors file|damaged"):
        predict(tmp_path / "c", [tmp_path])


def test_a_folder_with_other_files_is_not_written_to(runs, tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(DataError, match="holds other files"):
        export(runs("fedavg", **QUICK).folder, "site-0", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_commands_export_and_predict_write_csv_and_say_what_they_skipped(runs, folder, tmp_path, call):
    run = runs("fedavg", **QUICK).folder
    output = call("export", run, tmp_path / "c", "--client", "site-0", "--onnx")
    assert output.exit_code == 0
    assert "fedavg for site-0 (2 classes, demo@" in output.output
    done = call("predict", tmp_path / "c", folder / "site-0", "--output", tmp_path / "p.csv")
    assert done.exit_code == 0
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert len(rows) == 40
    assert set(rows[0]) == {"file", "class", "probability"}
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    done = call("predict", tmp_path / "c", bad, folder / "site-0" / "red")
    assert done.exit_code == 1
    assert len(done.stdout.splitlines()) == 21
    assert f"skipped {bad}: not an image" in done.stderr


def test_the_command_ledger_prints_and_verifies(tmp_path, monkeypatch, capsys, call):
    from fedvlm.deploy.site.ledger import Ledger

    ledger = Ledger(tmp_path)
    ledger.add("in", 0, {"head": torch.zeros(4, 6)}, b"abc")
    head = ledger.add("refused", 0, error="not allowed here")  # as a site notes it
    done = call("ledger", tmp_path, "--head", head[:10])
    assert done.exit_code == 0
    assert "not allowed here" in done.stdout
    assert "2 lines, the hash chain is intact" in done.stderr
    assert len(json.loads(call("ledger", tmp_path, "--json").stdout)) == 2
    ledger.path.write_text(ledger.path.read_text().replace('"bytes": 3', '"bytes": 1'))
    done = call("ledger", tmp_path)
    assert done.exit_code == 1
    assert "line 1 was changed" in done.stderr
    assert call("ledger", tmp_path, "--head", "f" * 64).exit_code == 1
    monkeypatch.setattr(sys, "argv", ["fedvlm", "ledger", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "there is no" in capsys.readouterr().err
