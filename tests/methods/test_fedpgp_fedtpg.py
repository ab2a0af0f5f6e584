"""FedPGP and FedTPG: their laws, and a second computation in float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedvlm.core import Batch, Frozen, make
from fedvlm.errors import SettingsError
from fedvlm.methods._prompts import class_features
from fedvlm.testing import check_method, toy_text_tower, toy_world, train_toy

CLASSES, DIM = 4, 16


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frozen_toy(dtype=torch.float32):
    text = normalize(draw(CLASSES, DIM, seed=3), dim=1)
    return Frozen(tuple("abcd"), DIM, 10.0, text.to(dtype), text_tower=toy_text_tower(CLASSES, DIM))


def batch_of(n=12):
    return Batch(
        normalize(draw(n, DIM, seed=1), dim=1), torch.arange(n) % CLASSES, torch.arange(n) < n - 2, draw(0, DIM)
    )


@pytest.mark.parametrize("name", ["fedpgp", "fedtpg"])
def test_the_method_keeps_the_contract(name):
    check_method(make(name, n_ctx=2, rounds=1, local_epochs=1))


def test_fedpgp_is_the_printed_loss_in_float64():
    method, frozen, batch = make("fedpgp", n_ctx=3, rank=2), frozen_toy(), batch_of()
    shared, local = method.init(frozen)
    loss = method.loss(frozen, shared, local, batch, {})
    general = class_features(frozen, shared["prompt"]).double()
    own = class_features(frozen, shared["prompt"] + local["left"] @ local["right"]).double()
    real = batch.real
    expected = cross_entropy(frozen.scale * batch.x[real].double() @ own.T, batch.y[real])
    cosine = torch.nn.CosineSimilarity(dim=1)
    pairs = torch.stack([cosine(frozen.text.double(), general), cosine(general, own)], dim=1) / 0.5
    expected = expected + cross_entropy(pairs, torch.zeros(CLASSES, dtype=torch.long))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_fedpgp_uploads_the_shared_prompt_only_and_its_local_prompt_has_the_rank():
    world = toy_world(make("fedpgp", n_ctx=4, rank=2, rounds=2, lr=0.05))
    outcome = train_toy(world)
    assert set(outcome.shared) == {"prompt"}
    first = world.method.init(world.frozen)[1]
    for local in outcome.local.values():
        assert torch.linalg.matrix_rank(local["left"] @ local["right"]) <= 2
    assert any((local["left"] - first["left"]).norm() > 0 for local in outcome.local.values())


def test_fedpgp_without_factors_and_contrast_is_promptfl():
    pgp, promptfl, frozen, batch = (
        make("fedpgp", n_ctx=3, contrast_weight=0.0),
        make("promptfl", n_ctx=3),
        frozen_toy(),
        batch_of(),
    )
    shared, local = pgp.init(frozen)
    zero = {key: torch.zeros_like(value) for key, value in local.items()}
    assert torch.allclose(pgp.loss(frozen, shared, zero, batch, {}), promptfl.loss(frozen, shared, {}, batch, {}))


class Generator(torch.nn.Module):
    """FedTPG's network out of torch's own modules."""

    def __init__(self, network, width, heads):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, heads, kdim=DIM, vdim=DIM, batch_first=True)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(size) for size in (width, DIM, width))
        self.up, self.down = torch.nn.Linear(width, 8 * width), torch.nn.Linear(4 * width, width)
        self.double()
        names = {"q_proj_weight": "query weight", "k_proj_weight": "key weight", "v_proj_weight": "value weight"}
        state = {f"attention.{key}": network[name] for key, name in names.items()}
        state["attention.in_proj_bias"] = torch.cat([network[f"{part} bias"] for part in ("query", "key", "value")])
        for field in ("weight", "bias"):
            state[f"attention.out_proj.{field}"] = network[f"output {field}"]
            state |= {f"{name}.{field}": network[f"{name} {field}"] for name in ("up", "down")}
            for i, name in enumerate(("query norm", "text norm", "output norm")):
                state[f"norms.{i}.{field}"] = network[f"{name} {field}"]
        self.load_state_dict(state)

    def forward(self, queries, text):
        texts = self.norms[1](text)[None]
        x = self.attention(self.norms[0](queries)[None], texts, texts)[0][0]
        values, gates = self.up(self.norms[2](x)).chunk(2, dim=-1)
        return x + self.down(values * torch.nn.functional.gelu(gates))


def test_fedtpg_generates_the_prompt_of_torchs_modules_in_float64():
    method, frozen = make("fedtpg"), frozen_toy(torch.float64)
    network = {
        key: value.double() + 0.1 * draw(*value.shape, seed=i)
        for i, (key, value) in enumerate(method.init(frozen)[0].items())
    }
    expected = Generator(network, network["queries"].shape[1], method.attention_heads)(network["queries"], frozen.text)
    assert torch.allclose(method.generate_prompt(network, frozen.text), expected, atol=1e-10)


def test_fedtpg_does_not_depend_on_the_order_of_classes_and_takes_any_number():
    method, frozen = make("fedtpg"), frozen_toy()
    network, local = method.init(frozen)
    assert not local
    prompt = method.generate_prompt(network, frozen.text)
    assert torch.allclose(prompt, method.generate_prompt(network, frozen.text.flip(0)), atol=1e-6)
    other = method.generate_prompt(network, normalize(draw(9, DIM, seed=8), dim=1))
    assert other.shape == prompt.shape and not torch.allclose(other, prompt, atol=1e-4)


def test_fedtpg_refuses_heads_that_do_not_divide_and_a_template():
    for settings in ({"attention_heads": 3}, {"ctx_init": "template"}):
        with pytest.raises(SettingsError, match="fedtpg"):
            make("fedtpg", **settings).init(replace(frozen_toy()))
