"""By its needs a method sees pooled embeddings, patches or pixels, towers, references, noise."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch

from fedvlm import parts, seeds
from fedvlm.core import Frozen, Tensors, TrainingTraits, Traits
from fedvlm.data.partition import Partition
from fedvlm.engines.chunks import pad_clients
from fedvlm.engines.client import make_client, predict
from fedvlm.evaluate.protocols import Training
from fedvlm.evaluate.protocols.contract import reference_samples
from fedvlm.methods.fedavg import FedAvg
from fedvlm.testing import check_method, check_same, toy_world, train_toy


@dataclass(frozen=True)
class Prompted:
    """A shared prompt against the mean of the patches."""

    lr: float = 1e-2
    rounds: int = 2
    batch_size: int = 16
    local_epochs: int = 1

    def init(self, frozen):
        draw = torch.randn(3, frozen.text_tower.width, generator=seeds.generator("prompt", 0))
        return {"prompt": 0.02 * draw}, {}

    def predict(self, frozen: Frozen, sent: Tensors, local: Tensors, x):
        pooled = torch.nn.functional.normalize(x.mean(dim=1), dim=1)
        return frozen.scale * pooled @ frozen.text_tower(sent["prompt"]).mT

    loss = FedAvg.loss
    name = "prompted"
    traits = Traits(needs=frozenset({"patches", "text tower"}))
    send, update, aggregate, adapt = parts.send_all, parts.adam, parts.mean, parts.no_adaptation


@dataclass(frozen=True)
class Tuned(Prompted):
    """The image tower trained whole, with a drift towards a reference and a little noise."""

    reference: Literal["public", "target"] = "public"

    def init(self, frozen):
        return dict(frozen.image_tower.weights), {}

    def predict(self, frozen, sent, local, x):
        embedding = torch.nn.functional.normalize(frozen.image_tower(sent, x), dim=1)
        return frozen.scale * embedding @ frozen.text.mT

    def loss(self, frozen, shared, local, batch, start):
        reference_loss = self.predict(frozen, shared, local, batch.reference).square().mean()
        return FedAvg.loss(self, frozen, shared, local, batch, start) + 1e-4 * reference_loss

    def noise(self, frozen):
        return 5

    name = "tuned"
    update = parts.sgd

    @property
    def traits(self):
        return Traits(needs=frozenset({"image tower", "text"}), training=TrainingTraits(reference=self.reference))


@pytest.mark.parametrize("method", [Prompted(), Tuned()], ids=["patches", "pixels"])
def test_a_method_of_another_view_keeps_the_contract(method):
    check_method(method)


class Counted:
    """Rows that count how often they are read."""

    def __init__(self, x):
        self.x, self.reads = x, 0
        self.shape = x.shape

    def __getitem__(self, index):
        self.reads += 1
        return self.x[index]

    def take(self, index):
        return Counted(self.x[index])


def test_rows_that_are_read_on_demand_give_the_same_result():
    world = toy_world(Tuned())
    lazy = replace(world, x=Counted(world.x))
    check_same(train_toy(lazy), train_toy(world, "single"), 0.0, "lazy rows differ")
    assert lazy.x.reads


def test_a_slice_of_rows_changes_no_logit(monkeypatch):
    world = toy_world(Prompted())
    sent, local = world.method.init(world.frozen)
    rows = world.members["client-0"].train
    all_logits = predict(world, sent, local, rows)
    monkeypatch.setattr("fedvlm.engines.client.PREDICTION_BYTES", 4 * 6 * 16 * 7)
    torch.testing.assert_close(predict(world, sent, local, rows), all_logits, atol=1e-5, rtol=1e-5)


def test_noise_and_reference_differ_by_client_and_round_and_repeat_by_seed():
    world = toy_world(Tuned())
    first, again = make_client(world, "client-0", 0), make_client(world, "client-0", 0)
    other_client, later = make_client(world, "client-2", 0), make_client(world, "client-0", 1)
    assert first.noise.shape == (len(first.order), 5)
    assert torch.equal(first.noise, again.noise)
    assert torch.equal(first.reference_order, again.reference_order)
    for entry in (other_client, later):
        assert not torch.equal(entry.noise[:1], first.noise[:1])
        assert not torch.equal(entry.reference_order[:1], first.reference_order[:1])
    assert first.reference_order.max() < len(world.reference)
    assert pad_clients([first, other_client]).reference.stride(0) == 0, "the reference is held once"


def test_public_references_are_nobody_s_test_rows_and_targets_are():
    world = toy_world(Tuned())
    ids = sorted(world.members)
    training = Training("", tuple(ids[:-1]), (ids[-1],))
    target = world.members[ids[-1]]
    aside = np.array([10_000])
    division = Partition(dict(world.members), 0, aside)
    public = set(reference_samples(Tuned(), division, training).tolist())
    assert public == {*target.train.tolist(), *target.validation.tolist(), *aside.tolist()}
    assert set(reference_samples(Tuned(reference="target"), division, training)) == set(target.test.tolist())
    assert not len(reference_samples(Prompted(), division, training))
