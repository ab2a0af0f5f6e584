"""Columns on demand obey the sums they stand in, in every form of a table."""

import csv
import io
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from sklearn.metrics import average_precision_score

import fedvlm
from fedvlm.errors import SettingsError
from fedvlm.evaluate import metrics
from fedvlm.evaluate.metrics import EDGES, area, auc, details, points
from fedvlm.report.columns import COLUMNS, cells, curve, on_demand
from fedvlm.report.page.read import read_page
from fedvlm.report.page.render import write_page
from fedvlm.report.tables import FORMS, compare, grid, rows
from fedvlm.report.units import written

DIM, CLASSES = 16, 4  # of the rows


@pytest.fixture(scope="module")
def run(rows_like, tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns")

    def one(method, **more):
        return fedvlm.run(
            method, out=folder / f"{method}-{len(more)}", embedded=rows_like(), seeds=[0, 1], **more
        )

    return one


@pytest.fixture(scope="module")
def fedot(run):
    return run("fedot", rounds=2, lr=0.1)


@pytest.fixture(scope="module")
def own(run):
    return run("fedavg", rounds=1, protocol="own-test")


def table(result, *names):
    return on_demand(result, names)[0]


def test_cells_add_up_to_g_p_and_c(fedot):
    for seed, whole in zip((0, 1), fedot.tables, strict=True):
        a = cells(fedot, seed)
        assert fmean(a[one][one] for one in a) == pytest.approx(whole["G"])
        assert fmean(a[j][i] for j in a for i in a if i != j) == pytest.approx(whole["P"])
        assert fmean(a[j][i] for j in a for i in a) == pytest.approx(whole["C"])


def test_means_per_target_add_up_to_p_and_c(fedot):
    for name, whole in (("P-per-target", "P"), ("C-per-target", "C")):
        assert fmean(table(fedot, name).values()) == pytest.approx(fedot.tables[0][whole])
    assert set(table(fedot, "C-per-target")) == {f"C, target {k}" for k in cells(fedot, 0)}
    assert len(table(fedot, "A[j][i]")) == 9


def test_an_orthogonal_map_has_kappa_one_and_the_freedoms_of_rotations(fedot):
    found = table(fedot, "kappa", "kappa-per-target", "dof")
    assert found.pop("dof") == DIM * (DIM - 1) / 2
    assert len(found) == 4 and all(one == pytest.approx(1, abs=1e-4) for one in found.values())


def test_a_free_map_has_a_larger_kappa(run):
    found = run("fedlt", rounds=2, lr=0.1)
    assert table(found, "kappa")["kappa"] > 1.01
    assert table(found, "dof")["dof"] == DIM**2


def test_trained_numbers_are_those_of_head_and_map_and_none_where_nothing_is_trained(fedot, run):
    assert table(fedot, "trained") == {"trained": CLASSES * DIM + DIM * DIM}
    assert table(run("zero-shot"), "trained") == {"trained": 0}


def test_cosine_and_seconds_are_means_over_the_rounds_of_a_seed(fedot):
    lines = [line for line in fedot.rounds if line["training"].startswith("1-")]
    found = on_demand(fedot, ["cosine", "seconds", "minutes"])[1]
    assert found["cosine"] == pytest.approx(fmean(line["cosine"] for line in lines))
    assert found["seconds per round"] == pytest.approx(fmean(line["seconds"] for line in lines))
    assert found["minutes per round"] == pytest.approx(found["seconds per round"] / 60)


def test_the_worst_client_and_the_spread_are_of_the_clients_that_trained(own):
    each = [own.tables[0][key] for key in ("art", "photo", "sketch")]
    found = table(own, "worst", "spread")
    assert found["worst client"] == min(each)
    assert found["spread over clients"] == pytest.approx(torch.tensor(each).std().item())


def test_rows_are_those_of_the_manifest(fedot):
    assert sum(table(fedot, "rows").values()) == 240


def test_what_a_run_does_not_have_is_a_dash(own, run):
    assert table(own, "A[j][i]", "P-per-target") == {}
    assert table(run("zero-shot"), "cosine") == {"cosine": None}
    text = compare([own], asked=["kappa"])
    assert text.splitlines()[2].split()[-2] == "-"


def test_curves_begin_and_end_where_they_must_and_rise(fedot):
    roc, pr = fedot.curve("ROC"), fedot.curve("PR", seed=1)
    assert roc[0] == [0, 0] and roc[-1] == [1, 1]
    assert pr[-1] == [1, pytest.approx(1 / CLASSES)]
    for one in (roc, pr):
        assert len(one) <= len(EDGES) + 2
        assert all(a[0] <= b[0] for a, b in pairwise(one))
    assert table(fedot, "ROC")["ROC area"] == pytest.approx(
        fmean(area(curve(fedot, "ROC", name, 0), "ROC") for name in fedot.trainings(0))
    )


def test_areas_of_binned_scores_are_near_those_of_the_scores():
    draw = torch.Generator().manual_seed(3)
    y = torch.randint(2, (4000,), generator=draw)
    score = torch.sigmoid(1.5 * (2 * y - 1) + torch.randn(4000, generator=draw))
    p = torch.stack([1 - score, score], 1)
    counts, own = details(p, y)["scores"], torch.nn.functional.one_hot(y).ravel()
    assert area(points(counts, "ROC"), "ROC") == pytest.approx(auc(p, y), abs=0.01)
    exact = average_precision_score(own.numpy(), p.ravel().numpy())
    assert area(points(counts, "PR"), "PR") == pytest.approx(exact, abs=0.01)


def test_a_perfect_classifier_has_areas_of_one_and_a_single_class_no_curve():
    p = torch.eye(3).repeat(5, 1) * 0.98 + 0.01 / 3
    counts = details(p, torch.arange(15) % 3)["scores"]
    for kind in ("ROC", "PR"):
        assert area(points(counts, kind), kind) == pytest.approx(1)
    assert points([[0, 5], [0, 0]], "ROC") == []


@pytest.mark.parametrize("form", FORMS)
def test_every_column_is_in_every_form(fedot, form):
    text = compare([fedot], form, asked=[*COLUMNS, "method.lr"])
    for name in ("kappa", "cosine", "dof", "trained", "A[art][photo]", "C, target art", "ROC area"):
        assert name in text
    assert "method.lr" in text


def test_columns_that_are_no_shares_are_not_in_per_cent(fedot):
    head, (cells,) = grid([fedot], asked=["kappa", "dof", "worst", "method.rounds"])
    row = dict(zip(head, cells, strict=True))
    assert row["kappa"].startswith("1.00") and row["dof"].startswith("120")
    assert float(row["worst client"].split()[0]) > 1
    assert row["method.rounds"] == "2" and "rounds=" not in row["method"]
    assert written("seconds per round", 0.5) == "0.500" and written("worst client", 0.5) == "50.00"


def test_in_long_form_a_column_has_a_line_per_seed_and_a_setting_is_a_field(fedot):
    asked = ["dof", "worst", "method.rounds"]
    found = list(csv.DictReader(io.StringIO(compare([fedot], "csv", asked=asked))))
    plain = list(csv.DictReader(io.StringIO(compare([fedot], "csv"))))
    assert {row["method.rounds"] for row in found} == {"2"}
    assert not any("rounds=" in row["method"] for row in found)
    more = [row for row in found if not row["client"]]
    assert len(found) - len(more) == len(plain)
    names = [(row["seed"], row["metric"]) for row in more]
    assert names == [(seed, name) for seed in "01" for name in ("dof", "worst client")]
    for row, one in zip(more[1::2], on_demand(fedot, ["worst"]), strict=True):
        assert float(row["value"]) == pytest.approx(one["worst client"], abs=1e-6)
    (numbers,) = rows([fedot], asked)
    assert numbers["method.rounds"] == 2 and numbers["dof"]["mean"] == DIM * (DIM - 1) / 2


def test_a_metric_of_an_outside_package_is_a_column_in_per_cent(monkeypatch, rows_like, tmp_path):
    def always(p, y):
        """A half."""
        return 0.5

    monkeypatch.setattr(metrics, "ALL", dict(metrics.ALL))
    metrics.register("cosine-like", always)  # begins as a column that is no share
    one = fedvlm.run("zero-shot", embedded=rows_like(), out=tmp_path / "run", protocol="own-test")
    head, (cells,) = grid([one], asked=["cosine-like"])
    assert dict(zip(head, cells, strict=True))["cosine-like, own"] == "50.00"


def test_no_metric_may_have_the_name_of_a_column():
    assert set(COLUMNS) - set(metrics.METRICS) <= metrics.TAKEN


def test_an_unknown_column_is_refused_with_the_nearest_one(fedot):
    with pytest.raises(SettingsError, match=r"no column is called 'kapa'; did you mean 'kappa'\?"):
        compare([fedot], asked=["kapa"])


def test_a_page_has_the_columns_it_can_have(fedot, tmp_path):
    (told,) = read_page(write_page([fedot], tmp_path / "page.html"))
    asked = ["A[j][i]", "C-per-target", "worst", "spread"]
    assert compare([told], asked=asked) == compare([fedot], asked=asked)
    assert compare([told], asked=["trained", "cosine", "kappa", "ROC"])


def test_a_data_frame_has_columns_and_settings(fedot):
    found = fedvlm.compare(fedot, columns=["kappa", "method.rounds"])
    assert found["method.rounds"].tolist() == [2]
    assert found["kappa"].tolist() == [pytest.approx(1, abs=1e-4)]
