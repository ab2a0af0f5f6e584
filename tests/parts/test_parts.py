"""The standard parts keep their laws."""

from dataclasses import dataclass, replace

import pytest
import torch

from fedvlm import parts, tensors
from fedvlm.core import TrainingTraits, Traits, make
from fedvlm.engines.client import make_client
from fedvlm.methods.fedavg import FedAvg
from fedvlm.testing import make_test_client, toy_world, train_toy


def uploads(*values):
    return [{"w": torch.tensor([value])} for value in values]


def test_mean_weighs_by_rows():
    got = parts.mean(None, {"w": torch.zeros(1)}, uploads(1.0, 2.0, 5.0), torch.tensor([1.0, 2, 5]), [])
    assert got["w"].item() == pytest.approx((1 + 4 + 25) / 8, abs=1e-7)


def test_uniform_weighs_every_client_the_same():
    got = parts.uniform_mean(None, {"w": torch.zeros(1)}, uploads(1.0, 2.0, 6.0), torch.tensor([1.0, 2, 5]), [])
    assert got["w"].item() == 3.0


def test_an_upload_changed_afterwards_leaves_the_aggregate_alone():
    sent = uploads(1.0)
    got = parts.mean(None, {"w": torch.zeros(1)}, sent, torch.ones(1), [])
    sent[0]["w"].fill_(9)
    assert got["w"].item() == 1.0


def test_fedprox_without_pull_is_fedavg():
    without_pull = train_toy(toy_world(make("fedprox", mu=0.0, rounds=3, lr=0.01)))
    plain = train_toy(toy_world(make("fedavg", rounds=3, lr=0.01)))
    assert tensors.max_relative_difference(without_pull.shared, plain.shared) == 0


def test_fedprox_with_a_huge_pull_stays_where_it_was_sent():
    world = toy_world(make("fedprox", mu=1e3, rounds=1, lr=1e-3, local_epochs=20))
    free = toy_world(make("fedprox", mu=0.0, rounds=1, lr=1e-3, local_epochs=20))
    start = world.frozen.text
    held = (train_toy(world).shared["head"] - start).norm()
    moved = (train_toy(free).shared["head"] - start).norm()
    assert held < 0.05 * moved


def test_the_pull_of_fedprox_has_a_gradient_towards_what_was_sent():
    world = toy_world(make("fedprox", mu=2.0))
    batch = parts.minibatch(make_client(world, "client-0", 0), 0)
    start = {"head": torch.zeros(4, 16)}

    def loss(head, mu):
        method = replace(world.method, mu=mu)
        return method.loss(world.frozen, {"head": head}, {}, batch, start)

    at = world.frozen.text
    pull = torch.func.grad(loss)(at, 2.0) - torch.func.grad(loss)(at, 0.0)
    torch.testing.assert_close(pull, 2.0 * at, atol=1e-5, rtol=1e-5)


@dataclass(frozen=True)
class Adam(FedAvg):
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    update = parts.adam


def test_adam_is_torch_s():
    method = Adam(lr=1e-2, weight_decay=0.1, local_epochs=3)
    world = toy_world(method)
    client_data = make_client(world, "client-0", 0)
    sent, _ = method.init(world.frozen)
    head = sent["head"].clone().requires_grad_()
    optimiser = torch.optim.Adam([head], lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)
    for step in range(len(client_data.order)):
        optimiser.zero_grad()
        method.loss(world.frozen, {"head": head}, {}, parts.minibatch(client_data, step), sent).backward()
        optimiser.step()
    upload, _ = method.update(world.frozen, sent, {}, client_data)
    torch.testing.assert_close(upload["head"], head.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("update", [parts.sgd, parts.adam])
def test_steps_without_a_row_change_nothing(update, monkeypatch):
    monkeypatch.setattr(FedAvg, "update", update)
    world = toy_world(make("fedavg", momentum=0.9, weight_decay=0.1))
    client_data = make_client(world, "client-0", 0)
    sent, _ = world.method.init(world.frozen)
    idle = make_test_client(client_data.x, client_data.y, torch.full((3, 32), -1), client_data.val_x, client_data.val_y)
    padded_order = torch.cat([idle.order, client_data.order, idle.order])
    padded = make_test_client(client_data.x, client_data.y, padded_order, client_data.val_x, client_data.val_y)
    upload, _ = world.method.update(world.frozen, sent, {}, idle)
    assert torch.equal(upload["head"], sent["head"])
    a, _ = world.method.update(world.frozen, sent, {}, client_data)
    b, _ = world.method.update(world.frozen, sent, {}, padded)
    assert torch.equal(a["head"], b["head"])


def test_sgd_equals_torch():
    world = toy_world(make("fedavg", momentum=0.9, weight_decay=0.01, lr=0.01, local_epochs=2))
    client_data = make_client(world, "client-0", 0)
    sent, _ = world.method.init(world.frozen)
    head = torch.nn.Parameter(sent["head"].clone())
    optimiser = torch.optim.SGD([head], lr=0.01, momentum=0.9, weight_decay=0.01)
    for step in range(client_data.order.shape[0]):
        rows = client_data.order[step][client_data.order[step] >= 0]
        optimiser.zero_grad()
        logits = world.frozen.scale * client_data.x[rows] @ head.mT
        torch.nn.functional.cross_entropy(logits, client_data.y[rows]).backward()
        optimiser.step()
    upload, _ = world.method.update(world.frozen, sent, {}, client_data)
    torch.testing.assert_close(upload["head"], head.detach(), atol=1e-6, rtol=1e-5)


@dataclass(frozen=True)
class Counting(FedAvg):
    """FedAvg that remembers how many real rows it has seen."""

    def init(self, frozen):
        return {"head": frozen.text}, {"seen": torch.zeros(())}

    def loss(self, frozen, shared, local, batch, start):
        count = local["seen"] + batch.real.sum()
        return super().loss(frozen, shared, {}, batch, start), {"seen": count}

    traits = Traits(needs=frozenset({"image", "text"}), training=TrainingTraits(memory=frozenset({"seen"})))


def test_a_loss_may_return_new_memory_which_is_kept_and_not_trained():
    world = toy_world(Counting(rounds=2))
    for engine in ("batched", "single"):
        done = train_toy(world, engine)
        assert {id: local["seen"].item() for id, local in done.local.items()} == {
            "client-0": 80,
            "client-1": 18,
            "client-2": 140,
        }


def test_no_difference_is_small_where_a_number_is_missing():
    first = {"a": torch.ones(3), "b": torch.ones(3)}
    assert tensors.max_relative_difference(first, {**first, "b": torch.tensor([1.0, torch.nan, 1.0])}) == torch.inf
