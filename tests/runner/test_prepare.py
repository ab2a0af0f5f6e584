"""One prepared run: the same division, trainings and worlds for whoever starts from it."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedvlm
from fedvlm.core import make
from fedvlm.engines.client import RemoteState, TrainingTerms, World
from fedvlm.engines.state import State, pack_state, unpack_state
from fedvlm.evaluate.protocols.contract import has_reference
from fedvlm.runner.load import load
from fedvlm.runner.prepare import frozen_of, prepare, prepare_client, terms_of, trainings_of
from fedvlm.runner.settings import build
from fedvlm.storage.files import read_json, read_tensors, write_tensors

SOURCE = Path(fedvlm.__file__).parent


def callers(name):
    """The modules in which a function or class of this name is called."""
    names = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
                names.add(path.relative_to(SOURCE).as_posix())
    return names


def test_rows_are_divided_for_a_run_in_one_place():
    assert callers("make_partition") == {"runner/prepare.py"}


def test_worlds_and_frozen_tensors_are_built_in_one_place():
    assert callers("World") - {"testing/toys.py"} == {"runner/prepare.py"}
    assert callers("Frozen") - {"testing/toys.py"} == {"runner/prepare.py"}


def test_a_world_holds_the_terms_that_a_server_without_rows_has(rows):
    settings = build({"method": "fedot", "channel": {"clip": 1.0}})
    prepared = prepare(settings, rows, 0)
    terms = terms_of(settings, frozen_of(rows, 0), 0)
    assert type(terms) is TrainingTerms and not hasattr(terms, "x")
    world = prepared.world(prepared.trainings[0])
    assert isinstance(world, World)
    assert (world.method, world.seed, world.channel) == (terms.method, terms.seed, terms.channel)


def test_trainings_need_only_the_domains_of_the_clients(rows):
    settings = build({"method": "fedot"})
    prepared = prepare(settings, rows, 3)
    assert prepared.trainings == trainings_of(settings, prepared.partition.domains, 3)


def test_a_client_s_own_world_has_its_rows_in_the_run_s_order_and_no_other(rows):
    prepared = prepare(build({"method": "fedot", "protocol": "own-test"}), rows, 0)
    run_world = prepared.world(prepared.trainings[0])
    client_world = prepared.own_world("photo", "site 7")
    assert list(client_world.members) == ["site 7"] and not len(client_world.reference)
    count = 0
    for part in ("train", "validation", "test"):
        indices = torch.from_numpy(getattr(client_world.members["site 7"], part))
        theirs = torch.from_numpy(getattr(run_world.members["photo"], part))
        assert torch.equal(client_world.x[indices], run_world.x[theirs]) and len(indices)
        assert torch.equal(client_world.y[indices], run_world.y[theirs])
        count += len(indices)
    assert len(client_world.x) == len(client_world.y) == count


def test_one_client_alone_is_divided_without_the_classes_it_lacks(rows):
    keep = rows.labels != 1
    columns = {key: getattr(rows, key)[keep] for key in ("labels", "domains", "clients", "splits")}
    content = [digest for digest, is_kept in zip(rows.content, keep, strict=True) if is_kept]
    subset = replace(rows, x=rows.x[torch.from_numpy(keep)], content=content, **columns)
    prepared = prepare_client(build({"method": "fedot"}), subset, "new", 0)
    member = prepared.partition.clients["new"]
    parts = np.concatenate([member.train, member.validation, member.test])
    assert sorted(parts.tolist()) == list(range(len(subset.labels)))
    assert prepared.frozen.classes == rows.classes
    world = prepared.own_world("new")
    assert sorted(set(world.y.tolist())) == [0, 2, 3]


def test_reference_rows_of_a_training_are_those_of_its_world(rows):
    values = {"method": "faa-clip", "protocol": "source-target", "target": ["photo"]}
    prepared = prepare(build({**values, "clients": {"public_ratio": 0.2}}), rows, 0)
    (training,) = prepared.trainings
    assert has_reference(prepared.settings.method)
    reference = prepared.reference(training)
    assert len(reference) and np.array_equal(prepared.world(training).reference, reference)
    assert set(prepared.partition.public.tolist()) <= set(reference.tolist())


@pytest.mark.parametrize(("method", "generalises"), [("fedot", True), ("fedot-all-local", False), ("zero-shot", True)])
def test_a_method_that_trains_and_shares_nothing_does_not_generalise(rows, method, generalises):
    assert prepare(build({"method": make(method)}), rows, 0).generalises is generalises


def test_versions_of_tensors_that_are_at_their_clients_survive_a_checkpoint(tmp_path):
    local_tensors = {"skew": torch.ones(2)}
    local = {"a": RemoteState(3), "b": local_tensors, "c/d": RemoteState(1)}
    best = {"a": RemoteState(2)}
    state = State(4, {"head": torch.zeros(3)}, local, 0.5, 2, {"head": torch.ones(3)}, best)
    write_tensors(tmp_path / "state", *pack_state(state))
    back = unpack_state(*read_tensors(tmp_path / "state"))
    assert {id: entry for id, entry in back.local.items() if id != "b"} == {
        "a": RemoteState(3),
        "c/d": RemoteState(1),
    }
    assert torch.equal(back.local["b"]["skew"], local_tensors["skew"])
    assert back.best_local == best and back.round == 4


def test_a_centralised_method_has_one_client_with_the_rows_of_all_that_train():
    rows = load(build({"method": "pooled"}), lambda task, done, total: None)[0]
    prepared = prepare(build({"method": "pooled"}), rows, 0)
    training = prepared.trainings[0]
    members = prepared.world(training).members
    members_in_training = [members[id] for id in training.train]
    assert set(members["pooled"].train) == {row for member in members_in_training for row in member.train}
    assert set(members["pooled"].validation) == {row for member in members_in_training for row in member.validation}
    taught = prepared.measured_training(training)
    assert taught.train == ("pooled",) and set(taught.unseen) == set(training.train + training.unseen)
    federated = prepare(build({"method": "alone"}), rows, 0)
    assert federated.measured_training(training) is training and "pooled" not in federated.world(training).members


def test_a_run_of_a_centralised_method_measures_every_client(tmp_path):
    fedvlm.run("pooled", smoke=True, out=tmp_path / "run", workers=1)
    table = read_json(tmp_path / "run" / "result.json")["tables"][0]
    assert {"G", "P", "C"} <= table.keys() and all(0 < table[key] < 1 for key in "GPC")
