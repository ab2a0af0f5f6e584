"""Columns on demand obey the sums they stand in, in every form of a table."""

import csv
import io
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, cohen_kappa_score

import fedvlm
from fedvlm.errors import SettingsError
from fedvlm.evaluate import metrics
from fedvlm.evaluate.metrics import SCORE_EDGES, area_under_curve, auc, curve_points, prediction_details
from fedvlm.record import Record
from fedvlm.report.columns import (
    COLUMNS,
    accuracy_matrix,
    cohens_kappa,
    compute_columns,
    format_number,
    ranking_curve,
    usual_columns,
)
from fedvlm.report.page.render import write_page
from fedvlm.report.runs import read_page
from fedvlm.report.tables import TABLE_FORMS, compare_table, table_cells, table_rows

DIM, CLASSES = 16, 4  # of the rows


@pytest.fixture(scope="module")
def run(rows_like, tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns")

    def run_method(method, **settings):
        return fedvlm.run(
            method, out=folder / f"{method}-{len(settings)}", embedded=rows_like(), seeds=[0, 1], **settings
        )

    return run_method


@pytest.fixture(scope="module")
def fedot(run):
    return run("fedot", rounds=2, lr=0.1)


@pytest.fixture(scope="module")
def own_test(run):
    return run("fedavg", rounds=1, protocol="own-test")


def table(result, *names):
    return compute_columns(result, names)[0]


def test_cells_add_up_to_g_p_and_c(fedot):
    for seed, table_of_seed in zip((0, 1), fedot.tables, strict=True):
        a = accuracy_matrix(fedot, seed)
        assert fmean(a[target][target] for target in a) == pytest.approx(table_of_seed["G"])
        assert fmean(a[j][i] for j in a for i in a if i != j) == pytest.approx(table_of_seed["P"])
        assert fmean(a[j][i] for j in a for i in a) == pytest.approx(table_of_seed["C"])


def test_means_per_target_add_up_to_p_and_c(fedot):
    for name, column in (("P-per-target", "P"), ("C-per-target", "C")):
        assert fmean(table(fedot, name).values()) == pytest.approx(fedot.tables[0][column])
    assert set(table(fedot, "C-per-target")) == {f"C, target {k}" for k in accuracy_matrix(fedot, 0)}
    assert len(table(fedot, "A[j][i]")) == 9


def test_an_orthogonal_map_has_condition_number_one_and_the_freedoms_of_rotations(fedot):
    columns = table(fedot, "condition_number", "condition_number-per-target", "dof")
    assert columns.pop("dof") == DIM * (DIM - 1) / 2
    assert len(columns) == 4 and all(condition == pytest.approx(1, abs=1e-4) for condition in columns.values())


def test_a_free_map_has_a_larger_condition_number(run):
    fedlt = run("fedlt", rounds=2, lr=0.1)
    assert table(fedlt, "condition_number")["condition_number"] > 1.01
    assert table(fedlt, "dof")["dof"] == DIM**2


def test_trained_numbers_are_those_of_head_and_map_and_none_where_nothing_is_trained(fedot, run):
    assert table(fedot, "trained") == {"trained": CLASSES * DIM + DIM * DIM}
    assert table(run("zero-shot"), "trained") == {"trained": 0}


def test_cosine_and_seconds_are_means_over_the_rounds_of_a_seed(fedot):
    lines = [line for line in fedot.rounds if line["training"].startswith("1-")]
    columns = compute_columns(fedot, ["cosine", "seconds", "minutes"])[1]
    assert columns["cosine"] == pytest.approx(fmean(line["cosine"] for line in lines))
    assert columns["seconds per round"] == pytest.approx(fmean(line["seconds"] for line in lines))
    assert columns["minutes per round"] == pytest.approx(columns["seconds per round"] / 60)


def test_the_worst_client_and_the_spread_are_of_the_clients_that_trained(own_test):
    accuracies = [own_test.tables[0][key] for key in ("art", "photo", "sketch")]
    columns = table(own_test, "worst", "spread")
    assert columns["worst client"] == min(accuracies)
    assert columns["spread over clients"] == pytest.approx(torch.tensor(accuracies).std().item())


def test_rows_are_those_of_the_manifest(fedot):
    assert sum(table(fedot, "rows").values()) == 240


def test_what_a_run_does_not_have_is_a_dash(own_test, run):
    assert table(own_test, "A[j][i]", "P-per-target") == {}
    assert table(run("zero-shot"), "cosine") == {"cosine": None}
    text = compare_table([own_test], extra_columns=["condition_number"])
    assert text.splitlines()[2].split()[-2] == "-"


def test_curves_begin_and_end_where_they_must_and_rise(fedot):
    roc, pr = fedot.curve("ROC"), fedot.curve("PR", seed=1)
    assert roc[0] == [0, 0] and roc[-1] == [1, 1]
    assert pr[-1] == [1, pytest.approx(1 / CLASSES)]
    for curve in (roc, pr):
        assert len(curve) <= len(SCORE_EDGES) + 2
        assert all(a[0] <= b[0] for a, b in pairwise(curve))
    assert table(fedot, "ROC")["ROC area"] == pytest.approx(
        fmean(area_under_curve(ranking_curve(fedot, "ROC", name, 0), "ROC") for name in fedot.trainings(0))
    )


def test_areas_of_binned_scores_are_near_those_of_the_scores():
    draw = torch.Generator().manual_seed(3)
    y = torch.randint(2, (4000,), generator=draw)
    score = torch.sigmoid(1.5 * (2 * y - 1) + torch.randn(4000, generator=draw))
    p = torch.stack([1 - score, score], 1)
    counts, one_hot = prediction_details(p, y)["scores"], torch.nn.functional.one_hot(y).ravel()
    assert area_under_curve(curve_points(counts, "ROC"), "ROC") == pytest.approx(auc(p, y), abs=0.01)
    exact = average_precision_score(one_hot.numpy(), p.ravel().numpy())
    assert area_under_curve(curve_points(counts, "PR"), "PR") == pytest.approx(exact, abs=0.01)


def test_a_perfect_classifier_has_areas_of_one_and_a_single_class_no_curve():
    p = torch.eye(3).repeat(5, 1) * 0.98 + 0.01 / 3
    counts = prediction_details(p, torch.arange(15) % 3)["scores"]
    for kind in ("ROC", "PR"):
        assert area_under_curve(curve_points(counts, kind), kind) == pytest.approx(1)
    assert curve_points([[0, 5], [0, 0]], "ROC") == []


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_every_column_is_in_every_form(fedot, form):
    text = compare_table([fedot], form, extra_columns=[*COLUMNS, "method.lr"])
    for name in ("condition_number", "cosine", "dof", "trained", "A[art][photo]", "C, target art", "ROC area"):
        assert (name.replace("_", r"\_") if form == "latex" else name) in text
    assert "method.lr" in text


def test_columns_that_are_no_shares_are_not_in_per_cent(fedot):
    head, (cells,) = table_cells([fedot], extra_columns=["condition_number", "dof", "worst", "method.rounds"])
    row = dict(zip(head, cells, strict=True))
    assert row["condition_number"].startswith("1.00") and row["dof"].startswith("120")
    assert float(row["worst client"].split()[0]) > 1
    assert row["method.rounds"] == "2" and "rounds=" not in row["method"]
    assert format_number("seconds per round", 0.5) == "0.500" and format_number("worst client", 0.5) == "50.00"


def test_in_long_form_a_column_has_a_line_per_seed_and_a_setting_is_a_field(fedot):
    columns = ["dof", "worst", "method.rounds"]
    rows = list(csv.DictReader(io.StringIO(compare_table([fedot], "csv", extra_columns=columns))))
    plain = list(csv.DictReader(io.StringIO(compare_table([fedot], "csv"))))
    assert {row["method.rounds"] for row in rows} == {"2"}
    assert not any("rounds=" in row["method"] for row in rows)
    extra = [row for row in rows if not row["client"]]
    assert len(rows) - len(extra) == len(plain)
    names = [(row["seed"], row["metric"]) for row in extra]
    assert names == [(seed, name) for seed in "01" for name in ("dof", "worst client")]
    for row, computed in zip(extra[1::2], compute_columns(fedot, ["worst"]), strict=True):
        assert float(row["value"]) == pytest.approx(computed["worst client"], abs=1e-6)
    (numbers,) = table_rows([fedot], columns)
    assert numbers["method.rounds"] == 2 and numbers["dof"]["mean"] == DIM * (DIM - 1) / 2


def test_a_metric_of_an_outside_package_is_a_column_in_per_cent(monkeypatch, rows_like, tmp_path):
    def always(p, y):
        """A half."""
        return 0.5

    monkeypatch.setattr(metrics, "ALL", dict(metrics.ALL))
    metrics.register("cosine-like", always)  # begins as a column that is no share
    result = fedvlm.run("zero-shot", embedded=rows_like(), out=tmp_path / "run", protocol="own-test")
    head, (cells,) = table_cells([result], extra_columns=["cosine-like"])
    assert dict(zip(head, cells, strict=True))["cosine-like, own"] == "50.00"


def test_no_metric_may_have_the_name_of_a_column():
    assert set(COLUMNS) - set(metrics.METRICS) <= metrics.RESERVED_NAMES


def test_an_unknown_column_is_refused_with_the_nearest_one(fedot):
    with pytest.raises(SettingsError, match=r"no column is called 'kapa'; did you mean 'kappa'\?"):
        compare_table([fedot], extra_columns=["kapa"])


def test_a_page_has_the_columns_it_can_have(fedot, tmp_path):
    (record,) = read_page(write_page([fedot], tmp_path / "page.html"))
    columns = ["A[j][i]", "C-per-target", "worst", "spread"]
    assert compare_table([record], extra_columns=columns) == compare_table([fedot], extra_columns=columns)
    assert compare_table([record], extra_columns=["trained", "cosine", "kappa", "ROC"])


def test_a_data_frame_has_columns_and_settings(fedot):
    frame = fedvlm.compare(fedot, columns=["condition_number", "method.rounds"])
    assert frame["method.rounds"].tolist() == [2]
    assert frame["condition_number"].tolist() == [pytest.approx(1, abs=1e-4)]


def test_kappa_is_cohens_and_that_of_scikit_learn(fedot):
    generator = np.random.default_rng(0)
    y, predicted = generator.integers(4, size=300), generator.integers(4, size=300)
    predicted[:150] = y[:150]
    pairs, counts = np.unique(np.stack([y, predicted]), axis=1, return_counts=True)
    confusion = [[int(a), int(b), int(n)] for a, b, n in zip(*pairs, counts, strict=True)]
    assert cohens_kappa(confusion) == pytest.approx(cohen_kappa_score(y, predicted))
    assert cohens_kappa(confusion, ordered=True) == pytest.approx(cohen_kappa_score(y, predicted, weights="quadratic"))
    assert cohens_kappa([[1, 1, 9]]) is None  # one class: agreement says nothing
    head, (cells,) = table_cells([fedot], extra_columns=["kappa"])
    row = dict(zip(head, cells, strict=True))
    mean, std = row["kappa, own"].split(" ± ")
    assert 0.0 < float(mean) < 1.0 and len(mean) == len(std) == 5 and "kappa, unseen" in row


@pytest.mark.parametrize(
    ("counts", "ordered", "columns"),
    [
        ({"a": [30, 20], "b": [0, 1]}, False, ()),
        ({"a": [30, 6], "b": [1, 4]}, False, ("balanced", "F1")),
        ({"a": [30, 0, 30]}, True, ("kappa",)),
        ({}, False, ()),
    ],
)
def test_uneven_classes_have_macro_averages_beside_the_accuracy(fedot, counts, ordered, columns):
    record = Record(fedot.folder)
    record.__dict__["manifest"] = fedot.manifest | {
        "counts": counts,
        "identity": fedot.manifest["identity"] | {"ordered": ordered},
    }
    assert usual_columns(record) == columns
    head, _ = table_cells([record])
    assert all(f"{name}, own" in head for name in columns) and ("F1, own" in head) == ("F1" in columns)
