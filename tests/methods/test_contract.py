"""Every registered method keeps the contract, on every engine."""

from dataclasses import dataclass

import pytest

from fedvlm.core import make, methods
from fedvlm.methods.fedrep import FedRep
from fedvlm.testing import check_method, check_same, check_uploads, shorten, toy_world, train_toy

CASES = [(name, {}) for name in methods()]
CASES += [("fedot", {"blocks": 4}), ("fedot", {"blocks": "auto"}), ("fedot", {"head": "random"})]
CASES += [("fedot", {"momentum": 0.9, "lr": 1e-3})]  # the path without low-rank steps
CASES += [("lora", {"average": "products"}), ("vpt", {"depth": 2})]
CASES += [("faa-clip", {"mask": "deeper", "local_norm": True, "persist": True})]
CASES += [("faa-clip", {"adaptation": False, "mask": "no norm", "mask_duplicates": True})]
CASES += [("faa-clip", {"shared_discriminator": True, "mask": "linear, norm"})]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda case: str(case))
def test_method_keeps_the_contract(name, settings):
    check_method(make(name, **settings))


@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda case: str(case))
def test_two_processes_give_the_same_bits_as_one(name, settings):
    world = toy_world(shorten(make(name, **settings)))
    check_same(train_toy(world, workers=2), train_toy(world, workers=1), 0.0, "workers change the result")


@dataclass(frozen=True)
class Leaking(FedRep):
    """Uploads its own head under another name."""

    def update(self, frozen, sent, local, client):
        upload, new_local = FedRep.update(self, frozen, sent, local, client)
        return {**upload, "pattern": new_local["head"]}, new_local


def test_a_local_tensor_uploaded_under_another_name_is_refused():
    with pytest.raises(AssertionError, match="'pattern' is the local tensor 'head' renamed"):
        check_uploads(toy_world(Leaking(head_epochs=1)))


def test_the_change_of_a_local_tensor_that_was_zero_is_no_leak():
    check_uploads(toy_world(make("scaffold")))
