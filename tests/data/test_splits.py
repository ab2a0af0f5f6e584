"""The laws of dealing rows to parts and to clients."""

from dataclasses import replace
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvlm.data import clients, splits
from fedvlm.data.clients import Clients, pathological
from fedvlm.data.partition import Partition, SampleList, make_partition
from fedvlm.errors import DataError, SettingsError
from fedvlm.seeds import numbers
from tests.helpers.plain_rows import make_rows

PACS = (2048, 2344, 1670, 3929)  # rows of its domains


def shuffled(table: SampleList, order: np.ndarray) -> SampleList:
    return SampleList(
        table.classes,
        table.labels[order],
        table.domains[order],
        table.clients[order],
        table.splits[order],
        [table.content[row] for row in order],
    )


def images(table: SampleList, partition: Partition) -> dict[tuple[str, str], list[str]]:
    return {
        (member.id, part): [table.content[row] for row in getattr(member, part)]
        for member in partition.clients.values()
        for part in splits.SPLITS
    }


ways = st.sampled_from(
    [
        Clients("domain"),
        Clients("own"),
        Clients("dirichlet", count=3, alpha=1.0, min_samples=2),
        Clients("pathological", count=2),
        Clients("domain-dirichlet", count=2, alpha=1.0, min_samples=2),
        Clients("domain", ratios=(0.8, 0.0, 0.2)),
    ]
)
tables = st.builds(
    make_rows,
    st.integers(160, 220),
    clients=st.just(3),
    splits=st.sampled_from(["", "train,train,test", "train,validation,train,test,train"]),
    twins=st.integers(0, 12),
)


@settings(max_examples=60, deadline=None)
@given(tables, ways, st.integers(0, 5))
def test_no_picture_is_in_two_parts_and_no_row_is_lost(table, clients, seed):
    partition = make_partition(table, clients, seed)
    contents = {part: set() for part in splits.SPLITS}
    rows = []
    for member in partition.clients.values():
        for part in splits.SPLITS:
            contents[part] |= {table.content[row] for row in getattr(member, part)}
            rows += getattr(member, part).tolist()
    assert contents["train"].isdisjoint(contents["validation"] | contents["test"])
    assert contents["validation"].isdisjoint(contents["test"])
    assert len(rows) == len(set(rows))
    assert len(rows) + partition.dropped == len(table.labels)
    assert set().union(*contents.values()) == set(table.content)


@settings(max_examples=40, deadline=None)
@given(tables, ways, st.integers(0, 5), st.randoms(use_true_random=False))
def test_division_does_not_depend_on_the_order_of_rows(table, clients, seed, random):
    order = np.array(random.sample(range(len(table.labels)), len(table.labels)))
    mixed = shuffled(table, order)
    assert images(mixed, make_partition(mixed, clients, seed)) == images(table, make_partition(table, clients, seed))


@settings(max_examples=20, deadline=None)
@given(ways)
def test_division_is_the_same_for_one_seed_and_another_for_another(clients):
    table = make_rows(200, clients=3)
    first, again, different = (images(table, make_partition(table, clients, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != different


@pytest.mark.parametrize("rows", [*PACS, 5, 100])
def test_test_and_validation_are_the_floor_of_a_fifth_as_in_fedot(rows):
    parts = splits.split_samples([""] * rows, (0.6, 0.2, 0.2), numbers("t"), "x")
    assert np.bincount(parts).tolist() == [rows - 2 * floor(rows / 5), rows // 5, rows // 5]


def test_shares_are_taken_exactly_where_binary_fractions_are_not():
    parts = splits.split_samples([""] * 100, (0.42, 0.29, 0.29), numbers("t"), "x")
    assert np.bincount(parts).tolist() == [42, 29, 29]


def test_rows_marked_by_the_data_keep_their_part_and_validation_comes_from_train():
    marks = ["train"] * 80 + ["test"] * 20
    parts = splits.split_samples(marks, (0.6, 0.2, 0.2), numbers("t"), "x")
    assert (parts[80:] == 2).all()
    assert np.bincount(parts[:80]).tolist() == [60, 20]
    full = [*["train"] * 5, *["validation"] * 3, *["test"] * 2]
    assigned = splits.split_samples(full, (0.6, 0.2, 0.2), numbers("t"), "x")
    assert np.bincount(assigned).tolist() == [5, 3, 2]
    none = splits.split_samples(marks, (0.8, 0.0, 0.2), numbers("t"), "x")
    assert np.bincount(none).tolist() == [80, 0, 20]


def test_a_split_is_all_or_nothing_and_of_three_names():
    with pytest.raises(DataError, match=r"domain 'a': 1 of 2 rows have no split"):
        splits.split_samples(["train", ""], (0.6, 0.2, 0.2), numbers("t"), "domain 'a'")
    with pytest.raises(DataError, match=r"'val' is not a split; .* train, validation, test"):
        splits.split_samples(["val"], (0.6, 0.2, 0.2), numbers("t"), "x")


@pytest.mark.parametrize(
    ("classes", "sizes"),
    [
        (47, [5] * 9 + [2]),
        (37, [4] * 9 + [1]),
        (102, [10] * 9 + [12]),
        (101, [10] * 9 + [11]),
        (100, [10] * 10),
    ],
)
def test_pathological_classes_are_dealt_as_fedotp_deals_them(classes, sizes):
    assert np.bincount(pathological(classes, 10, numbers("t"))).tolist() == sizes


def test_pathological_clients_share_no_class():
    table = make_rows(120, classes=6)
    partition = make_partition(table, Clients("pathological", count=3), 0)
    owned = [
        set(table.labels[np.concatenate([m.train, m.validation, m.test])].tolist()) for m in partition.clients.values()
    ]
    assert sorted(label for labels in owned for label in labels) == list(range(6))


@pytest.mark.parametrize("classes", [5, 15])
def test_too_many_pathological_clients_are_refused(classes):
    with pytest.raises(SettingsError, match=f"{classes} classes cannot be assigned to 10 clients"):
        make_partition(make_rows(300, classes=classes), Clients("pathological"), 0)


def test_dirichlet_proportions_are_the_same_in_train_and_test():
    table = make_rows(12000, classes=3, splits="train,test")
    partition = make_partition(table, Clients("dirichlet", count=4, ratios=(0.8, 0.0, 0.2)), 0)
    for member in partition.clients.values():
        train = np.bincount(table.labels[member.train], minlength=3)
        test = np.bincount(table.labels[member.test], minlength=3)
        assert np.abs(train - test).max() <= 1


def test_dirichlet_clients_have_the_minimum_and_uneven_classes():
    table = make_rows(4000, classes=10)
    for alpha, spread in ((0.1, 1.0), (1000.0, 0.0)):
        partition = make_partition(table, Clients("dirichlet", count=10, alpha=alpha, min_samples=30), 0)
        counts = [np.bincount(table.labels[m.train], minlength=10) for m in partition.clients.values()]
        assert min(count.sum() for count in counts) >= 30
        assert all(len(m.test) for m in partition.clients.values())
        measured = np.std(counts) / np.mean(counts)
        assert measured > spread if spread else measured < 0.25


def test_an_impossible_dirichlet_draw_ends_with_a_remedy(monkeypatch):
    monkeypatch.setattr(clients, "MAX_DIRICHLET_DRAWS", 20)
    with pytest.raises(SettingsError, match="larger clients.alpha"):
        make_partition(make_rows(200), Clients("dirichlet", count=10, alpha=0.001, min_samples=5), 0)
    with pytest.raises(SettingsError, match="too few for 10 clients with at least 10 each"):
        make_partition(make_rows(40), Clients("dirichlet", count=10), 0)


def test_clients_are_named_after_what_they_are_made_of():
    table = make_rows(200, clients=3)
    assert list(make_partition(table, Clients(), 0).clients) == ["domain0", "domain1"]
    assert list(make_partition(table, Clients("own"), 0).clients)[:2] == ["writer0", "writer1"]
    mixed = make_partition(table, Clients("domain-dirichlet", count=2, alpha=5.0, min_samples=2), 0).clients
    assert list(mixed) == ["domain0-0", "domain0-1", "domain1-0", "domain1-1"]
    assert [member.domain for member in mixed.values()] == ["domain0"] * 2 + ["domain1"] * 2
    clients = make_partition(table, Clients("dirichlet", count=2, alpha=5.0), 0).clients
    assert [member.id for member in clients.values()] == ["client-0", "client-1"]
    assert [member.domain for member in clients.values()] == ["", ""]


def test_another_domain_changes_no_split_of_the_first():
    table = make_rows(200, domains=1)
    grown = make_rows(400, domains=1)
    grown = replace(grown, domains=np.array(["domain0"] * 200 + ["more"] * 200))
    before, after = make_partition(table, Clients(), 0), make_partition(grown, Clients(), 0)
    assert images(table, before)["domain0", "test"] == images(grown, after)["domain0", "test"]


def test_shots_are_per_class_and_client_and_leave_the_test_rows_alone():
    table = make_rows(200)
    limited, full = make_partition(table, Clients(shots=3), 0), make_partition(table, Clients(), 0)
    for key, member in limited.clients.items():
        assert np.bincount(table.labels[member.train]).tolist() == [3] * 4
        assert set(member.train) < set(full.clients[key].train)
        assert (member.test == full.clients[key].test).all()
    plenty = make_partition(table, Clients(shots=1000, val_shots=0), 0)
    assert images(table, plenty) == images(table, full)


def test_a_class_without_training_rows_gives_no_shots():
    table = make_rows(200)
    table = replace(table, splits=np.where(table.labels == 2, "test", "train"))
    with pytest.raises(DataError, match="'class 2' has no training samples to draw shots from"):
        make_partition(table, Clients("dirichlet", count=1, shots=1), 0)


def test_pictures_of_two_parts_are_dropped_from_the_later_and_counted():
    table = make_rows(100, domains=1, splits="train,validation,test")
    content = list(table.content)
    train, validation, test = (np.flatnonzero(table.splits == part)[:2] for part in splits.SPLITS)
    content[test[0]] = content[train[0]]
    content[test[1]] = content[validation[0]]
    content[validation[1]] = content[train[1]]
    partition = make_partition(replace(table, content=content), Clients(), 0)
    member = partition.clients["domain0"]
    assert partition.dropped == 3
    assert set(train) <= set(member.train)
    assert validation[0] in member.validation
    assert validation[1] not in member.validation
    assert not set(test) & set(member.test)


def test_bad_tables_are_named():
    table = make_rows(100)
    cases = [
        (replace(table, labels=table.labels + 1), "label 4 has no class"),
        (replace(table, classes=(*table.classes, "unicorn")), "class 'unicorn' has no samples"),
        (replace(table, domains=np.full(100, "")), "100 of 100 samples have no domain"),
        (replace(table, content=table.content[:-1]), "must have the same length"),
        (shuffled(table, np.array([], dtype=int)), "no samples"),
        (replace(table, domains=np.array(["a"] * 97 + ["b"] * 3)), "client 'b' has no validation"),
    ]
    for bad, message in cases:
        with pytest.raises(DataError, match=message):
            make_partition(bad, Clients(), 0)
    with pytest.raises(DataError, match="100 of 100 samples have no client"):
        make_partition(table, Clients("own"), 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"partition": "domains"}, "did you mean 'domain'"),
        ({"count": 0}, "clients.count must be .*, got 0"),
        ({"count": "10"}, "clients.count must be .*, got '10'"),
        ({"alpha": 0.0}, "clients.alpha must be .*, got 0.0"),
        ({"alpha": float("nan")}, "clients.alpha must be .*, got nan"),
        ({"shots": -1}, "clients.shots must be .*, got -1"),
        ({"val_shots": -1}, "clients.val_shots must be .*, got -1"),
        ({"val_shots": 1.5}, "clients.val_shots must be .*, got 1.5"),
        ({"min_samples": 2.5}, "clients.min_samples must be .*, got 2.5"),
        ({"ratios": (0.5, 0.2, 0.2)}, "must sum to 1, got .* sum to 0.9"),
        ({"ratios": (0.0, 0.5, 0.5)}, "above 0 for train"),
        ({"ratios": (1.2, 0.0, -0.2)}, "must not be negative"),
        ({"ratios": [0.8, 0.2]}, "must be 3 values, got"),
        ({"ratios": 0.6}, "must be 3 values, got"),
    ],
)
def test_settings_that_do_not_fit_are_refused(wrong, message):
    with pytest.raises(SettingsError, match=message):
        Clients(**wrong)


def test_shares_may_be_a_list_as_toml_gives_it():
    assert Clients(ratios=[0.6, 0.2, 0.2]) == Clients()


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ((1.2, -0.1, -0.1), r"clients.ratios must not be negative, got \[1.2, -0.1, -0.1\]"),
        ((0.0, 0.5, 0.5), "clients.ratios must be above 0 for train"),
        ((0.6, 0.2, 0.1), r"clients.ratios must sum to 1, got \[0.6, 0.2, 0.1\], which sum to 0.9"),
    ],
)
def test_ratios_that_cannot_be_are_refused_with_the_reason(ratios, message):
    with pytest.raises(SettingsError, match=message):
        Clients(ratios=ratios)
