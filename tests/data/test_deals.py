"""Rows dealt at random, in shards and by superclass; a test half as the target."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from fedvlm.data.catalogue import class_names
from fedvlm.data.clients import SHARDS_PER_CLIENT, SUPERCLASSES, Clients, superclasses, two_level_proportions
from fedvlm.data.partition import count_table, make_partition
from fedvlm.data.splits import SPLITS
from fedvlm.errors import DataError, SettingsError
from tests.helpers.plain_rows import make_rows

PARTITIONS = ("iid", "shards", "coarse", "coarse-dirichlet")


def cifar(rows=3000, **columns):
    classes = tuple(name.replace("_", " ") for name in class_names("cifar100"))
    return replace(make_rows(rows, classes=100, domains=1, **columns), classes=classes)


@pytest.mark.parametrize("by", PARTITIONS)
def test_every_row_is_in_one_part_of_one_client(by):
    table = cifar()
    partition = make_partition(table, Clients(by, count=20, alpha=1.0, min_samples=1), 0)
    members = partition.clients.values()
    held = list(chain.from_iterable(getattr(m, p).tolist() for m in members for p in SPLITS))
    assert sorted(held) == list(range(len(table.labels)))
    assert [len(getattr(m, p)) > 0 for m in members for p in SPLITS] == [True] * 60
    assert list(partition.clients) == [f"client-{i}" for i in range(20)]


@pytest.mark.parametrize("by", PARTITIONS)
def test_another_order_of_rows_is_dealt_the_same_way(by):
    table = cifar()
    mixed = np.random.default_rng(1).permutation(len(table.labels))
    columns = ("labels", "domains", "clients", "splits")
    reordered = replace(
        table,
        content=[table.content[i] for i in mixed],
        **{key: getattr(table, key)[mixed] for key in columns},
    )
    clients = Clients(by, count=20, alpha=1.0, min_samples=1)
    first, two = make_partition(table, clients, 3), make_partition(reordered, clients, 3)
    for id, member in first.clients.items():
        assert set(mixed[two.clients[id].train]) == set(member.train)
    assert any(
        set(member.train) != set(make_partition(table, clients, 4).clients[id].train)
        for id, member in first.clients.items()
    )


@pytest.mark.parametrize("count", [3, 7, 10])
def test_iid_clients_differ_by_one_row_of_a_part_at_most(count):
    partition = make_partition(make_rows(997, classes=4), Clients("iid", count=count), 0)
    for part in SPLITS:
        sizes = [len(getattr(m, part)) for m in partition.clients.values()]
        assert max(sizes) - min(sizes) <= 1
    counts = count_table(partition, make_rows(997, classes=4))
    assert (counts > 0.4 * counts.sum(0) / count).all()


def test_a_client_of_shards_has_few_classes_and_is_tested_on_them():
    table = make_rows(4000, classes=20)
    partition = make_partition(table, Clients("shards", count=10), 0)
    for member in partition.clients.values():
        trained = set(table.labels[member.train].tolist())
        assert len(trained) <= 2 * SHARDS_PER_CLIENT  # a shard is a class long here, and may lie across two
        neighbours = {label + step for label in trained for step in (-1, 0, 1)}
        assert set(table.labels[member.test].tolist()) <= neighbours
    for part in SPLITS:
        sizes = [len(getattr(m, part)) for m in partition.clients.values()]
        assert max(sizes) - min(sizes) <= SHARDS_PER_CLIENT


def test_there_are_twenty_superclasses_of_five_classes_each():
    names = [name.replace("_", " ") for name in class_names("cifar100")]
    groups = superclasses(names)
    assert len(names) == 100
    assert {name: groups.count(name) for name in groups} == dict.fromkeys(SUPERCLASSES, 5)
    with pytest.raises(SettingsError, match="'class 0' has no superclass"):
        make_partition(make_rows(400), Clients("coarse"), 0)


@pytest.mark.parametrize(("count", "per_client"), [(100, 1), (40, 1), (20, 1), (10, 2), (4, 5)])
def test_a_client_has_whole_superclasses_and_all_their_classes_evenly(count, per_client):
    table = cifar(10_000)
    partition = make_partition(table, Clients("coarse", count=count), 0)
    groups = np.array(superclasses(table.classes))
    for member in partition.clients.values():
        client_labels = table.labels[member.train]
        assert len(set(groups[client_labels])) == per_client
        assert set(client_labels) == set(np.flatnonzero(np.isin(groups, groups[client_labels])))
    counts = count_table(partition, table, ["train"])
    shared = np.where(counts, counts, counts.max(0))  # of a class, by the clients that have it
    assert (shared.max(0) - shared.min(0)).max() <= 1


def test_the_two_levels_are_dirichlet_draws_over_superclasses_and_their_classes():
    groups = superclasses([name.replace("_", " ") for name in class_names("cifar100")])
    proportions = two_level_proportions(groups, 10, 0.3, np.random.default_rng(0))
    assert proportions.shape == (100, 10)
    np.testing.assert_allclose(proportions.sum(1), 1)
    by_group = [proportions[np.array(groups) == name] for name in SUPERCLASSES]
    within = np.mean([group_proportions.std(0).mean() for group_proportions in by_group])
    between = np.std([group_proportions.mean(0) for group_proportions in by_group], axis=0).mean()
    assert within < 0.5 * between  # classes of one superclass go to the same clients
    even = two_level_proportions(groups, 10, 1e6, np.random.default_rng(0))
    assert even.std() < proportions.std() / 2


@pytest.mark.parametrize("by", ["iid", "dirichlet"])
def test_rows_marked_test_are_the_target_and_no_other_clients(by):
    table = make_rows(400, classes=4, domains=1, splits="train,train,test")
    partition = make_partition(table, Clients(by, count=3, min_samples=1), 0, ["split:test"])
    assert list(partition.clients) == [*(f"client-{i}" for i in range(3)), "split:test"]
    target = partition.clients["split:test"]
    assert set(target.test) == set(np.flatnonzero(table.splits == "test"))
    assert len(target.train) == len(target.validation) == 0
    for id in list(partition.clients)[:3]:
        member = partition.clients[id]
        assert len(member.test) and len(member.validation)
        for part in SPLITS:
            assert set(table.splits[getattr(member, part)]) == {"train"}


def test_a_target_that_is_not_there_is_refused():
    with pytest.raises(DataError, match="the data mark no samples for the target"):
        make_partition(make_rows(400), Clients("iid"), 0, ["split:test"])
    with pytest.raises(DataError, match="the data mark no samples for the target"):
        make_partition(make_rows(400, splits="train,test"), Clients("iid"), 0, ["split:train"])
    with pytest.raises(SettingsError, match="no domain or client is called 'client-9'"):
        make_partition(make_rows(400), Clients("iid", count=4), 0, ["client-9"])


def test_a_client_may_be_the_target():
    partition = make_partition(make_rows(400), Clients("iid", count=4), 0, ["client-3"])
    plain = make_partition(make_rows(400), Clients("iid", count=4), 0)
    for id, member in plain.clients.items():
        assert member.train.tolist() == partition.clients[id].train.tolist()
