"""Several findings per image: laws of training, evaluation and reading, on every method that supports them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

import fedvlm
from fedvlm.core import make, methods
from fedvlm.data.arrays import from_arrays
from fedvlm.data.manifests import read_manifest
from fedvlm.encoders.store import open_store, save_store
from fedvlm.errors import DataError, SettingsError
from fedvlm.evaluate import findings
from fedvlm.parts.findings import per_finding
from fedvlm.runner.audit import audit

NAMES = ["edema", "effusion", "mass"]
QUICK = {
    "zero-shot": {},
    "alone": {},
    "pooled": {},
    "ridge": {},
    "probe": {"rounds": 3},
    "auto": {},
    "fedavg": {"rounds": 2},
    "fedprox": {"rounds": 2},
    "fedot": {"rounds": 2},
    "scaffold": {"rounds": 2},
    "tofa": {},
}


def draw_clients(samples=60, dim=12, unknown=0.1, seed=0):
    generator = np.random.default_rng(seed)
    weights = generator.normal(size=(len(NAMES), dim)) * 2
    clients = {}
    for id in "abc":
        x = generator.normal(size=(samples, dim))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        y = (generator.random((samples, len(NAMES))) < 1 / (1 + np.exp(-2 * x @ weights.T))).astype(float)
        y[generator.random(y.shape) < unknown] = np.nan
        clients[id] = (x, y)
    text = np.stack([-weights, weights], axis=1)
    return clients, text


def run(name, clients, text, classes=NAMES, **settings):
    method = {"name": name, **QUICK.get(name, {})}
    return fedvlm.run(method, clients=clients, classes=classes, text=text, allow_small=True, seeds=[0], **settings)


def scores_of(result):
    return next(iter(result.trainings().values()))["scores"]


def test_these_methods_support_several_findings():
    supported = {name for name, kind in methods().items() if make(name).traits.classes.multi_label}
    assert supported == {*QUICK, "promptfl", "fedotp"}


@pytest.mark.parametrize("name", QUICK)
def test_both_engines_give_the_same_scores(name):
    clients, text = draw_clients()
    batched, single = (scores_of(run(name, clients, text, engine=engine)) for engine in ("batched", "single"))
    for id in clients:
        assert batched[id]["test_hits"] == single[id]["test_hits"]
        assert batched[id]["AUC"] == pytest.approx(single[id]["AUC"], abs=1e-6)
        assert batched[id]["loss"] == pytest.approx(single[id]["loss"], rel=1e-4)


@pytest.mark.parametrize("name", ["ridge", "fedavg", "auto", "tofa"])
def test_order_of_findings_does_not_matter(name):
    clients, text = draw_clients()
    order = [2, 0, 1]
    moved = {id: (x, y[:, order]) for id, (x, y) in clients.items()}
    first = scores_of(run(name, clients, text))
    second = scores_of(run(name, moved, text[order], classes=[NAMES[i] for i in order]))
    for id in clients:
        for place, finding in enumerate(order):
            assert second[id]["findings"][place].get("AUC") == pytest.approx(
                first[id]["findings"][finding].get("AUC"), abs=1e-6
            )


@pytest.mark.parametrize("name", ["fedavg", "fedot", "ridge", "scaffold"])
def test_a_finding_without_training_labels_keeps_the_prediction_of_its_text(name):
    """Labels of the last finding are unknown at every training sample of all clients."""
    clients, text = draw_clients(unknown=0)
    table = from_arrays(clients, NAMES, text)
    matrix = table.findings[table.labels].astype(float)
    split = np.array(["train", "train", "val", "test"] * (len(matrix) // 4))
    matrix[split != "test", 2] = np.nan
    blind = {id: (table.x[table.clients == id].numpy(), matrix[table.clients == id]) for id in clients}
    embedded = replace(from_arrays(blind, NAMES, text), splits=np.where(split == "val", "validation", split))
    settings = {"clients": {"partition": "own"}, "protocol": "own-test", "allow_small": True, "seeds": [0]}
    trained = fedvlm.run({"name": name, **QUICK[name]}, embedded=embedded, **settings)
    zero_shot = fedvlm.run("zero-shot", embedded=embedded, **settings)
    for id in clients:
        learnt, prior = (scores_of(result)[id]["findings"][2] for result in (trained, zero_shot))
        assert learnt["AUC"] == pytest.approx(prior["AUC"], abs=1e-6)


def test_a_client_with_only_unknown_labels_uploads_what_it_was_sent():
    method = per_finding(make("fedavg", rounds=1, head="random"))
    table = from_arrays(draw_clients()[0], NAMES)
    frozen = fedvlm.core.Frozen(table.classes, table.x.shape[1], 100.0, None, multi_label=True)
    shared, local = method.init(frozen)
    n = 8
    client = fedvlm.core.Client(
        table.x[:n],
        torch.full((n, 3), -1),
        torch.arange(n)[None],
        table.x[:2],
        torch.full((2, 3), -1),
        table.x[:0],
        torch.zeros(1, 0, dtype=torch.long),
        torch.zeros(3, 0, table.x.shape[1]),
        torch.zeros(1, 0),
    )
    upload, _ = method.update(frozen, method.send(shared, "a"), local, client)
    assert all(torch.equal(upload[key], shared[key]) for key in shared)


def test_pooled_agrees_with_logistic_regression_of_scikit_learn():
    clients, _ = draw_clients(samples=200, unknown=0)
    result = run("pooled", clients, None)
    table = from_arrays(clients, NAMES)
    y = table.findings[table.labels]
    shared, _ = result.outcome(result.manifest["trainings"][0], 0)
    from fedvlm.runner.prepare import prepare
    from fedvlm.runner.settings import build

    partition = prepare(
        build({"method": {"name": "pooled"}, "clients": {"partition": "own"}, "protocol": "own-test"}), table, 0
    ).partition
    train = np.concatenate([client.train for client in partition.clients.values()])
    test = np.concatenate([client.test for client in partition.clients.values()])
    x = table.x.numpy()
    for finding in range(len(NAMES)):
        weight, bias = shared["weight"][finding], shared["bias"][finding]
        logits = x[test] @ (weight[1] - weight[0]).numpy() + float(bias[1] - bias[0])
        ours = roc_auc_score(y[test, finding], logits)
        norm = float((weight[1] - weight[0]).norm())
        # equal regularisation: the same norm of the weights
        low, high = 1e-6, 1e6
        for _ in range(60):
            c = (low * high) ** 0.5
            other = LogisticRegression(C=c, tol=1e-8, max_iter=5000).fit(x[train], y[train, finding])
            low, high = (c, high) if np.linalg.norm(other.coef_) < norm else (low, c)
        assert ours == pytest.approx(roc_auc_score(y[test, finding], other.decision_function(x[test])), abs=1e-3)


def test_metrics_agree_with_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(80, 3, generator=generator).mul(4).round() / 4  # with ties
    y = (torch.rand(80, 3, generator=generator) < 0.3).long()
    y[torch.rand(80, 3, generator=generator) < 0.2] = -1
    scores = findings.finding_scores(logits, y, [0.4, 0.5, 0.6])
    for finding, threshold in enumerate([0.4, 0.5, 0.6]):
        known = y[:, finding] >= 0
        truth, p = y[known, finding].numpy(), logits[known, finding].double().sigmoid().numpy()
        assert scores[finding]["AUC"] == pytest.approx(roc_auc_score(truth, p))
        assert scores[finding]["AP"] == pytest.approx(average_precision_score(truth, p))
        assert scores[finding]["F1"] == pytest.approx(f1_score(truth, p >= threshold))
        assert scores[finding]["known"] == known.sum() and scores[finding]["positive"] == truth.sum()
    known = y >= 0
    summary = findings.summarise(logits, y, scores)
    assert summary["micro AP"] == pytest.approx(
        average_precision_score(y[known].numpy(), logits[known].double().sigmoid().numpy())
    )


def test_chosen_thresholds_have_the_highest_f1():
    generator = torch.Generator().manual_seed(1)
    logits, y = torch.randn(50, 2, generator=generator), (torch.rand(50, 2, generator=generator) < 0.4).long()
    chosen = findings.choose_thresholds(logits, y)
    for finding in range(2):
        p, truth = logits[:, finding].double().sigmoid(), y[:, finding].numpy()
        best = max(f1_score(truth, (p >= edge).numpy()) for edge in p)
        assert f1_score(truth, (p >= chosen[finding]).numpy()) == pytest.approx(best)


def test_one_finding_per_sample_read_as_single_label_is_a_single_label_run(tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    header = "labels," + ",".join(f"e{i}" for i in range(4))
    lines = [f"{'ab'[i % 2]}," + ",".join(map(str, row)) for i, row in enumerate(x)]
    (tmp_path / "rows.csv").write_text("\n".join([header, *lines]))
    table = open_store(tmp_path / "rows.csv")
    assert table.findings is None and table.classes == ("a", "b") and table.labels.tolist() == [0, 1] * 15


def test_manifest_with_names_and_with_columns_give_the_same_labels(tmp_path):
    from PIL import Image

    cells = ["edema|mass", "no finding", "mass", ""]
    for number in range(4):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "names.csv").write_text("path,labels\n" + "".join(f"{i}.png,{cell}\n" for i, cell in enumerate(cells)))
    rows = ["1,1", "0,0", "0,1", ","]
    (tmp_path / "columns.csv").write_text(
        "path,edema,mass\n" + "".join(f"{i}.png,{row}\n" for i, row in enumerate(rows))
    )
    first, second = (read_manifest(tmp_path / name) for name in ("names.csv", "columns.csv"))
    assert first.classes == second.classes == ("edema", "mass")
    expected = [[1, 1], [0, 0], [0, 1], [-1, -1]]
    assert first.findings[first.labels].tolist() == second.findings[second.labels].tolist() == expected


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("path,labels\n0.png,no finding|edema\n", "it has a finding, or no finding"),
        ("path,edema,mass\n0.png,1,0\n", "no image has the finding 'mass'"),
        ("path,sex\n0.png,f\n", "no column 'label'"),
        ("path,edema,mass\n0.png,1,0\n0.png,0,1\n", "rows 1 and 2 give 0.png different labels; give it one row"),
        ("path,labels\n0.png,edema\n0.png,mass\n", "rows 1 and 2 give 0.png different labels"),
        ("path,label\n0.png,edema\n0.png,mass\n", "rows 1 and 2 give 0.png different labels"),
        ("path,,mass\n0.png,1,1\n", "a class has an empty name"),
    ],
)
def test_bad_manifests_are_refused(tmp_path, text, match):
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=match):
        read_manifest(tmp_path / "list.csv")


def test_columns_that_are_nearly_findings_are_named(tmp_path):
    from PIL import Image

    for number in range(2):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "list.csv").write_text("path,edema,mass,nodule,sex\n0.png,1,-1,,f\n1.png,0,1,,m\n")
    table = read_manifest(tmp_path / "list.csv")
    assert table.classes == ("edema",)
    assert table.notes == (
        "the column 'mass' has the cells -1, 1, so it is a subgroup and no finding",
        "the column 'nodule' is empty, and no finding",
    )


def test_contradictory_copies_and_more_findings_than_samples_are_named():
    x = np.random.default_rng(0).normal(size=(12, 4))
    y = np.eye(12, 20) + np.eye(12, 20, 8)
    y[1] = np.nan
    clients = {"a": (x, y), "b": (np.concatenate([x[:2], x + 1]), np.concatenate([1 - y[:1], y[2:3], y]))}
    names = [f"f{number}" for number in range(20)]
    notes = fedvlm.run("ridge", clients=clients, classes=names, allow_small=True, seeds=[0]).manifest["notes"]
    assert any(note.startswith("there are more findings (20) than training samples (1") for note in notes)
    contradictions = [note for note in notes if "contradict" in note]  # what is unknown contradicts nothing
    assert [note.split(" with ")[0] for note in contradictions] == ["an image is in the data twice"]


def test_a_patient_at_two_clients_is_refused(tmp_path):
    cells = ("edema", "mass", "edema|mass")
    rows = [f"{'ab'[i % 2]},p{i // 2},{cells[i % 3]},{i},1,{-i}" for i in range(20)]
    (tmp_path / "rows.csv").write_text("\n".join(["client,group,labels,e0,e1,e2", *rows]) + "\n")
    with pytest.raises(DataError, match="has samples at 'a' and at 'b', which are split independently"):
        fedvlm.run("ridge", encoder=f"store:{tmp_path / 'rows.csv'}", protocol="own-test", clients={"partition": "own"})


def test_store_round_trip_keeps_findings_and_text(tmp_path):
    table = from_arrays(*[draw_clients()[0], NAMES, draw_clients()[1]])
    again = open_store(save_store(tmp_path / "rows", table))
    assert again.classes == table.classes
    assert (again.findings[again.labels] == table.findings[table.labels]).all()
    assert torch.allclose(again.negative_text, table.negative_text) and torch.allclose(again.text, table.text)


@pytest.mark.parametrize("name", ["fedpft", "gh-ofl", "fedgh", "ditto"])
def test_other_methods_are_refused_with_the_reason(name):
    clients, text = draw_clients()
    with pytest.raises(SettingsError, match="exactly one class, and these data have several findings"):
        run(name, clients, text)


def test_bad_arrays_are_refused():
    clients, text = draw_clients()
    x, y = clients["a"]
    with pytest.raises(DataError, match="it must be 1 \\(present\\), 0 \\(absent\\) or NaN"):
        from_arrays({"a": (x, y + 1)}, NAMES)
    with pytest.raises(DataError, match="unknown for every image"):
        from_arrays({"a": (x, np.where(np.arange(3) == 1, np.nan, y))}, NAMES)
    with pytest.raises(DataError, match="unequal numbers of findings"):
        from_arrays({"a": (x, y), "b": (x, y[:, :2])})
    with pytest.raises(DataError, match="findings, 2"):
        from_arrays(clients, NAMES, text[:, 0])
    with pytest.raises(SettingsError, match="clients.shots = 4 needs one class per image"):
        fedvlm.run(
            "ridge", embedded=from_arrays(clients, NAMES), protocol="own-test", clients={"partition": "own", "shots": 4}
        )


@pytest.mark.parametrize("name", ["ridge", "auto", "tofa"])
def test_a_verified_sum_without_limits_gives_what_plain_uploads_give(name):
    clients, text = draw_clients(samples=120)
    plain, hidden = (scores_of(run(name, clients, text, channel={"verified": flag})) for flag in (False, True))
    for id in clients:
        assert hidden[id]["AUC"] == pytest.approx(plain[id]["AUC"], abs=1e-6)


def test_findings_of_which_some_lack_a_kind_of_samples_train_together():
    """Their tensors differ in shape, because only the other findings have Gaussian classes."""
    clients, text = draw_clients(samples=120, unknown=0)
    for x, y in clients.values():
        y[:, 1] = np.arange(len(x)) < 3  # too few to upload
    result = fedvlm.run("auto", clients=clients, classes=NAMES, text=text, seeds=[0])
    assert all(np.isfinite(score["loss"]) for score in scores_of(result).values())


def test_an_audit_attacks_every_finding_and_gives_the_worst():
    clients, text = draw_clients(samples=90)
    table = from_arrays(clients, NAMES, text)
    settings = {"protocol": "own-test", "clients": {"partition": "own"}, "seeds": [0]}
    [line, *_] = audit(fedvlm.run("ridge", embedded=table, **settings).folder, embedded=table)
    assert line["classes"] == 2 * len(NAMES) and line["smallest class"] >= 16
    assert 0.5 < line["AUC upload"] <= 1 and 0.5 < line["AUC span"] <= 1


def test_what_a_method_describes_of_its_findings_is_a_mean():
    clients, text = draw_clients(samples=120)
    noisy = {"name": "tofa", "noise_multiplier": 2.0}
    maps = next(iter(fedvlm.run(noisy, clients=clients, classes=NAMES, text=text, seeds=[0]).trainings().values()))
    assert maps["maps"]["a"].keys() == {"visual temperature", "text temperature", "epsilon", "delta"}


def test_prompts_and_transport_train_on_findings_in_images(tmp_path):
    """promptfl and fedotp with the built-in encoder, from a manifest."""
    from PIL import Image

    generator = np.random.default_rng(0)
    lines = ["path,client,red,bright"]
    for number in range(48):
        red, bright = generator.integers(0, 2, 2)
        pixels = generator.integers(0, 60, (32, 32, 3)) + 120 * bright
        pixels[..., 0] += 70 * red
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{'ab'[number % 2]},{red},{bright}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    for name in ("promptfl", "fedotp"):
        result = fedvlm.run(
            {"name": name, "rounds": 1},
            data=str(tmp_path / "list.csv"),
            encoder="demo",
            protocol="own-test",
            clients={"partition": "own"},
            out=tmp_path / name,
        )
        scores = scores_of(result)
        assert set(scores) == {"a", "b"} and len(scores["a"]["findings"]) == 2
        assert json.loads(json.dumps(result.manifest))["multi_label"] is True


def test_tables_show_auc_and_average_precision_and_each_finding():
    clients, text = draw_clients()
    table = run("ridge", clients, text).table(columns=["findings"])
    for title in ("AUC, own", "AP, own", "AUC edema", "AP mass"):
        assert title in table


@pytest.mark.parametrize("name", ["ridge", "auto", "fedot"])
def test_a_saved_classifier_predicts_findings(name, tmp_path):
    clients, text = draw_clients(samples=120)
    result = run(name, clients, text, out=tmp_path / "run")
    classifier = result.personalised("a")
    classifier.save_pretrained(tmp_path / "a")
    again = fedvlm.Personalised.from_pretrained(tmp_path / "a")
    x, y = clients["b"]
    p = again.predict_proba(x)
    assert p.shape == y.shape and np.allclose(p, classifier.predict_proba(x), atol=1e-6)
    assert (p >= 0).all() and (p <= 1).all() and not np.allclose(p.sum(1), 1)
    for sentence, row in zip(again.predict(x), p, strict=True):
        expected = [finding for finding, chance in zip(NAMES, row, strict=True) if chance >= 0.5]
        assert sentence == ("|".join(expected) or "no finding")
    assert again.score(x, y) > 0.6
    unseen = result.unseen()
    assert unseen.predict_proba(x).shape == y.shape


def test_sets_of_findings_hold_the_truth_as_often_as_promised(tmp_path):
    clients, text = draw_clients(samples=900, unknown=0)
    fresh, _ = draw_clients(samples=900, unknown=0, seed=0)
    classifier = run("ridge", clients, text).personalised("a")
    x, y = fresh["b"]
    sets = classifier.predict_set(x, 0.8)
    held = np.zeros(3)
    for row, truth in zip(sets, y, strict=True):
        for number, finding in enumerate(NAMES):
            held[number] += finding in row or f"{finding}?" in row if truth[number] else finding not in row
    assert (held / len(y) > 0.74).all() and (held / len(y) < 0.95).all()
