"""A plan has one hash, whatever way it was made, and another one for every difference."""

import json

import pytest
import torch

from fedvlm.deploy.plan import Member, Plan, hash_tensors, plan_of_spec, read_plan
from fedvlm.errors import FederationError
from fedvlm.runner.settings import build

SPEC = {
    "identity": json.loads(json.dumps(build({"method": "fedavg", "protocol": "own-test"}).identity())),
    "classes": ["cat", "Käfer"],
    "seed": 3,
    "training": "all",
}
MEMBERS = (Member(name="a", key="k1"), Member(name="b", key="k2"))
FACTS = {"encoder": "0f", "dim": 8, "scale": 100.0, "members": MEMBERS, "deadline": "2030-01-01T00:00:00+00:00"}


def test_a_plan_survives_its_bytes_with_the_same_hash():
    plan = plan_of_spec(SPEC, **FACTS)
    again = read_plan(plan.to_bytes())
    assert again == plan and again.hash == plan.hash
    assert again.settings.method.name == "fedavg" and again.member_names == ["a", "b"]


def test_the_order_of_settings_does_not_change_the_hash():
    shuffled = {**SPEC, "identity": dict(reversed(SPEC["identity"].items()))}
    assert plan_of_spec(shuffled, **FACTS).hash == plan_of_spec(SPEC, **FACTS).hash


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"classes": ["Käfer", "cat"]},
        {"scale": 100.00001},
        {"members": MEMBERS[::-1]},
        {"purpose": "x"},
        {"tensors": {"text": "00"}},
        {"identity": {**SPEC["identity"], "method": {**SPEC["identity"]["method"], "lr": 0.5}}},
    ],
)
def test_every_difference_gives_another_hash(change):
    plan = plan_of_spec(SPEC, **FACTS)
    assert plan.model_copy(update=change).hash != plan.hash


def test_other_bytes_of_the_same_plan_are_refused():
    data = plan_of_spec(SPEC).to_bytes()
    for other in (data + b" ", data.replace(b":", b": ", 1), b"{}", b"\xff"):
        with pytest.raises(FederationError):
            read_plan(other)


def test_unknown_fields_are_refused():
    with pytest.raises(FederationError, match="unknown fields"):
        read_plan(json.dumps({**json.loads(plan_of_spec(SPEC).to_bytes()), "extra": 1}).encode())


def test_tensors_must_be_those_of_the_plan():
    text = torch.eye(2, 8)
    plan = Plan(**{name: SPEC[name] for name in SPEC}, tensors={"text": hash_tensors({"": text})})
    plan.check_tensors({"text": text})
    for wrong in ({}, {"text": text + 1e-7}, {"text": text.double()}, {"text": text, "reference": text}):
        with pytest.raises(FederationError, match="not the one of its hash"):
            plan.check_tensors(wrong)
