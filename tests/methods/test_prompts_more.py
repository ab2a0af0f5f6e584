"""CoCoOp, pFedPrompt-style and FedOT over a prompt: where each of them is PromptFL, and is not."""

from dataclasses import replace

import pytest
import torch

from fedvlm import tensors
from fedvlm.core import make
from fedvlm.engines.client import client
from fedvlm.methods import cocoop
from fedvlm.testing import check_method, check_same, learn, toy_text_tower, toy_world

FORMS = ("server-coop", "random-meta", "all-global")
FEW = {"n_ctx": 4, "rounds": 2}


def start(name, **fields):
    method = make(name, **{**FEW, **fields})
    world = toy_world(method)
    return method, world, *method.init(world.frozen)


def promptfl(world, prompt, x):
    return make("promptfl").predict(world.frozen, {"prompt": prompt}, {}, x)


@pytest.mark.parametrize("form", FORMS[1:])  # the first is in the contract of all methods
def test_each_form_of_cocoop_keeps_the_contract(form):
    check_method(make("cocoop", form=form, batch_size=32))


@pytest.mark.parametrize("form", FORMS)
def test_cocoop_with_a_zero_network_is_promptfl(form):
    method, world, shared, local = start("cocoop", form=form)
    shared, local = (
        {key: value if key == "prompt" else torch.zeros_like(value) for key, value in one.items()}
        for one in (shared, local)
    )
    found = method.predict(world.frozen, shared, local, world.x)
    torch.testing.assert_close(found, promptfl(world, shared["prompt"], world.x))


def test_a_newcomer_to_server_coop_uses_the_bare_prompt_and_others_do_not():
    method, world, shared, local = start("cocoop")
    bare = promptfl(world, shared["prompt"], world.x)
    torch.testing.assert_close(method.predict(world.frozen, shared, local, world.x), bare)
    for form in FORMS[1:]:
        method, world, shared, local = start("cocoop", form=form)
        assert not torch.allclose(method.predict(world.frozen, shared, local, world.x), bare)


def test_a_silent_network_still_learns():
    method, world, shared, local = start("cocoop", lr=0.1)
    _, own = method.update(world.frozen, shared, local, client(world, "client-0", 0))
    assert all(not torch.equal(own[key], local[key]) for key in local)


def test_cocoop_gives_each_picture_the_prompt_its_own_embedding_asks_for(monkeypatch):
    """Also when the rows are split, to save memory, into pieces that do not divide them."""
    method, world, shared, local = start("cocoop", form="random-meta")
    x = world.x[:7]
    whole = method.predict(world.frozen, shared, local, x)
    hidden = (x @ local["down"].mT + local["down bias"]).relu()
    bend = hidden @ local["up"].mT + local["up bias"]
    for row, by, logits in zip(x, bend, whole, strict=True):
        wanted = promptfl(world, shared["prompt"] + by, row[None])[0]
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(cocoop, "TOKENS", 3 * (1 + 4 + 4 * 3))
    torch.testing.assert_close(method.predict(world.frozen, shared, local, x), whole)


@pytest.mark.parametrize(("form", "size"), [("server-coop", 8_192), ("all-global", 141_440)])
def test_cocoop_sends_the_bytes_of_its_form_at_clips_width(form, size):
    method = make("cocoop", form=form)
    world = toy_world(method, sizes=(3, 3), dim=512)
    frozen = replace(world.frozen, text_tower=toy_text_tower(4, 512, width=512))
    shared, local = method.init(frozen)
    assert tensors.count_bytes(shared) == size
    assert tensors.count_bytes({**shared, **local}) == 141_440


def test_fedot_over_a_prompt_starts_as_promptfl():
    method, world, shared, local = start("fedot-prompt")
    found = method.predict(world.frozen, shared, local, world.x)
    torch.testing.assert_close(found, promptfl(world, shared["prompt"], world.x))


def test_fedot_over_a_prompt_is_fedot_with_the_towers_head():
    method, world, shared, local = start("fedot-prompt", blocks=2, lr=0.05)
    upload, own = method.update(world.frozen, shared, local, client(world, "client-0", 0))
    assert set(upload) == {"prompt"}
    head = {"head": world.frozen.text_tower(upload["prompt"])}
    wanted = make("fedot", tau=20.0).predict(world.frozen, head, own, world.x)
    torch.testing.assert_close(method.predict(world.frozen, upload, own, world.x), wanted)
    told = method.describe(world.frozen, upload, own)
    assert told["orthogonality error"] < 1e-5
    assert told["blocks"] == 2
    assert not torch.equal(own["skew"], local["skew"])


def test_pfedprompt_learns_the_prompt_promptfl_learns():
    """The cache comes after the last round: what is averaged is the same."""
    ours, theirs = (learn(toy_world(make(name, **FEW))) for name in ("pfedprompt", "promptfl"))
    torch.testing.assert_close(ours.shared["prompt"], theirs.shared["prompt"], rtol=0, atol=0)


def test_pfedprompt_without_weight_is_promptfl():
    method, world, shared, local = start("pfedprompt")
    cache = method.adapt(world.frozen, shared, local, client(world, "client-0", 0))
    cache["weight"] = torch.tensor(0.0)
    found = method.predict(world.frozen, shared, cache, world.x)
    torch.testing.assert_close(found, promptfl(world, shared["prompt"], world.x))


def test_the_cache_holds_the_clients_rows_and_helps_on_its_validation_rows():
    method, world, shared, local = start("pfedprompt")
    one = client(world, "client-2", 0)
    cache = method.adapt(world.frozen, shared, local, one)
    torch.testing.assert_close(cache["features"], one.x)
    assert torch.equal(cache["labels"], one.y)
    assert cache["weight"] > 0

    def loss(held):
        logits = method.predict(world.frozen, shared, held, one.held_x)
        return torch.nn.functional.cross_entropy(logits, one.held_y)

    assert loss(cache) < loss(local)
    outcome = learn(world)
    assert outcome.local["client-2"]["features"].shape == (70, 16)


def test_votes_follow_the_formula():
    method, world, shared, _ = start("pfedprompt")
    cache = {
        "features": world.x[:9],
        "labels": world.y[:9],
        "weight": torch.tensor(2.5),
        "sharpness": torch.tensor(3.0),
    }
    x = world.x[20:23]
    wanted = promptfl(world, shared["prompt"], x)
    for row in range(3):
        for feature, label in zip(cache["features"], cache["labels"], strict=True):
            wanted[row, label] += 2.5 * torch.exp(-3.0 * (1 - x[row] @ feature))
    torch.testing.assert_close(method.predict(world.frozen, shared, cache, x), wanted)


def test_without_validation_rows_a_row_does_not_vote_for_itself():
    """Copies of one feature under labels that differ: whoever counts itself would be certain."""
    method, world, shared, local = start("pfedprompt")
    one = client(world, "client-0", 0)
    same = one.x[:1].expand(4, -1)
    one = replace(one, x=same, y=torch.arange(4), held_x=one.x[:0], held_y=one.y[:0])
    assert method.adapt(world.frozen, shared, local, one)["weight"] == 0
    told = replace(one, x=client(world, "client-2", 0).x, y=client(world, "client-2", 0).y)
    assert method.adapt(world.frozen, shared, local, told)["weight"] > 0


def test_rows_that_are_padding_are_not_kept():
    method, world, shared, local = start("pfedprompt")
    one = client(world, "client-0", 0)
    y = torch.where(torch.arange(len(one.y)) < 30, one.y, -1)
    cache = method.adapt(world.frozen, shared, local, replace(one, y=y))
    assert cache["features"].shape == (30, 16)


def test_a_cache_of_another_size_is_the_same_for_any_number_of_workers():
    world = toy_world(make("pfedprompt", **FEW))
    check_same(learn(world, workers=2), learn(world, "single"), 1e-5, "engines differ")
