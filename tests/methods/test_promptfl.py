"""PromptFL and its baselines: each becomes another where its own part is taken away."""

from dataclasses import replace

import pytest
import torch
from torch.func import grad

from fedvlm import tensors
from fedvlm.core import Batch, make
from fedvlm.engines.client import make_client
from fedvlm.engines.loop import initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan, pack_state, unpack_state
from fedvlm.errors import SettingsError
from fedvlm.maths import text_tower
from fedvlm.maths.text_tower import TextTower
from fedvlm.methods import _prompts as prompt_steps
from fedvlm.methods.promptfl_fedamp import PROMPT_PREFIX
from fedvlm.storage.files import read_tensors, write_tensors
from fedvlm.testing import check_same, toy_text_tower, toy_world, train_toy

SHORT_SETTINGS = {"n_ctx": 4, "rounds": 2, "local_epochs": 1, "lr": 0.05}
LOCAL = ["coop", "promptfl-fedper", "promptfolio", "fedotp"]


def quick(name, **fields):
    if name == "promptfl-fedper":
        fields = {"local_vectors": 2, **fields}
    return make(name, **{**SHORT_SETTINGS, **fields})


def trained(name, sizes=(40, 9, 70, 33), engine="batched", **fields):
    return train_toy(toy_world(quick(name, **fields), sizes), engine)


def whole_batch(world, id="client-0"):
    toy_client = make_client(world, id, 0)
    x = tensors.to_float32(toy_client.x)
    return Batch(x, toy_client.y, torch.ones(len(toy_client.y), dtype=torch.bool), x[:0])


@pytest.mark.parametrize(
    ("name", "off"), [("promptfl-fedprox", {"mu": 0.0}), ("promptfl-fedper", {"local_vectors": 0})]
)
def test_it_is_promptfl_without_a_pull_or_without_local_vectors(name, off):
    check_same(trained(name, **off), trained("promptfl"), 0.0, "not PromptFL")


def test_promptfl_of_one_client_is_coop():
    alone = trained("promptfl", sizes=(40, 9)), trained("coop", sizes=(40, 9))
    gap = tensors.max_relative_difference(alone[0].shared, alone[1].local["client-0"])
    assert gap == 0
    assert alone[0].scores["client-0"] == alone[1].scores["client-0"]


def test_training_helps_and_coop_shares_nothing():
    world = toy_world(quick("promptfl", rounds=8))
    shared, local = world.method.init(world.frozen)
    before = world.method.loss(world.frozen, shared, local, whole_batch(world), shared)
    after = world.method.loss(world.frozen, train_toy(world).shared, local, whole_batch(world), shared)
    assert after < before - 0.1
    assert trained("coop").shared == {}


def test_fedprox_pulls_back_to_what_was_sent_and_freezes_the_client_in_the_limit():
    world = toy_world(quick("promptfl-fedprox"))
    shared, _ = world.method.init(world.frozen)
    shifted = {"prompt": shared["prompt"] + 0.3}
    batch = whole_batch(world)

    def gradient(mu):
        method = replace(world.method, mu=mu)
        return grad(lambda now: method.loss(world.frozen, now, {}, batch, shared))(shifted)["prompt"]

    pull = gradient(2.0) - gradient(0.0)
    assert torch.allclose(pull, 2.0 * (shifted["prompt"] - shared["prompt"]), atol=1e-5)

    moved = []
    for mu in (0.0, 3.0, 1e3, 1e6):
        method = replace(world.method, mu=mu, lr=min(0.05, 0.5 / max(mu, 1)))
        upload, _ = method.update(world.frozen, shared, {}, make_client(world, "client-0", 0))
        moved.append((upload["prompt"] - shared["prompt"]).norm().item())
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 1e-4 * moved[0]


def test_fine_tuning_leaves_promptfl_shared_and_gives_every_client_its_own():
    tuned, plain = trained("promptfl-ft"), trained("promptfl")
    assert tensors.max_relative_difference(tuned.shared, plain.shared) == 0
    offsets = [tuned.local[id]["offset"] for id in ("client-0", "client-1", "client-2")]
    assert all(offset.abs().max() > 1e-4 for offset in offsets)
    assert not torch.allclose(offsets[0], offsets[1])
    assert tuned.scores["client-3"] == plain.scores["client-3"]  # unseen: nothing to tune on


def test_fedamp_draws_a_client_to_its_cloud_with_a_gradient():
    world = toy_world(quick("promptfl-fedamp", alpha=0.2, prox_weight=0.1))
    cloud, local = world.method.init(world.frozen)
    shifted = {"prompt": cloud["prompt"] + 0.3}
    batch = whole_batch(world)

    def gradient(pull):
        method = replace(world.method, prox_weight=pull)
        return grad(lambda now: method.loss(world.frozen, now, local, batch, cloud))(shifted)["prompt"]

    pull = gradient(0.1) - gradient(0.0)
    assert torch.allclose(pull, 0.5 * (shifted["prompt"] - cloud["prompt"]), atol=1e-5)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_fedamp_weights_fall_with_distance_and_stay_within_one(alpha):
    method = quick("promptfl-fedamp", alpha=alpha)
    prompt = torch.zeros(4, 8)
    other_prompts = [prompt + step for step in (0.0, 0.05, 0.2)]
    weights = method.cloud_weights(prompt, other_prompts)
    assert (weights >= 0).all() and weights.sum() <= 1 + 1e-12
    assert weights[0] > weights[1] > weights[2]
    held = {
        PROMPT_PREFIX + str(i): held_prompt for i, held_prompt in enumerate([prompt + 1.0, prompt + 1.1, prompt + 3.0])
    }
    cloud = method.send({"prompt": prompt, **held}, "0")["prompt"]
    assert (cloud >= 1).all() and (cloud <= 1.1 + 1e-6).all()  # towards the near one, not beyond
    assert (cloud > 1).all()
    assert torch.equal(method.send({"prompt": prompt, **held}, "a stranger")["prompt"], prompt)


def test_fedamp_sends_every_client_its_own_prompt_and_strangers_the_mean():
    outcome = trained("promptfl-fedamp", sigma=0.1)
    method = quick("promptfl-fedamp", sigma=0.1)
    sent = [method.send(outcome.shared, id)["prompt"] for id in ("client-0", "client-2", "new")]
    assert not torch.allclose(sent[0], sent[1])
    held = [held_prompt for key, held_prompt in outcome.shared.items() if key.startswith(PROMPT_PREFIX)]
    assert torch.allclose(sent[2], torch.stack(held).mean(0), atol=1e-6)


def test_promptfolio_mixes_between_promptfl_and_a_local_prompt():
    world = toy_world(quick("promptfolio", mix=0.0))
    shared, local = world.method.init(world.frozen)
    x = world.x[:6]
    common = make("promptfl").predict(world.frozen, shared, {}, x)
    local_logits = make("promptfl").predict(world.frozen, {"prompt": local["local prompt"]}, {}, x)
    for mix in (0.0, 0.4, 1.0):
        actual = replace(world.method, mix=mix).predict(world.frozen, shared, local, x)
        assert torch.allclose(actual, (1 - mix) * common + mix * local_logits, atol=1e-5)


@pytest.mark.parametrize("name", LOCAL)
def test_local_prompts_differ_between_clients_and_survive_a_resume(name, tmp_path):
    world = toy_world(quick(name))
    plan = Plan(("client-0", "client-1", "client-2"), ())
    engine = Sequential(world)
    state, initial_local = initial_state(world)
    half_world = replace(world, method=replace(world.method, rounds=1))
    write = tmp_path / "half.safetensors"
    first = run_rounds(half_world, engine, plan, state, initial_local, lambda state, line: None)
    write_tensors(write, *pack_state(first))
    resumed = run_rounds(
        world, engine, plan, unpack_state(*read_tensors(write)), initial_local, lambda state, line: None
    )
    straight = run_rounds(world, engine, plan, state, initial_local, lambda state, line: None)
    prompts = []
    for id in plan.train:
        assert tensors.max_relative_difference(resumed.local[id], straight.local[id]) == 0
        assert tensors.max_relative_difference(first.local[id], straight.local[id]) > 0
        prompts.append(tensors.flatten(straight.local[id]))
    assert not torch.allclose(prompts[0], prompts[1])
    assert not torch.allclose(prompts[0], prompts[2])


@pytest.mark.parametrize(
    ("name", "fields", "count"),
    [
        ("coop", {"n_ctx": 16}, 0),
        ("promptfl", {"n_ctx": 16}, 32_768),
        ("promptfl", {"n_ctx": 4}, 8_192),
        ("promptfl-ft", {"n_ctx": 16}, 32_768),
        ("promptfl-fedprox", {"n_ctx": 16}, 32_768),
        ("promptfl-fedper", {"n_ctx": 16, "local_vectors": 8}, 16_384),
        ("promptfl-fedamp", {"n_ctx": 16}, 32_768),
        ("promptfolio", {"n_ctx": 8}, 16_384),
        ("fedotp", {"n_ctx": 16}, 32_768),
    ],
)
def test_bytes_up_and_down_are_those_of_the_shared_prompt_alone(name, fields, count):
    world = toy_world(quick(name, batch_size=64, **fields))
    world = replace(world, frozen=replace(world.frozen, text_tower=toy_text_tower(4, 16, width=512)))
    lines = []
    state, initial_local = initial_state(world)
    plan = Plan(("client-0", "client-1"), ())
    run_rounds(world, Sequential(world), plan, state, initial_local, lambda state, line: lines.append(line))
    assert [len(line["clients"]) for line in lines] == [2] * world.method.rounds
    for line in lines:
        for client_line in line["clients"].values():
            assert client_line["bytes_up"] == client_line["bytes_down"] == count


def test_clients_trained_in_groups_are_trained_as_alone(monkeypatch):
    stacked_result = trained("fedotp")
    monkeypatch.setattr(prompt_steps, "NUMBERS_PER_CHUNK", 1)  # one client after the other
    check_same(trained("fedotp"), stacked_result, 1e-5, "groups matter")


def test_a_prompt_is_encoded_once_however_often_it_is_measured(monkeypatch):
    world = toy_world(quick("promptfl"))
    shared, _ = world.method.init(world.frozen)
    tower, count = world.frozen.text_tower, []
    plain = TextTower.encode
    monkeypatch.setattr(TextTower, "encode", lambda *it: count.append(1) or plain(*it))
    for rows in (world.x[:5], world.x[5:9]):
        world.method.predict(world.frozen, {"prompt": shared["prompt"].clone()}, {}, rows)
    assert len(count) == 1
    tower(shared["prompt"] + 1)
    assert len(count) == 2
    tower(shared["prompt"].clone().requires_grad_()).sum().backward()  # training is not remembered
    grad(lambda prompt: tower(prompt).sum())(shared["prompt"])
    assert len(count) == 4
    for number in range(100):
        tower(shared["prompt"] + number)
    assert len(tower.cache) <= 32


def test_what_a_tower_remembers_of_many_images_prompts_is_bounded(monkeypatch):
    tower = toy_text_tower(4, 16)
    monkeypatch.setattr(text_tower, "MAX_CACHE_BYTES", 10_000)
    for number in range(40):
        tower(torch.full((20, 2, 8), float(number)))  # as CoCoOp asks: a prompt for every image
        assert sum(features.nbytes for features in tower.cache.values()) <= 10_000
    assert tower.cache
    tower(torch.zeros(500, 2, 8))
    assert len(tower.cache) == 1  # more than there is room for stands alone


@pytest.mark.parametrize("name", ["promptfl", "fedotp", "promptfl-fedper", "promptfolio"])
@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (0, "n_ctx must be between 1 and 1000, got 0"),
        (21, "reads 24 tokens and the class 'bee' takes 3 of them, which leaves room for 20"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(name, vectors, message):
    with pytest.raises(SettingsError, match=message):
        initial_state(toy_world(quick(name, n_ctx=vectors)))


def test_a_class_name_that_fills_the_tower_is_named():
    world = toy_world(quick("promptfl", n_ctx=1))
    tower = replace(
        world.frozen.text_tower,
        suffixes=torch.zeros(4, 24, 8),
        ends=torch.tensor([1, 1, 22, 1]),
    )
    world = replace(world, frozen=replace(world.frozen, text_tower=tower))
    with pytest.raises(SettingsError, match=r"'cat' takes 23 of them, which leaves room for 0"):
        initial_state(world)


def test_settings_that_cannot_be_meant_are_refused():
    for name, fields, message in [
        (
            "promptfl-fedper",
            {"local_vectors": 16},
            r"\(with n_ctx = 16\) must be between 0 and 15, got 16",
        ),
        ("promptfl-fedamp", {"alpha": 0.0}, "alpha must be above 0, got 0.0"),
        ("promptfolio", {"mix": 1.5}, "mix must be between 0 and 1, got 1.5"),
    ]:
        with pytest.raises(SettingsError, match=message):
            make(name, **fields)
