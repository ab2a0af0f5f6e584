"""SCAFFOLD: variates that start at zero, always average to the shared one, and undo drift."""

from dataclasses import dataclass, replace

import pytest
import torch

from fedvlm import parts, tensors
from fedvlm.core import make
from fedvlm.engines.batched import Batched
from fedvlm.engines.client import make_client
from fedvlm.engines.loop import initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan, with_client_count
from fedvlm.errors import SettingsError
from fedvlm.methods.fedavg import FedAvg
from fedvlm.methods.scaffold import Scaffold
from fedvlm.testing import toy_world

IDS = tuple(f"client-{i}" for i in range(4))
FULL = {"batch_size": 1000, "lr": 0.02, "weight_decay": 0.0}  # a step is a gradient of all rows


@dataclass(frozen=True)
class Uniform(FedAvg):
    """FedAvg as SCAFFOLD's paper has it: every client weighs the same."""

    aggregate = parts.uniform_mean


def trained(method, fraction=1.0, engine=Batched, lines=None):
    """The state after all rounds of all four clients; `lines` collects what the rounds report."""
    lines = [] if lines is None else lines
    world = toy_world(method)
    state, initial_local = initial_state(world)
    plan = Plan(IDS, (), fraction=fraction)
    return run_rounds(world, engine(world), plan, state, initial_local, lambda state, line: lines.append(line))


def gradient(world, head):
    """The mean over clients of the gradients of their losses."""

    def loss(head, rows):
        logits = world.frozen.scale * world.x[rows] @ head.mT
        return torch.nn.functional.cross_entropy(logits, world.y[rows])

    training_rows = [torch.from_numpy(part.train) for part in world.members.values()]
    return torch.stack([torch.func.grad(loss)(head, rows) for rows in training_rows]).mean(0)


def test_the_first_round_is_fedavg_s_because_variates_are_zero():
    shared = {"rounds": 1, "local_epochs": 3, "lr": 0.01}
    scaffold_head = trained(make("scaffold", **shared)).shared["head"]
    assert torch.equal(scaffold_head, trained(Uniform(**shared)).shared["head"])
    later = {**shared, "rounds": 2}
    scaffold_head = trained(make("scaffold", **later)).shared["head"]
    assert not torch.allclose(scaffold_head, trained(Uniform(**later)).shared["head"], atol=1e-4)


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
def test_the_shared_variate_is_the_mean_of_all_clients_also_of_those_that_were_not_asked(fraction):
    lines = []
    state = trained(make("scaffold", rounds=5, local_epochs=2, lr=0.01), fraction, lines=lines)
    assert [len(line["clients"]) for line in lines] == [len(IDS) * fraction] * 5
    assert state.shared["clients"] == len(IDS)
    variates = [local_state["local variate"] for local_state in state.local.values()]
    mean = torch.stack(variates).sum(0) / len(IDS)
    assert mean.abs().max() > 0
    assert tensors.max_relative_difference({"": state.shared["variate"]}, {"": mean}) < 1e-5


def test_one_full_step_a_round_is_gradient_descent_whatever_the_variates():
    method = make("scaffold", rounds=6, local_epochs=1, **FULL)
    world = toy_world(method)
    head = world.frozen.text
    for _ in range(6):
        head = head - method.lr * gradient(world, head)
    torch.testing.assert_close(trained(method).shared["head"], head, atol=1e-5, rtol=1e-4)


def test_a_client_s_variate_is_its_mean_gradient_of_the_round():
    method = make("scaffold", local_epochs=1, **FULL)
    world = toy_world(method)
    sent, local = method.init(world.frozen)
    sent["variate"] = torch.full_like(sent["head"], 0.3)
    local["local variate"] = torch.full_like(sent["head"], -0.2)
    upload, new_local = method.update(world.frozen, sent, local, make_client(world, "client-0", 0))
    alone = replace(world, members={"client-0": world.members["client-0"]})
    true = gradient(alone, sent["head"])
    torch.testing.assert_close(new_local["local variate"], true, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(upload["variate change"], true + 0.2, atol=1e-4, rtol=1e-4)
    expected = sent["head"] - method.lr * (true + 0.2 + 0.3)
    torch.testing.assert_close(upload["head"], expected, atol=1e-5, rtol=1e-4)


def test_many_local_steps_end_at_the_optimum_of_the_mean_loss_and_fedavg_s_do_not():
    long_training = {**FULL, "rounds": 25, "local_epochs": 10, "weight_decay": 1.0}
    world = toy_world(FedAvg())
    scaffold_head, theirs = (
        (gradient(world, head) + head).norm()
        for method in (Scaffold(**long_training), Uniform(**long_training))
        for head in [trained(method).shared["head"]]
    )
    assert scaffold_head < 0.05 * theirs


def test_the_server_s_rate_scales_the_step_of_the_head_and_not_that_of_the_variate():
    full_lr, half_lr = (trained(Scaffold(rounds=1, server_lr=rate)).shared for rate in (1.0, 0.5))
    initial_head = toy_world(Scaffold()).frozen.text
    torch.testing.assert_close(half_lr["head"], (initial_head + full_lr["head"]) / 2)
    assert torch.equal(half_lr["variate"], full_lr["variate"])


def test_the_number_of_clients_is_known_from_the_start_on_every_engine():
    sequential = trained(make("scaffold", rounds=3), 0.5, Sequential)
    assert sequential.shared["clients"] == 4
    assert tensors.max_relative_difference(sequential.shared, trained(make("scaffold", rounds=3), 0.5).shared) < 1e-5


def test_a_count_of_clients_that_init_does_not_share_is_refused():
    world = toy_world(Scaffold())
    state, _ = initial_state(world)
    bare = replace(state, shared={"head": state.shared["head"]})
    with pytest.raises(SettingsError, match="'clients' holds the number of clients, but init"):
        with_client_count(world.method, Plan(IDS, ()), bare)
