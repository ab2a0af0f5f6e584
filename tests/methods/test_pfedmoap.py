"""pFedMoAP: whose prompts a client gets, and the gate as a second computation in float64."""

import pytest
import torch
from torch.nn.functional import normalize

from fedvlm.core import Frozen, make
from fedvlm.errors import SettingsError
from fedvlm.methods._prompts import class_features
from fedvlm.testing import check_method, toy_text_tower, toy_world, train_toy

CLASSES, DIM = 4, 16


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frozen_toy():
    text = normalize(draw(CLASSES, DIM, seed=3), dim=1)
    return Frozen(tuple("abcd"), DIM, 10.0, text, text_tower=toy_text_tower(CLASSES, DIM))


def method_of(**settings):
    return make("pfedmoap", **{"n_ctx": 2, "gate_dim": 8, "gate_heads": 2, "experts": 3, **settings})


def test_the_method_keeps_the_contract():
    check_method(method_of(rounds=1, local_epochs=1))


def test_a_client_gets_its_own_prompt_and_the_nearest_others():
    method = method_of()
    prompts = {f"of {id}": torch.full((2, 5), value) for id, value in {"a": 0.0, "b": 1.0, "c": 5.0, "d": 2.0}.items()}
    sent = method.send({"prompt": torch.zeros(2, 5), **prompts}, "a")
    assert torch.equal(sent["prompt"], prompts["of a"])
    assert torch.equal(sent["experts"], torch.stack([prompts["of b"], prompts["of d"]]))
    assert sent["is expert"].tolist() == [1.0, 1.0]
    new = method.send({"prompt": torch.full((2, 5), 4.0), "of c": prompts["of c"]}, "new")
    assert torch.equal(new["prompt"], torch.full((2, 5), 4.0)) and new["is expert"].tolist() == [1.0, 0.0]


def test_without_experts_it_is_coop_and_a_missing_expert_does_not_count():
    method, frozen, x = method_of(), frozen_toy(), normalize(draw(6, DIM), dim=1)
    shared, local = method.init(frozen)
    sent = method.send(shared, "a")
    plain = frozen.scale * x @ class_features(frozen, sent["prompt"]).T
    assert torch.allclose(method.predict(frozen, sent, local, x), plain, atol=1e-5)
    one = {**sent, "experts": 0.1 * draw(2, *shared["prompt"].shape), "is expert": torch.tensor([1.0, 0.0])}
    other = {**one, "experts": torch.stack([one["experts"][0], torch.full_like(one["experts"][1], 3.0)])}
    assert torch.allclose(method.predict(frozen, one, local, x), method.predict(frozen, other, local, x), atol=1e-5)
    assert not torch.allclose(method.predict(frozen, one, local, x), plain, atol=1e-2)


def test_the_logits_are_those_of_a_plain_loop_in_float64():
    method, frozen, x = method_of(), frozen_toy(), normalize(draw(5, DIM), dim=1)
    shared, local = method.init(frozen)
    sent = {**method.send(shared, "a"), "experts": 0.1 * draw(2, *shared["prompt"].shape), "is expert": torch.ones(2)}
    actual = method.predict(frozen, sent, local, x)
    gate = {key: value.double() for key, value in local.items()}
    prompts = [sent["prompt"], *sent["experts"]]
    features = [class_features(frozen, prompt).double() for prompt in prompts]
    for n in range(len(x)):
        for c in range(CLASSES):
            image, experts = x[n].double(), torch.stack([part[c] for part in features])
            q = image[::2] @ gate["query weight"].T + gate["query bias"]
            k, v = (experts[:, ::2] @ gate[f"{name} weight"].T + gate[f"{name} bias"] for name in ("key", "value"))
            heads = []
            for part in (slice(0, 4), slice(4, 8)):
                attention = (method.gate_scale * k[:, part] @ q[part]).softmax(0)
                heads.append(attention @ v[:, part])
            mixed = torch.cat(heads) @ gate["output weight"].T + gate["output bias"]
            expected = frozen.scale * (method.local_weight * image @ features[0][c] + image[::2] @ mixed)
            assert actual[n, c].item() == pytest.approx(expected.item(), abs=1e-4)


def test_prompts_are_kept_by_client_and_only_they_leave():
    world = toy_world(method_of(rounds=2, lr=0.05))
    outcome = train_toy(world)
    assert {key for key in outcome.shared if key.startswith("of ")} == {f"of {id}" for id in outcome.local}
    assert all("query weight" in local and "prompt" not in local for local in outcome.local.values())


def test_heads_that_do_not_divide_the_gate_are_refused():
    with pytest.raises(SettingsError, match="gate_heads must divide"):
        method_of(gate_heads=3).init(frozen_toy())
