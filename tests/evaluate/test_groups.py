"""Patients instead of images: metrics, intervals and minimum counts by group."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedvlm
from fedvlm.cli import app
from fedvlm.core import make
from fedvlm.data.arrays import from_arrays
from fedvlm.engines.client import limit_small_classes, make_client, measure, pool_groups
from fedvlm.errors import DataError, SettingsError
from fedvlm.evaluate.statistics import paired_bootstrap, sum_by_group
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build

SETTINGS = {"clients": {"partition": "own"}, "protocol": "own-test", "allow_small": True}


def grouped_table(groups_per_class=20, images=3, seed=0):
    """Two clients of two classes; every group has a number of images of one class."""
    generator = np.random.default_rng(seed)
    clients, groups = {}, []
    for id in "ab":
        labels = np.repeat(np.arange(2), groups_per_class * images)
        x = generator.normal(size=(len(labels), 8)) + 1.2 * labels[:, None]
        clients[id] = (x, labels)
        groups += [f"{id}{number}" for number in range(2 * groups_per_class) for _ in range(images)]
    fingerprint = f"{groups_per_class} {images} {seed}"
    return replace(from_arrays(clients, ["no", "yes"]), groups=np.array(groups), fingerprint=fingerprint)


def world_of(table, method="ridge", **settings):
    prepared = prepare(build({"method": {"name": method}, **SETTINGS, **settings}), table, 0)
    return prepared.world(prepared.trainings[0])


def test_pooled_logits_are_means_and_maxima_of_groups():
    logits = torch.tensor([[0.0, 1.0], [4.0, 3.0], [2.0, 2.0]])
    y, groups = torch.tensor([1, 1, 0]), torch.tensor([7, 7, 3])
    mean, labels = pool_groups(logits, y, groups, "mean")
    assert mean.tolist() == [[2.0, 2.0], [2.0, 2.0]] and labels.tolist() == [0, 1]
    highest, _ = pool_groups(logits, y, groups, "max")
    assert highest.tolist() == [[2.0, 2.0], [4.0, 3.0]]


def test_a_finding_of_a_group_is_that_of_any_image_and_unknown_only_if_all_are():
    y = torch.tensor([[0, -1], [1, -1], [-1, 0]])
    _, labels = pool_groups(torch.zeros(3, 2), y, torch.tensor([0, 0, 1]), "mean")
    assert labels.tolist() == [[1, -1], [-1, 0]]


def test_groups_of_one_image_give_the_scores_of_images():
    table = grouped_table(images=1)
    shared = None
    for rule in ("image", "mean", "max"):
        world = world_of(table, group_metrics=rule)
        sent, local = world.method.init(world.frozen)
        scores = measure(world, sent, local, "a", last=True)
        scores.pop("groups", None)
        shared = shared or scores
        assert {key: scores[key] for key in ("loss", "test_rows", "test_hits", "AUC")} == pytest.approx(
            {key: shared[key] for key in ("loss", "test_rows", "test_hits", "AUC")}
        )


def test_metrics_by_group_count_groups():
    table = grouped_table()
    images = fedvlm.run("ridge", embedded=table, **SETTINGS)
    patients = fedvlm.run("ridge", embedded=table, group_metrics="mean", **SETTINGS)
    by_image, by_patient = (next(iter(result.trainings().values()))["scores"] for result in (images, patients))
    for id in "ab":
        assert by_image[id]["test_rows"] == 3 * by_patient[id]["test_rows"]
        assert len(set(by_image[id]["groups"])) == by_patient[id]["test_rows"]


def test_a_group_of_two_classes_has_no_class():
    table = grouped_table()
    labels = table.labels.copy()
    labels[0] = 1
    with pytest.raises(DataError, match="images of several classes"):
        fedvlm.run("ridge", embedded=replace(table, labels=labels, fingerprint="b"), group_metrics="mean", **SETTINGS)


def test_group_metrics_need_groups():
    with pytest.raises(SettingsError, match="add a column group"):
        fedvlm.run(
            "ridge", embedded=replace(grouped_table(), groups=None, fingerprint="c"), group_metrics="max", **SETTINGS
        )


def test_interval_over_groups_is_wider_where_images_of_a_group_are_alike():
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 10)
    first, second = (np.repeat(generator.random(30) < rate, 10) for rate in (0.8, 0.6))

    def interval(groups):
        pair = [[{"a": sum_by_group(correct, groups)}] for correct in (first, second)]
        return paired_bootstrap(*pair)

    images, patients = interval(None), interval(groups.tolist())
    assert patients.mean == pytest.approx(images.mean)
    assert patients.high - patients.low > 2 * (images.high - images.low)


@pytest.mark.parametrize("name", ["ridge", "tofa", "auto"])
def test_a_patient_with_many_images_counts_once_in_what_leaves_a_client(name):
    """40 images of one patient are more than the minimum of samples, and one patient is not."""
    table = grouped_table(groups_per_class=30, images=2)
    method = make(name) if name != "tofa" else make(name, text=False, min_class_clients=1)
    settings = {key: value for key, value in SETTINGS.items() if key != "allow_small"}
    prepared = prepare(build({"method": method, **settings}), table, 0)
    world = prepared.world(prepared.trainings[0])
    groups = world.groups.clone()
    train = torch.from_numpy(world.members["a"].train)
    first_class = train[world.y[train] == 0]
    assert len(first_class) >= 16
    groups[first_class] = int(groups[first_class[0]])

    def counts(world):
        client = limit_small_classes(world, "a", make_client(world, "a", 0))
        return [int((client.y == label).sum()) for label in (0, 1)]

    assert counts(world)[0] > 0
    assert counts(replace(world, groups=groups)) == [0, counts(world)[1]]


def test_minimum_counts_in_groups_hold_on_both_engines():
    table = grouped_table(groups_per_class=12, images=4)
    settings = {key: value for key, value in SETTINGS.items() if key != "allow_small"}
    results = [fedvlm.run("ridge", embedded=table, engine=engine, **settings) for engine in ("batched", "single")]
    shared = [result.outcome(result.manifest["trainings"][0])[0] for result in results]
    for key in shared[0]:
        assert torch.allclose(shared[0][key], shared[1][key])
    # 12 patients a class are below 16: nothing was learnt from them
    assert not shared[0]["weight"].any()


def test_a_table_of_tiles_runs_from_training_to_a_prediction_for_each_slide(tmp_path):
    """Many rows per slide with one label for each slide, as pathology keeps embeddings of tiles."""
    draw = np.random.default_rng(0)
    lines = ["client,group,label," + ",".join(f"e{number}" for number in range(8))]
    for slide in range(80):
        label = ("benign", "tumour")[slide // 2 % 2]
        for tile in range(int(draw.integers(5, 20))):
            shift = 1.5 * (label == "tumour") * (tile % 3 == 0)  # a third of the tiles show it
            x = ",".join(f"{value:.4f}" for value in draw.normal(size=8) + shift)
            lines.append(f"{('north', 'south')[slide % 2]},slide {slide},{label},{x}")
    table = tmp_path / "tiles.csv"
    table.write_text("\n".join(lines) + "\n")
    settings = {"protocol": "own-test", "clients": {"partition": "own"}, "group_metrics": "mean"}
    result = fedvlm.run("auto", encoder=f"store:{table}", out=tmp_path / "run", **settings)
    scores = next(iter(result.trainings().values()))["scores"]
    for id, counts in result.manifest["clients"].items():
        assert scores[id]["test_rows"] < counts["test"] / 4  # slides, not tiles
    result.personalised("north").save_pretrained(tmp_path / "north")
    command = ["predict", str(tmp_path / "north"), str(table), "--group", "mean", "--json"]
    predictions = json.loads(CliRunner().invoke(app, command).stdout)["predictions"]
    assert len(predictions) == 80
    scored = ["score", str(tmp_path / "north"), f"store:{table}", "--group", "mean", "--json"]
    report = json.loads(CliRunner().invoke(app, scored).stdout)
    assert report["rows"] == 80 and report["metrics"]["AUC"] > 0.9
