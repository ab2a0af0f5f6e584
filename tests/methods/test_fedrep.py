"""FedRep: in every round the head first, then the map, and never both at once."""

from dataclasses import dataclass, replace

import pytest
import torch

from fedvlm import tensors
from fedvlm.core import TrainingTraits, Traits, make
from fedvlm.engines.chunks import pad_clients
from fedvlm.engines.client import make_client
from fedvlm.errors import SettingsError
from fedvlm.methods.fedrep import FedRep
from fedvlm.parts.training import epoch_of
from fedvlm.testing import toy_world, train_toy

QUICK = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 16}


@dataclass(frozen=True)
class Only(FedRep):
    """Trains what is not `still`, in all epochs."""

    still: str = "map"

    def trains_in_epoch(self, key, epoch):
        return torch.ones_like(epoch, dtype=torch.bool)

    @property
    def traits(self):
        return Traits(needs=frozenset({"image"}), training=TrainingTraits(memory=frozenset({self.still})))


def updated(method, id="client-2"):
    world = toy_world(method)
    shared, local = method.init(world.frozen)
    toy_client = make_client(world, id, 0)
    return world, toy_client, *method.update(world.frozen, shared, local, toy_client)


@pytest.mark.parametrize(("heads", "maps", "same"), [(3, 0, "map"), (0, 2, "head")])
def test_what_has_no_epoch_stays_as_it_was(heads, maps, same):
    method = make("fedrep", head_epochs=heads, map_epochs=maps, **QUICK)
    world, _, upload, new_local = updated(method)
    first = {**method.init(world.frozen)[0], **method.init(world.frozen)[1]}
    changed = [key for key, value in {**upload, **new_local}.items() if not torch.equal(value, first[key])]
    assert changed == [{"map": "head", "head": "map"}[same]]


@pytest.mark.parametrize("id", ["client-0", "client-1", "client-2"])
def test_a_round_is_a_walk_of_the_head_alone_and_then_one_of_the_map_alone(id):
    method = make("fedrep", head_epochs=3, map_epochs=2, **QUICK)
    world, toy_client, upload, new_local = updated(method, id)
    steps_per_epoch = len(toy_client.order) // 5
    shared, local = method.init(world.frozen)
    first = replace(toy_client, order=toy_client.order[: 3 * steps_per_epoch])
    second = replace(toy_client, order=toy_client.order[3 * steps_per_epoch :])
    _, head = Only(still="map", **QUICK).update(world.frozen, shared, local, first)
    moved, _ = Only(still="head", **QUICK).update(world.frozen, shared, head, second)
    assert tensors.max_relative_difference(new_local, head) < 1e-6
    assert tensors.max_relative_difference(upload, moved) < 1e-6


def test_only_the_map_is_uploaded_and_every_client_keeps_its_head():
    world = toy_world(make("fedrep", rounds=2, head_epochs=2, **QUICK))
    outcome = train_toy(world)
    assert set(outcome.shared) == {"map"}
    heads = [local["head"] for local in outcome.local.values()]
    assert not torch.allclose(heads[0], heads[1], atol=1e-3)


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_clients_padded_to_one_length_have_their_own_epochs(epochs):
    method = make("fedrep", head_epochs=epochs, map_epochs=0, **QUICK)
    world = toy_world(method)
    clients = [make_client(world, id, 0) for id in sorted(world.members)]
    stacked_epochs = epoch_of(method, pad_clients(clients).order)
    for single_client, padded in zip(clients, stacked_epochs, strict=True):
        steps = len(single_client.order)
        steps_per_epoch = -(-len(single_client.y) // method.batch_size)
        assert padded[:steps].tolist() == [step // steps_per_epoch for step in range(steps)]


def test_idle_steps_before_or_within_do_not_shift_an_epoch():
    method = make("fedrep", head_epochs=1, map_epochs=1)
    idle, some = [-1, -1], [0, -1]
    order = torch.tensor([idle, some, idle, some, some, some, idle])
    epochs = epoch_of(method, order)
    assert epochs[(order >= 0).any(1)].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("epochs", [(0, 0), (-1, 3), (2, -1)])
def test_epochs_that_train_nothing_are_refused(epochs):
    with pytest.raises(SettingsError, match="epochs must be (at least 0|between 1 and 10000), got"):
        make("fedrep", head_epochs=epochs[0], map_epochs=epochs[1])
