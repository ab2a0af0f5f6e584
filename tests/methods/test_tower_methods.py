"""Laws of the methods that train the image tower: FedAvg, FedProx, MOON, LoRA and VPT."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from fedvlm import parts, tensors
from fedvlm.core import Frozen, make
from fedvlm.engines.client import make_client
from fedvlm.engines.loop import initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan
from fedvlm.errors import SettingsError
from fedvlm.maths.image_tower import ImageTower
from fedvlm.methods.fedavg import FedAvg
from fedvlm.methods.moon_tower import flatten_change, restore_weights
from fedvlm.testing import make_test_client, toy_world, train_toy

SIZES = (12, 5, 9)
SHORT_SETTINGS = {"rounds": 2, "batch_size": 8}


def world_of(name, **settings):
    return toy_world(make(name, **SHORT_SETTINGS, **settings), sizes=SIZES)


def trained(name, **settings):
    return train_toy(world_of(name, **settings), "single")


def updated(world, local=None):
    shared, initial_local = world.method.init(world.frozen)
    local = initial_local if local is None else local
    return world.method.update(world.frozen, shared, local, make_client(world, "client-0", 0))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def batch_of(world):
    return parts.minibatch(make_client(world, "client-0", 0), 0)


def gradients(world, shared, local, batch, sent):
    def objective(weights):
        return world.method.loss(world.frozen, weights, local, batch, sent)

    return torch.func.grad(objective)(shared)


@pytest.fixture(scope="module")
def averaged():
    return trained("fedavg-tower")


@pytest.mark.parametrize("name", ["fedprox-tower", "moon-tower"])
def test_without_mu_it_is_fedavg(name, averaged):
    assert same(trained(name, mu=0.0).shared, averaged.shared)
    assert not same(trained(name).shared, averaged.shared)


def test_the_pull_of_fedprox_has_the_gradient_of_a_square():
    world = world_of("fedprox-tower", mu=3.0)
    sent, _ = world.method.init(world.frozen)
    draw = torch.Generator().manual_seed(0)
    shared = {k: v + 0.1 * torch.randn(v.shape, generator=draw) for k, v in sent.items()}
    batch = batch_of(world)
    pulled = gradients(world, shared, {}, batch, sent)
    plain = gradients(replace(world, method=replace(world.method, mu=0.0)), shared, {}, batch, sent)
    for key, value in shared.items():
        assert torch.allclose(pulled[key] - plain[key], 3.0 * (value - sent[key]), atol=1e-4)


def test_a_huge_mu_of_fedprox_freezes_the_tower():
    """Adam's steps have a length of their own, so frozen is within some steps of the start."""

    def way(mu):
        world = world_of("fedprox-tower", mu=mu, lr=1e-3, local_epochs=12, weight_decay=0.0)
        upload, _ = updated(world)
        return tensors.flatten(upload) - tensors.flatten(world.method.init(world.frozen)[0])

    free, held = way(0.0), way(1e6)
    assert held.norm() < 0.1 * free.norm()
    assert held.abs().max() < 5e-3


def test_moons_contrast_is_the_papers():
    world = world_of("moon-tower", mu=2.0, temperature=0.4)
    method, frozen, tower = world.method, world.frozen, world.frozen.image_tower
    sent, initial_local = method.init(frozen)
    draw = torch.Generator().manual_seed(0)
    shared = {k: v + 0.1 * torch.randn(v.shape, generator=draw) for k, v in sent.items()}
    older = {k: v + 0.1 * torch.randn(v.shape, generator=draw) for k, v in sent.items()}
    batch = batch_of(world)
    batch = batch._replace(real=torch.arange(8) < 5)
    z, shared_features, previous_features = (normalize(tower(w, batch.x), dim=1) for w in (shared, sent, older))
    a, b = ((z * shared_features).sum(1) / 0.4).exp(), ((z * previous_features).sum(1) / 0.4).exp()
    expected = -(a / (a + b)).log()[:5].mean()
    local = {"previous": flatten_change(frozen, older)}
    loss = method.loss(frozen, shared, local, batch, sent)
    plain = replace(method, mu=0.0).loss(frozen, shared, local, batch, sent)
    assert (loss - plain).item() == pytest.approx(2.0 * expected.item(), abs=2e-3)
    # before a client's first round its older model is the one it was sent, and nothing pulls
    first = gradients(world, shared, initial_local, batch, sent)
    none = gradients(replace(world, method=replace(method, mu=0.0)), shared, initial_local, batch, sent)
    assert all(torch.allclose(first[key], none[key], atol=1e-6) for key in shared)


def test_moon_keeps_the_older_model_at_home_in_half_the_bytes():
    world = world_of("moon-tower", lr=1e-3)
    upload, local = updated(world)
    assert set(local) == {"previous"} and not set(local) & set(upload)
    assert 2 * tensors.count_bytes(local) == tensors.count_bytes(upload)
    back = restore_weights(world.frozen, upload, local["previous"])
    assert all(torch.allclose(back[key], upload[key], rtol=0, atol=2e-6) for key in upload)


@pytest.mark.parametrize("average", ["factors", "products"])
def test_lora_begins_as_zero_shot_and_of_rank_0_remains_it(average):
    frozen_world = world_of("lora", rank=0, average=average)
    outcome = train_toy(frozen_world, "single")
    assert outcome.shared == {}
    frozen, x = frozen_world.frozen, frozen_world.x[:6]
    zero_shot = frozen.scale * normalize(frozen.image_tower({}, x), dim=1) @ frozen.text.mT
    assert torch.equal(frozen_world.method.predict(frozen, {}, {}, x), zero_shot)
    world = world_of("lora", average=average)
    shared, _ = world.method.init(frozen)
    assert torch.equal(world.method.predict(frozen, shared, {}, x), zero_shot)
    learnt = trained("lora", average=average, lr=1e-2).shared
    assert not torch.allclose(world.method.predict(frozen, learnt, {}, x), zero_shot, atol=1e-2)


def test_lora_averages_products_exactly_and_factors_do_not():
    world = world_of("lora", average="products", lr=1e-2)
    method, frozen = world.method, world.frozen
    shared, _ = method.init(frozen)
    shared = {"change": 0.01 * torch.ones_like(shared["change"])}
    uploads = [method.update(frozen, shared, {}, make_client(world, id, 0))[0] for id in ("client-0", "client-1")]
    after = method.aggregate(shared, uploads, torch.tensor([1.0, 3.0]), ["client-0", "client-1"])
    keys = sorted(frozen.image_tower.matrices(method.targets))
    assert tensors.count_bytes(uploads[0]) < tensors.count_bytes(shared)

    def change(upload):
        return torch.cat([(upload[f"{k} B"] @ upload[f"{k} A"]).flatten() for k in keys])

    expected = 0.01 + 0.25 * change(uploads[0]) + 0.75 * change(uploads[1])
    assert torch.allclose(after["change"], expected, atol=1e-7)
    mixed = parts.mean(method, uploads[0], uploads, torch.tensor([1.0, 3.0]), [])
    assert not torch.allclose(0.01 + change(mixed), expected, atol=1e-5)


def vit_b_32() -> Frozen:
    """The shapes of the real one, without its numbers."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    with torch.device("meta"):
        model = CLIPVisionModelWithProjection(CLIPVisionConfig())
    tower = ImageTower(model, lambda pixels: pixels)
    return Frozen(("a",), 512, 100.0, None, image_tower=tower)


def test_lora_counts_its_parameters():
    """With a text tower of the same depth and width 512 they are the 829,440 of both towers."""
    frozen = vit_b_32()
    description = make("lora").describe(frozen, {}, {})
    assert description["trained parameters"] == 12 * 3 * (4 * (768 + 768) + 2 * (768 + 3072)) == 497_664
    assert 497_664 + 12 * 3 * (4 * (512 + 512) + 2 * (512 + 2048)) == 829_440
    assert description["share of the tower"] == pytest.approx(497_664 / 87_849_216)
    attention = make("lora", targets=["q", "v"], rank=2).describe(frozen, {}, {})
    assert attention["trained parameters"] == 12 * 2 * 2 * (768 + 768)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": -1}, "lora.rank must be at least 0, got -1"),
        ({"targets": ()}, "lora.targets must name at least one of q, k, v, out, up, down"),
    ],
)
def test_lora_refuses_what_is_no_rank_or_target(settings, message):
    with pytest.raises(SettingsError, match=message):
        world_of("lora", **settings).method.init(vit_b_32())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 3}, "vpt.depth must be between 1 and 2, got 3"),
        ({"depth": 0}, "vpt.depth must be at least 1, got 0"),
        ({"prompts": -1}, "vpt.prompts must be at least 0, got -1"),
    ],
)
def test_vpt_refuses_what_the_tower_has_not(settings, message):
    with pytest.raises(SettingsError, match=message):
        trained("vpt", **settings)


def test_vpt_without_prompts_is_a_head_on_the_encoders_features():
    world = world_of("vpt", prompts=0, tau=20.0, lr=1e-2)
    shared, local = world.method.init(world.frozen)
    assert local == {} and torch.equal(shared["head"], world.frozen.text)
    toy_client = make_client(world, "client-0", 0)
    unit = normalize(world.frozen.image_tower({}, toy_client.x), dim=1)
    held = normalize(world.frozen.image_tower({}, toy_client.val_x), dim=1)
    plain = FedAvg(lr=1e-2, momentum=5e-4, weight_decay=5e-4)
    alone = make_test_client(unit, toy_client.y, toy_client.order, held, toy_client.val_y)
    expected, _ = parts.sgd(plain, replace(world.frozen, scale=20.0), shared, {}, alone)
    upload, _ = updated(world)
    assert torch.allclose(upload["head"], expected["head"], atol=1e-6)
    assert not torch.allclose(upload["head"], shared["head"], atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
def test_vpt_trains_its_prompts_at_home(depth):
    world = world_of("vpt", depth=depth, lr=1e-2)
    _, initial_local = world.method.init(world.frozen)
    assert initial_local["prompts"].shape == (depth, 2, 8)
    upload, local = updated(world)
    assert set(upload) == {"head"} and set(local) == {"prompts"}
    assert ((local["prompts"] - initial_local["prompts"]).abs().sum(dim=2) > 0).all()


def test_only_the_last_blocks_are_sent():
    world = world_of("fedavg-tower", blocks=1)
    upload, _ = updated(world)
    assert set(upload) == set(world.frozen.image_tower.last(1)) < set(world.frozen.image_tower.weights)
    with pytest.raises(SettingsError, match="blocks must be between 0 and 2, got 9"):
        trained("fedavg-tower", blocks=9)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg-tower", {}),
        ("fedavg-tower", {"blocks": 1}),
        ("fedprox-tower", {}),
        ("moon-tower", {}),
        ("lora", {}),
        ("lora", {"average": "products"}),
        ("vpt", {}),
    ],
    ids=str,
)
def test_bytes_are_four_for_every_parameter(name, settings):
    world = world_of(name, **settings)
    world = replace(world, method=replace(world.method, rounds=1))
    lines = []
    state, initial_local = initial_state(world)
    plan = Plan(tuple(world.members), ())
    run_rounds(world, Sequential(world), plan, state, initial_local, lambda state, line: lines.append(line))
    client_lines = lines[0]["clients"].values()
    shared, local = world.method.init(world.frozen)
    n_parameters = world.method.describe(world.frozen, shared, local)["trained parameters"]
    at_home = sum(value.numel() for value in local.values()) if name == "vpt" else 0
    assert {client_line["bytes_up"] for client_line in client_lines} == {4 * (n_parameters - at_home)}
    down = tensors.count_bytes(shared)
    assert {client_line["bytes_down"] for client_line in client_lines} == {down}
    assert (down > 4 * n_parameters) == (settings == {"average": "products"})
