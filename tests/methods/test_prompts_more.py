"""CoCoOp, pFedPrompt-style and FedOT over a prompt: where each of them is PromptFL, and is not."""

from dataclasses import replace

import pytest
import torch

from fedvlm import tensors
from fedvlm.core import make
from fedvlm.engines.client import make_client
from fedvlm.methods import cocoop
from fedvlm.testing import check_method, check_same, toy_text_tower, toy_world, train_toy

FORMS = ("server-coop", "random-meta", "all-global")
SHORT_SETTINGS = {"n_ctx": 4, "rounds": 2}


def start(name, **fields):
    method = make(name, **{**SHORT_SETTINGS, **fields})
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
        {key: value if key == "prompt" else torch.zeros_like(value) for key, value in state.items()}
        for state in (shared, local)
    )
    actual = method.predict(world.frozen, shared, local, world.x)
    torch.testing.assert_close(actual, promptfl(world, shared["prompt"], world.x))


def test_a_newcomer_to_server_coop_uses_the_bare_prompt_and_others_do_not():
    method, world, shared, local = start("cocoop")
    bare = promptfl(world, shared["prompt"], world.x)
    torch.testing.assert_close(method.predict(world.frozen, shared, local, world.x), bare)
    for form in FORMS[1:]:
        method, world, shared, local = start("cocoop", form=form)
        assert not torch.allclose(method.predict(world.frozen, shared, local, world.x), bare)


def test_a_silent_network_still_learns():
    method, world, shared, local = start("cocoop", lr=0.1)
    _, new_local = method.update(world.frozen, shared, local, make_client(world, "client-0", 0))
    assert all(not torch.equal(new_local[key], local[key]) for key in local)


def test_cocoop_gives_each_picture_the_prompt_its_own_embedding_asks_for(monkeypatch):
    """Also when the rows are split, to save memory, into pieces that do not divide them."""
    method, world, shared, local = start("cocoop", form="random-meta")
    x = world.x[:7]
    all_logits = method.predict(world.frozen, shared, local, x)
    hidden = (x @ local["down"].mT + local["down bias"]).relu()
    bend = hidden @ local["up"].mT + local["up bias"]
    for row, by, logits in zip(x, bend, all_logits, strict=True):
        expected = promptfl(world, shared["prompt"] + by, row[None])[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(cocoop, "MAX_TOKENS", 3 * (1 + 4 + 4 * 3))
    torch.testing.assert_close(method.predict(world.frozen, shared, local, x), all_logits)


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
    actual = method.predict(world.frozen, shared, local, world.x)
    torch.testing.assert_close(actual, promptfl(world, shared["prompt"], world.x))


def test_fedot_over_a_prompt_is_fedot_with_the_towers_head():
    method, world, shared, local = start("fedot-prompt", blocks=2, lr=0.05)
    upload, new_local = method.update(world.frozen, shared, local, make_client(world, "client-0", 0))
    assert set(upload) == {"prompt"}
    head = {"head": world.frozen.text_tower(upload["prompt"])}
    expected = make("fedot", tau=20.0).predict(world.frozen, head, new_local, world.x)
    torch.testing.assert_close(method.predict(world.frozen, upload, new_local, world.x), expected)
    description = method.describe(world.frozen, upload, new_local)
    assert description["orthogonality error"] < 1e-5
    assert description["blocks"] == 2
    assert not torch.equal(new_local["skew"], local["skew"])


def test_pfedprompt_learns_the_prompt_promptfl_learns():
    """The cache comes after the last round: what is averaged is the same."""
    cached_outcome, theirs = (train_toy(toy_world(make(name, **SHORT_SETTINGS))) for name in ("pfedprompt", "promptfl"))
    torch.testing.assert_close(cached_outcome.shared["prompt"], theirs.shared["prompt"], rtol=0, atol=0)


def test_pfedprompt_without_weight_is_promptfl():
    method, world, shared, local = start("pfedprompt")
    cache = method.adapt(world.frozen, shared, local, make_client(world, "client-0", 0))
    cache["weight"] = torch.tensor(0.0)
    actual = method.predict(world.frozen, shared, cache, world.x)
    torch.testing.assert_close(actual, promptfl(world, shared["prompt"], world.x))


def test_the_cache_holds_the_clients_rows_and_helps_on_its_validation_rows():
    method, world, shared, local = start("pfedprompt")
    toy_client = make_client(world, "client-2", 0)
    cache = method.adapt(world.frozen, shared, local, toy_client)
    torch.testing.assert_close(cache["features"], toy_client.x)
    assert torch.equal(cache["labels"], toy_client.y)
    assert cache["weight"] > 0

    def loss(held):
        logits = method.predict(world.frozen, shared, held, toy_client.val_x)
        return torch.nn.functional.cross_entropy(logits, toy_client.val_y)

    assert loss(cache) < loss(local)
    outcome = train_toy(world)
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
    expected = promptfl(world, shared["prompt"], x)
    for row in range(3):
        for feature, label in zip(cache["features"], cache["labels"], strict=True):
            expected[row, label] += 2.5 * torch.exp(-3.0 * (1 - x[row] @ feature))
    torch.testing.assert_close(method.predict(world.frozen, shared, cache, x), expected)


def test_without_validation_rows_a_row_does_not_vote_for_itself():
    """Copies of one feature under labels that differ: whoever counts itself would be certain."""
    method, world, shared, local = start("pfedprompt")
    toy_client = make_client(world, "client-0", 0)
    same = toy_client.x[:1].expand(4, -1)
    toy_client = replace(toy_client, x=same, y=torch.arange(4), val_x=toy_client.x[:0], val_y=toy_client.y[:0])
    assert method.adapt(world.frozen, shared, local, toy_client)["weight"] == 0
    other_client = replace(toy_client, x=make_client(world, "client-2", 0).x, y=make_client(world, "client-2", 0).y)
    assert method.adapt(world.frozen, shared, local, other_client)["weight"] > 0


def test_rows_that_are_padding_are_not_kept():
    method, world, shared, local = start("pfedprompt")
    toy_client = make_client(world, "client-0", 0)
    y = torch.where(torch.arange(len(toy_client.y)) < 30, toy_client.y, -1)
    cache = method.adapt(world.frozen, shared, local, replace(toy_client, y=y))
    assert cache["features"].shape == (30, 16)


def test_a_cache_of_another_size_is_the_same_for_any_number_of_workers():
    world = toy_world(make("pfedprompt", **SHORT_SETTINGS))
    check_same(train_toy(world, workers=2), train_toy(world, "single"), 1e-5, "engines differ")
