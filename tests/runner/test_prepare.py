"""One prepared run: the same division, trainings and worlds for whoever starts from it."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedvlm
from fedvlm.core import make
from fedvlm.engines.client import Kept, Terms, World
from fedvlm.engines.state import State, pack, unpack
from fedvlm.evaluate.reference import wants_reference
from fedvlm.runner.load import load
from fedvlm.runner.prepare import frozen_of, prepare, prepare_one, terms_of, trainings_of
from fedvlm.runner.settings import build
from fedvlm.storage.sealed import read_json, read_tensors, write_tensors

SOURCE = Path(fedvlm.__file__).parent
BESIDE_A_RUN = {"cli/data.py"}  # `fedvlm partition` shows a division before there is a run


def callers(name):
    """The modules in which a function or class of this name is called."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
                found.add(path.relative_to(SOURCE).as_posix())
    return found


def test_rows_are_divided_for_a_run_in_one_place():
    assert callers("divide") - BESIDE_A_RUN == {"runner/prepare.py"}


def test_worlds_and_frozen_tensors_are_built_in_one_place():
    assert callers("World") - {"testing/toys.py"} == {"runner/prepare.py"}
    assert callers("Frozen") - {"testing/toys.py"} == {"runner/prepare.py"}


def test_a_world_holds_the_terms_that_a_server_without_rows_has(rows):
    settings = build({"method": "fedot", "channel": {"clip": 1.0}})
    prepared = prepare(settings, rows, 0)
    terms = terms_of(settings, frozen_of(rows, 0), 0)
    assert type(terms) is Terms and not hasattr(terms, "x")
    world = prepared.world(prepared.trainings[0])
    assert isinstance(world, World)
    assert (world.method, world.seed, world.channel) == (terms.method, terms.seed, terms.channel)


def test_trainings_need_only_the_domains_of_the_clients(rows):
    settings = build({"method": "fedot"})
    prepared = prepare(settings, rows, 3)
    assert prepared.trainings == trainings_of(settings, prepared.division.domains, 3)


def test_a_client_s_own_world_has_its_rows_in_the_run_s_order_and_no_other(rows):
    prepared = prepare(build({"method": "fedot", "protocol": "own-test"}), rows, 0)
    whole = prepared.world(prepared.trainings[0])
    own = prepared.own_world("photo", "site 7")
    assert list(own.members) == ["site 7"] and not len(own.reference)
    count = 0
    for part in ("train", "validation", "test"):
        mine = torch.from_numpy(getattr(own.members["site 7"], part))
        theirs = torch.from_numpy(getattr(whole.members["photo"], part))
        assert torch.equal(own.x[mine], whole.x[theirs]) and len(mine)
        assert torch.equal(own.y[mine], whole.y[theirs])
        count += len(mine)
    assert len(own.x) == len(own.y) == count


def test_one_client_alone_is_divided_without_the_classes_it_lacks(rows):
    keep = rows.labels != 1
    columns = {key: getattr(rows, key)[keep] for key in ("labels", "domains", "clients", "splits")}
    content = [one for one, kept in zip(rows.content, keep, strict=True) if kept]
    few = replace(rows, x=rows.x[torch.from_numpy(keep)], content=content, **columns)
    prepared = prepare_one(build({"method": "fedot"}), few, "new", 0)
    member = prepared.division.members["new"]
    parts = np.concatenate([member.train, member.validation, member.test])
    assert sorted(parts.tolist()) == list(range(len(few.labels)))
    assert prepared.frozen.classes == rows.classes
    world = prepared.own_world("new")
    assert sorted(set(world.y.tolist())) == [0, 2, 3]


def test_reference_rows_of_a_training_are_those_of_its_world(rows):
    values = {"method": "faa-clip", "protocol": "source-target", "target": ["photo"]}
    prepared = prepare(build({**values, "clients": {"public_ratio": 0.2}}), rows, 0)
    (training,) = prepared.trainings
    assert wants_reference(prepared.settings.method)
    found = prepared.reference(training)
    assert len(found) and np.array_equal(prepared.world(training).reference, found)
    assert set(prepared.division.public.tolist()) <= set(found.tolist())


@pytest.mark.parametrize(
    ("method", "wanted"), [("fedot", True), ("fedot-all-local", False), ("zero-shot", True)]
)
def test_a_method_that_trains_and_shares_nothing_does_not_generalise(rows, method, wanted):
    assert prepare(build({"method": make(method)}), rows, 0).generalises is wanted


def test_versions_of_tensors_that_are_at_their_clients_survive_a_checkpoint(tmp_path):
    here = {"skew": torch.ones(2)}
    local = {"a": Kept(3), "b": here, "c/d": Kept(1)}
    best = {"a": Kept(2)}
    state = State(4, {"head": torch.zeros(3)}, local, 0.5, 2, {"head": torch.ones(3)}, best)
    write_tensors(tmp_path / "state", *pack(state))
    back = unpack(*read_tensors(tmp_path / "state"))
    assert {id: one for id, one in back.local.items() if id != "b"} == {
        "a": Kept(3),
        "c/d": Kept(1),
    }
    assert torch.equal(back.local["b"]["skew"], here["skew"])
    assert back.best_local == best and back.round == 4


def test_a_centralised_method_has_one_client_with_the_rows_of_all_that_train():
    rows = load(build({"method": "pooled"}), lambda what, done, total: None)[0]
    prepared = prepare(build({"method": "pooled"}), rows, 0)
    training = prepared.trainings[0]
    members = prepared.world(training).members
    both = [members[id] for id in training.train]
    assert set(members["pooled"].train) == {row for one in both for row in one.train}
    assert set(members["pooled"].validation) == {row for one in both for row in one.validation}
    taught = prepared.taught(training)
    assert taught.train == ("pooled",) and set(taught.unseen) == set(
        training.train + training.unseen
    )
    federated = prepare(build({"method": "alone"}), rows, 0)
    assert (
        federated.taught(training) is training and "pooled" not in federated.world(training).members
    )


def test_a_run_of_a_centralised_method_measures_every_client(tmp_path):
    fedvlm.run("pooled", smoke=True, out=tmp_path / "run", workers=1)
    found = read_json(tmp_path / "run" / "result.json")["tables"][0]
    assert {"G", "P", "C"} <= found.keys() and all(0 < found[key] < 1 for key in "GPC")
