"""Rows dealt at random, in shards and by superclass; a test half as the target."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from plain_rows import make_rows

from fedvlm.data.catalogue import class_names
from fedvlm.data.clients import Clients
from fedvlm.data.deals import SHARDS, two_levels
from fedvlm.data.federation import divide
from fedvlm.data.partition import count_table
from fedvlm.data.splits import PARTS
from fedvlm.data.superclasses import SUPERCLASSES, superclasses
from fedvlm.errors import DataError, SettingsError

DEALT = ("iid", "shards", "coarse", "coarse-dirichlet")


def cifar(rows=3000, **more):
    classes = tuple(name.replace("_", " ") for name in class_names("cifar100"))
    return replace(make_rows(rows, classes=100, domains=1, **more), classes=classes)


@pytest.mark.parametrize("by", DEALT)
def test_every_row_is_in_one_part_of_one_client(by):
    table = cifar()
    division = divide(table, Clients(by, count=20, alpha=1.0, min_samples=1), 0)
    members = division.members.values()
    held = list(chain.from_iterable(getattr(m, p).tolist() for m in members for p in PARTS))
    assert sorted(held) == list(range(len(table.labels)))
    assert [len(getattr(m, p)) > 0 for m in members for p in PARTS] == [True] * 60
    assert list(division.members) == [f"client-{i}" for i in range(20)]


@pytest.mark.parametrize("by", DEALT)
def test_another_order_of_rows_is_dealt_the_same_way(by):
    table = cifar()
    mixed = np.random.default_rng(1).permutation(len(table.labels))
    columns = ("labels", "domains", "clients", "splits")
    other = replace(
        table,
        content=[table.content[i] for i in mixed],
        **{key: getattr(table, key)[mixed] for key in columns},
    )
    clients = Clients(by, count=20, alpha=1.0, min_samples=1)
    one, two = divide(table, clients, 3), divide(other, clients, 3)
    for id, member in one.members.items():
        assert set(mixed[two.members[id].train]) == set(member.train)
    assert any(
        set(member.train) != set(divide(table, clients, 4).members[id].train)
        for id, member in one.members.items()
    )


@pytest.mark.parametrize("count", [3, 7, 10])
def test_iid_clients_differ_by_one_row_of_a_part_at_most(count):
    division = divide(make_rows(997, classes=4), Clients("iid", count=count), 0)
    for part in PARTS:
        sizes = [len(getattr(m, part)) for m in division.members.values()]
        assert max(sizes) - min(sizes) <= 1
    counts = count_table(division, make_rows(997, classes=4))
    assert (counts > 0.4 * counts.sum(0) / count).all()


def test_a_client_of_shards_has_few_classes_and_is_tested_on_them():
    table = make_rows(4000, classes=20)
    division = divide(table, Clients("shards", count=10), 0)
    for member in division.members.values():
        trained = set(table.labels[member.train].tolist())
        assert len(trained) <= 2 * SHARDS  # a shard is a class long here, and may lie across two
        near = {label + step for label in trained for step in (-1, 0, 1)}
        assert set(table.labels[member.test].tolist()) <= near
    for part in PARTS:
        sizes = [len(getattr(m, part)) for m in division.members.values()]
        assert max(sizes) - min(sizes) <= SHARDS


def test_there_are_twenty_superclasses_of_five_classes_each():
    names = [name.replace("_", " ") for name in class_names("cifar100")]
    found = superclasses(names)
    assert len(names) == 100
    assert {name: found.count(name) for name in found} == dict.fromkeys(SUPERCLASSES, 5)
    with pytest.raises(SettingsError, match="'class 0' has no superclass"):
        divide(make_rows(400), Clients("coarse"), 0)


@pytest.mark.parametrize(("count", "each"), [(100, 1), (40, 1), (20, 1), (10, 2), (4, 5)])
def test_a_client_has_whole_superclasses_and_all_their_classes_evenly(count, each):
    table = cifar(10_000)
    division = divide(table, Clients("coarse", count=count), 0)
    groups = np.array(superclasses(table.classes))
    for member in division.members.values():
        mine = table.labels[member.train]
        assert len(set(groups[mine])) == each
        assert set(mine) == set(np.flatnonzero(np.isin(groups, groups[mine])))
    counts = count_table(division, table, ["train"])
    shared = np.where(counts, counts, counts.max(0))  # of a class, by the clients that have it
    assert (shared.max(0) - shared.min(0)).max() <= 1


def test_the_two_levels_are_dirichlet_draws_over_superclasses_and_their_classes():
    groups = superclasses([name.replace("_", " ") for name in class_names("cifar100")])
    shares = two_levels(groups, 10, 0.3, np.random.default_rng(0))
    assert shares.shape == (100, 10)
    np.testing.assert_allclose(shares.sum(1), 1)
    together = [shares[np.array(groups) == name] for name in SUPERCLASSES]
    within = np.mean([one.std(0).mean() for one in together])
    between = np.std([one.mean(0) for one in together], axis=0).mean()
    assert within < 0.5 * between  # classes of one superclass go to the same clients
    even = two_levels(groups, 10, 1e6, np.random.default_rng(0))
    assert even.std() < shares.std() / 2


@pytest.mark.parametrize("by", ["iid", "dirichlet"])
def test_rows_marked_test_are_the_target_and_no_other_clients(by):
    table = make_rows(400, classes=4, domains=1, splits="train,train,test")
    division = divide(table, Clients(by, count=3, min_samples=1), 0, ["split:test"])
    assert list(division.members) == [*(f"client-{i}" for i in range(3)), "split:test"]
    target = division.members["split:test"]
    assert set(target.test) == set(np.flatnonzero(table.splits == "test"))
    assert len(target.train) == len(target.validation) == 0
    for id in list(division.members)[:3]:
        member = division.members[id]
        assert len(member.test) and len(member.validation)
        for part in PARTS:
            assert set(table.splits[getattr(member, part)]) == {"train"}


def test_a_target_that_is_not_there_is_refused():
    with pytest.raises(DataError, match="names no rows that the data marks itself"):
        divide(make_rows(400), Clients("iid"), 0, ["split:test"])
    with pytest.raises(DataError, match="names no rows that the data marks itself"):
        divide(make_rows(400, splits="train,test"), Clients("iid"), 0, ["split:train"])
    with pytest.raises(SettingsError, match="no domain or client is called 'client-9'"):
        divide(make_rows(400), Clients("iid", count=4), 0, ["client-9"])


def test_a_client_may_be_the_target():
    division = divide(make_rows(400), Clients("iid", count=4), 0, ["client-3"])
    plain = divide(make_rows(400), Clients("iid", count=4), 0)
    for id, member in plain.members.items():
        assert member.train.tolist() == division.members[id].train.tolist()
