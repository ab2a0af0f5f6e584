"""Metrics by subgroup: carried from the data to the record, suppressed where small, and never from a deployed site."""

import json

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

import fedvlm
from fedvlm.cli import app
from fedvlm.encoders.store import open_store
from fedvlm.engines.client import client_world, measure
from fedvlm.errors import DataError, SettingsError
from fedvlm.report.page.render import write_page
from fedvlm.report.subgroups import compute_value, suppress_small
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import build

SETTINGS = {"clients": {"partition": "own"}, "protocol": "own-test", "subgroups": ["sex", "scanner"]}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    draw, n = np.random.default_rng(0), 400
    y = draw.integers(2, size=n)
    x = draw.normal(size=(n, 8)) + 1.2 * np.outer(y, np.ones(8))
    patients = np.array([f"p{i // 2}" for i in range(n)])
    sex = np.array(["f", "m"])[np.arange(n) // 2 % 2]
    scanner = np.where(np.arange(n) < 8, "rare", np.where(np.arange(n) % 4 < 2, "new", "old"))
    file = tmp_path_factory.mktemp("store") / "chest.npz"
    clients = np.array(["a", "b"])[np.arange(n) // 2 // 2 % 2]
    np.savez(file, x=x, y=y, classes=["no", "yes"], clients=clients, groups=patients, sex=sex, scanner=scanner)
    return file


@pytest.fixture(scope="module")
def result(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return fedvlm.run("alone", embedded=open_store(store), out=out, **SETTINGS)


def test_each_subgroup_has_its_own_value_with_an_interval_over_patients(result):
    rows = {row["subgroup"]: row for row in result.subgroups("sex", "accuracy")}
    assert set(rows) == {"f", "m"} and sum(row["worst"] for row in rows.values()) == 1
    scores = (
        result.trainings()["all"]["scores"]
        if "all" in result.trainings()
        else next(iter(result.trainings().values()))["scores"]
    )
    total = sum(row["samples"] * row["value"] for row in rows.values())
    assert total == pytest.approx(sum(client["test_hits"] for client in scores.values()))
    for row in rows.values():
        assert row["low"] <= row["value"] <= row["high"] and row["units"] < row["samples"]
    (difference,) = [row["difference"] for row in rows.values() if "difference" in row]
    assert difference["low"] <= difference["value"] <= difference["high"]


def test_a_small_subgroup_is_suppressed_with_another_one(result):
    rows = {row["subgroup"]: row for row in result.subgroups("scanner")}
    if "rare" in rows:  # with any test samples
        assert rows["rare"] == {"subgroup": "rare", "suppressed": True}
        assert sum(row["suppressed"] for row in rows.values()) == 2


@pytest.mark.parametrize(
    ("units", "suppressed"),
    [
        ({"a": 50, "b": 40}, set()),
        ({"a": 50, "b": 4}, {"a", "b"}),
        ({"a": 50, "b": 4, "c": 30}, {"b", "c"}),
        ({"a": 50, "b": 4, "c": 3, "d": 20}, {"b", "c", "d"}),  # 7 in both together
        ({"a": 50, "b": 6, "c": 5, "d": 20}, {"b", "c"}),
    ],
)
def test_a_suppressed_cell_cannot_be_computed_from_the_total(units, suppressed):
    assert suppress_small(units, 10) == suppressed


def test_values_are_those_of_scikit_learn():
    draw = np.random.default_rng(1)
    p, y = draw.random((60, 3)), draw.integers(-1, 2, size=(60, 3))
    expected = np.mean([roc_auc_score(y[y[:, k] >= 0, k], p[y[:, k] >= 0, k]) for k in range(3)])
    assert compute_value(p, y, "AUC") == pytest.approx(expected)
    p /= p.sum(1, keepdims=True)
    labels = draw.integers(3, size=60)
    assert compute_value(p, labels, "AUC") == pytest.approx(roc_auc_score(labels, p, multi_class="ovr"))


def test_nothing_of_subgroups_is_in_the_scores_of_a_site(store):
    prepared = prepare(build({"method": "alone", **SETTINGS}), open_store(store), 0)
    world = prepared.world(prepared.trainings[0])
    shared, local = world.method.init(world.frozen)
    assert "samples" in measure(world, shared, local, "a", last=True)
    scores = measure(client_world(world, "a"), shared, local, "a", last=True)
    assert "samples" not in scores and "sex" not in json.dumps(scores)


def test_the_page_has_a_table_and_a_chart_for_each_column(result, tmp_path):
    page = write_page([result], tmp_path / "page.html").read_text()
    section = page[page.index('<section id="subgroups">') : page.index('<section id="rounds">')]
    assert (
        section.count("<figcaption>AUC by") == 2
        and section.count("<tr>") == len(result.subgroups("sex")) + len(result.subgroups("scanner")) + 1
    )
    rows = result.subgroups("sex")
    for row in rows:
        assert f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]" in section
    assert section.count("(worst)") == 1  # of sex; all but one scanner are suppressed
    [gap] = [row["difference"] for row in rows if "difference" in row]
    assert f"{100 * gap['value']:+.1f} [{100 * gap['low']:+.1f}, {100 * gap['high']:+.1f}] to" in section
    assert section.count("<td>suppressed</td>") == 2 and "rare (suppressed)" in section


def test_the_page_has_what_stands_beside_the_accuracy_and_each_finding(tmp_path):
    draw, clients, ordered = np.random.default_rng(0), {}, {}
    for id in "ab":
        x = draw.normal(size=(120, 6))
        clients[id] = (x, (x[:, :2] + draw.normal(size=(120, 2)) > 0).astype(float))
        y = draw.choice(3, size=120, p=[0.7, 0.2, 0.1])
        ordered[id] = (x + y[:, None], y)
    common = {"seeds": [0], "allow_small": True}
    of_findings = fedvlm.run("ridge", clients=clients, classes=["edema", "mass"], out=tmp_path / "a", **common)
    page = write_page([of_findings], tmp_path / "a.html").read_text()
    for key in ("AUC, own", "AP, own", "AUC edema", "AP mass"):
        assert key in page[: page.index("application/json")]
    grades = fedvlm.run("ridge", clients=ordered, classes=list("012"), ordered=True, out=tmp_path / "b", **common)
    page = write_page([grades], tmp_path / "b.html").read_text()
    for key in ("balanced, own", "F1, own", "kappa, own"):
        assert f'data-words="{key}"' in page


def test_a_page_of_runs_without_subgroups_has_no_such_section(store, tmp_path):
    plain = fedvlm.run("alone", embedded=open_store(store), out=tmp_path / "plain", **(SETTINGS | {"subgroups": []}))
    assert "Subgroups" not in write_page([plain], tmp_path / "page.html").read_text()


def test_subgroups_are_compared_and_drawn_on_the_command_line(result, tmp_path):
    command = ["compare", str(result.folder), "--subgroups", "sex", "--columns", "AUC,balanced", "--format", "markdown"]
    table = CliRunner().invoke(app, command).output
    assert table.count("| alone") == 4 and "95 % interval" in table and " to " in table
    drawn = tmp_path / "sub.svg"
    plotted = CliRunner().invoke(app, ["plot", str(result.folder), "--kind", "subgroups", "-o", str(drawn)])
    assert plotted.exit_code == 0 and drawn.stat().st_size > 1000
    refused = CliRunner().invoke(app, ["compare", str(result.folder), "--subgroups", "age"])
    assert refused.exit_code != 0


def test_unknown_columns_are_refused(store, result, tmp_path):
    with pytest.raises(SettingsError, match="no column for subgroups is called 'seks'; did you mean 'sex'"):
        fedvlm.run("alone", embedded=open_store(store), out=tmp_path / "run", **(SETTINGS | {"subgroups": "seks"}))
    with pytest.raises(SettingsError, match="no column of subgroups is called 'age'"):
        result.subgroups("age")
    plain = fedvlm.run("alone", embedded=open_store(store), out=tmp_path / "plain", **(SETTINGS | {"subgroups": []}))
    with pytest.raises(DataError, match="has no subgroups; run it with"):
        plain.subgroups("sex")


def test_further_columns_of_a_manifest_are_subgroups(tmp_path):
    from PIL import Image

    lines = ["path,label,sex,group"]
    for i in range(4):
        Image.new("RGB", (8, 8), (60 * i, 0, 0)).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{'ab'[i % 2]},{'fm'[i % 2]},p{i}")
    (tmp_path / "films.csv").write_text("\n".join(lines) + "\n")
    from fedvlm.data.manifests import read_manifest

    table = read_manifest(tmp_path / "films.csv")
    assert {key: column.tolist() for key, column in table.subgroups.items()} == {"sex": ["f", "m", "f", "m"]}


def test_further_columns_of_a_table_are_subgroups_and_a_name_is_not(tmp_path):
    (tmp_path / "t.csv").write_text("name,label,sex,e0,e1\nx,a,f,1,0\ny,b,m,0,1\n")
    table = open_store(tmp_path / "t.csv")
    assert table.name == "t" and {key: column.tolist() for key, column in table.subgroups.items()} == {
        "sex": ["f", "m"]
    }
