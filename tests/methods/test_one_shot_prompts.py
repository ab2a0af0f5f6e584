"""FedLPA, FENS and FedBEns over prompts: what they equal at a limit, and what crosses the wire."""

from dataclasses import replace

import pytest
import torch

from fedvlm import tensors
from fedvlm.core import make
from fedvlm.engines.batched import Batched
from fedvlm.engines.client import make_client
from fedvlm.engines.loop import initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan
from fedvlm.errors import SettingsError
from fedvlm.maths.gaussian_classes import pack
from fedvlm.methods._prompts import class_features
from fedvlm.methods.fens import HOLDS_PREFIX, NETWORK
from fedvlm.testing import check_same, toy_world, train_toy

VECTORS, WIDTH, CLASSES, DIM = 4, 8, 4, 16  # of the toy world


def world_of(name, **settings):
    return toy_world(make(name, n_ctx=VECTORS, local_epochs=2, **settings))


def sent_up(world, id="client-0", number=0):
    shared, local = world.method.init(world.frozen)
    sent = world.method.send(shared, id)
    return shared, world.method.update(world.frozen, sent, local, make_client(world, id, number))[0]


def lines_of(world, engine=Sequential, fraction=1.0):
    lines = []
    ids = sorted(world.members)
    plan = Plan(tuple(ids[:-1]), (ids[-1],), fraction=fraction)
    state, initial_local = initial_state(world)
    state = run_rounds(world, engine(world), plan, state, initial_local, lambda state, line: lines.append(line))
    return state, lines


def test_fedlpa_with_one_client_returns_its_prompt():
    world = world_of("fedlpa")
    shared, upload = sent_up(world)
    joined = world.method.aggregate(shared, [upload], torch.tensor([40.0]), ["client-0"])
    assert torch.equal(joined["prompt"], upload["prompt"])


def test_fedlpa_of_equal_clients_is_their_mean():
    world = world_of("fedlpa")
    shared, upload = sent_up(world)
    shifted_upload = {**upload, "prompt": upload["prompt"] + 1}
    joined = world.method.aggregate(shared, [upload, shifted_upload], torch.ones(2), ["a", "b"])
    assert torch.allclose(joined["prompt"], upload["prompt"] + 0.5, atol=1e-6)


def test_fedlpa_follows_the_client_whose_rows_say_more():
    world = world_of("fedlpa", damping=1e-6)
    shared, upload = sent_up(world)
    eye = {"tall": VECTORS, "wide": WIDTH}
    flat = {key: pack(torch.eye(size)) for key, size in eye.items()}
    vague = {**upload, **{key: 0.1 * value for key, value in flat.items()}}
    sharp = {**upload, **flat, "prompt": upload["prompt"] + 1}
    joined = world.method.aggregate(shared, [vague, sharp], torch.ones(2), ["a", "b"])
    assert torch.allclose(joined["prompt"], upload["prompt"] + 1 / 1.01, atol=1e-4)


def test_fedlpa_uploads_a_prompt_and_two_triangles():
    _, upload = sent_up(world_of("fedlpa"))
    sizes = {key: value.numel() for key, value in upload.items()}
    assert sizes == {
        "prompt": VECTORS * WIDTH,
        "tall": VECTORS * (VECTORS + 1) // 2,
        "wide": WIDTH * (WIDTH + 1) // 2,
    }
    assert upload["tall"].abs().max() > 0


def test_fedbens_with_one_client_and_one_run_returns_its_mean():
    world = world_of("fedbens", prompts_per_client=1)
    shared, upload = sent_up(world)
    joined = world.method.aggregate(shared, [upload], torch.tensor([40.0]), ["client-0"])
    assert torch.allclose(joined["prompts"], upload["means"], atol=1e-6)


def test_fedbens_with_one_client_keeps_every_run_that_stands_apart():
    world = world_of("fedbens", prompts_per_client=3)
    shared, upload = sent_up(world)
    upload["means"] = upload["means"] + 10 * torch.arange(3)[:, None, None]
    joined = world.method.aggregate(shared, [upload], torch.tensor([40.0]), ["client-0"])
    assert torch.allclose(joined["prompts"], upload["means"], atol=1e-4)


def test_fedbens_runs_do_not_know_of_one_another():
    alone, three = (
        world_of("fedbens", prompts_per_client=1),
        world_of("fedbens", prompts_per_client=3),
    )
    first, second = sent_up(alone)[1], sent_up(three)[1]
    assert torch.allclose(first["means"][0], second["means"][0], atol=1e-6)
    assert torch.allclose(first["precisions"][0], second["precisions"][0], rtol=1e-3)
    assert (second["means"][0] - second["means"][1]).abs().max() > 1e-3


def test_fedbens_precisions_are_at_least_the_prior_and_bounded():
    _, upload = sent_up(world_of("fedbens", temperature=1e-9, prior=7.0))
    assert upload["precisions"].min() >= 7
    assert upload["precisions"].max() <= 1e6


def test_fedbens_predicts_the_mean_probability_of_its_modes():
    world = world_of("fedbens", prompts_per_client=3)
    shared, local = world.method.init(world.frozen)
    x = world.x[:5]
    logits = world.frozen.scale * x @ class_features(world.frozen, shared["prompts"]).mT
    expected = logits.softmax(dim=-1).mean(dim=0)
    actual = world.method.predict(world.frozen, shared, local, x).softmax(dim=-1)
    assert torch.allclose(actual, expected, atol=1e-6)


def test_fens_sends_all_prompts_once_and_only_the_network_after_it():
    _, lines = lines_of(world_of("fens", rounds=4))
    prompt = 4 * VECTORS * WIDTH
    network = 4 * (3 * CLASSES * 6 + 6 + 6 * CLASSES + CLASSES)
    of_one = [line["clients"]["client-0"] for line in lines]
    assert [round_line["bytes_up"] for round_line in of_one] == [prompt, network, network, network]
    assert [round_line["bytes_down"] for round_line in of_one] == [
        prompt,
        3 * prompt + network,
        network,
        network,
    ]


def test_fens_network_learns_on_its_proxy_rows():
    world = world_of("fens", rounds=80, server_lr=3e-2)
    _, lines = lines_of(world, Batched)
    assert lines[-1]["loss"] < 0.6 * lines[2]["loss"]
    assert lines[-1]["accuracy"] > lines[2]["accuracy"] + 0.2


def test_fens_engines_agree_while_the_network_trains():
    world = world_of("fens", rounds=5, server_lr=1e-2)
    sequential, batched = train_toy(world, "single"), train_toy(world)
    check_same(batched, sequential, 1e-4, "engines differ")
    check_same(train_toy(world, workers=2), batched, 0.0, "workers differ")


def test_fens_takes_clients_that_missed_an_exchange():
    """Some hold all prompts while others still fetch them, in the same round."""
    world = world_of("fens", rounds=6)
    state, _ = lines_of(world, Batched, fraction=0.67)
    twin, _ = lines_of(world, Sequential, fraction=0.67)
    assert len(state.shared["prompts"]) == 2
    holders = [key for key in state.shared if key.startswith(HOLDS_PREFIX)]
    assert 2 <= len(holders) <= 3
    assert tensors.max_relative_difference(state.shared, twin.shared) < 1e-4
    assert state.shared["first out bias"].abs().max() > 0


def test_fens_ignores_padded_rows_of_the_network_step():
    world = world_of("fens", rounds=2)
    state, _ = lines_of(world)
    toy_client = make_client(world, "client-0", 2)
    dirty = replace(
        toy_client,
        x=torch.cat([toy_client.x, torch.full((3, DIM), 7.0)]),
        y=torch.cat([toy_client.y, torch.full((3,), -1)]),
        val_x=torch.cat([toy_client.val_x, torch.full((2, DIM), 7.0)]),
        val_y=torch.cat([toy_client.val_y, torch.full((2,), -1)]),
    )
    sent = world.method.send(state.shared, "client-0")
    assert set(sent) == set(NETWORK)
    a, b = (world.method.update(world.frozen, sent, state.local["client-0"], c)[0] for c in (toy_client, dirty))
    assert tensors.max_relative_difference(a, b) < 1e-5


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fedlpa", {"damping": -1.0}), ("fedbens", {"prompts_per_client": 0}), ("fens", {"units": 0})],
)
def test_settings_out_of_range_are_refused(name, settings):
    with pytest.raises(SettingsError, match=rf"{name}.{next(iter(settings))} must be at least \d, got"):
        make(name, **settings)
