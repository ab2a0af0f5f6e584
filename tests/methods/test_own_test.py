"""The protocol of the prompt papers: own test rows, few shots, few clients in or many out."""

from dataclasses import replace

import numpy as np
import pytest

import fedvlm
from fedvlm.testing import toy_text_tower

QUICK = {"name": "promptfl", "n_ctx": 2, "local_epochs": 1, "rounds": 1, "lr": 0.05}


def prepared(rows):
    tower = toy_text_tower(len(rows.classes), rows.x.shape[1])
    return replace(rows, text_tower=tower)


def many_classes(rows, count=20):
    """The same rows dealt to more classes, so that ten clients have some each."""
    labels = np.arange(len(rows.labels)) % count
    names = tuple(f"class {i}" for i in range(count))
    return prepared(replace(rows, classes=names, labels=labels, text=None))


@pytest.mark.parametrize("shots", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("by", ["pathological", "dirichlet"])
def test_ten_clients_of_few_shots_are_tested_on_their_own_rows(by, shots, rows_like, tmp_path):
    rows = many_classes(rows_like(1200))
    clients = {"partition": by, "count": 10, "shots": shots, "min_samples": 2}
    done = fedvlm.run(QUICK, embedded=rows, out=tmp_path / "run", protocol="own-test", clients=clients)
    table = done.tables[0]
    client_rows = [table[f"client-{i}"] for i in range(10)]
    assert table["own"] == pytest.approx(sum(client_rows) / 10)
    line = done.rounds[0]["clients"]
    assert len(line) == 10 and all(row["bytes_up"] == 4 * 2 * 8 for row in line.values())
    counts = done.manifest["clients"].values()
    assert max(row["train"] for row in counts) <= 20 * shots
    if by == "pathological":
        assert all(row["train"] == 2 * shots for row in counts)


def test_ten_of_a_hundred_clients_take_part_and_all_are_tested(rows_like, tmp_path):
    rows = prepared(rows_like(2400))
    done = fedvlm.run(
        {**QUICK, "rounds": 2},
        embedded=rows,
        out=tmp_path / "run",
        protocol="own-test",
        clients={"partition": "dirichlet", "count": 100, "alpha": 5.0, "min_samples": 2},
        fraction=0.1,
    )
    assert [len(line["clients"]) for line in done.rounds] == [10, 10]
    assert sum(key.startswith("client-") for key in done.tables[0]) == 100


def test_domains_dealt_by_dirichlet_have_a_mean_and_a_deviation(rows_like, tmp_path):
    done = fedvlm.run(
        QUICK,
        embedded=prepared(rows_like(600)),
        out=tmp_path / "run",
        protocol="own-test",
        clients={"partition": "domain-dirichlet", "count": 3, "alpha": 0.5, "min_samples": 4},
    )
    table = done.tables[0]
    for domain in ("art", "photo", "sketch"):
        client_rows = [table[f"{domain}-{i}"] for i in range(3)]
        assert table[f"mean {domain}"] == pytest.approx(sum(client_rows) / 3)
        assert table[f"deviation {domain}"] == pytest.approx(np.std(client_rows, ddof=1))


def test_a_second_column_has_the_accuracy_among_a_clients_own_classes(rows_like, tmp_path):
    rows = many_classes(rows_like(1200))
    clients = {"partition": "pathological", "count": 10}
    options = {"embedded": rows, "protocol": "own-test", "clients": clients}
    done = {name: fedvlm.run(name, out=tmp_path / name, **options).tables[0] for name in ("alone", "auto", "pooled")}
    column = "own classes only"
    assert done["alone"][column] == done["alone"]["own"]  # it never names another class
    assert all(table[column] >= table["own"] for table in done.values())
    assert done["pooled"][column] > done["pooled"]["own"] + 0.05
    everything = fedvlm.run("alone", out=tmp_path / "iid", **{**options, "clients": {"partition": "iid", "count": 4}})
    assert column not in everything.tables[0]  # every client has all classes: it would repeat the first
