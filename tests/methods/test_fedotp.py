"""FedOTP: what its logits and gradients are, who holds which prompt, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch.func import grad

import fedvlm
from fedvlm import tensors
from fedvlm.core import make
from fedvlm.engines.loop import participants, start, train
from fedvlm.engines.single import Single
from fedvlm.engines.state import Plan
from fedvlm.errors import DataError, SettingsError
from fedvlm.maths.transport import plan
from fedvlm.testing import check_method, learn, toy_text_tower, toy_world

FEW = {"n_ctx": 4, "rounds": 2, "local_epochs": 1, "lr": 0.05}
KINDS = ["unbalanced", "classical", "averaging"]


def begin(**fields):
    world = toy_world(make("fedotp", **{**FEW, **fields}))
    return world, *world.method.init(world.frozen)


@pytest.mark.parametrize("kind", KINDS[1:])  # the first is in the contract of all methods
def test_every_transport_keeps_the_contract(kind):
    check_method(make("fedotp", transport=kind, **FEW))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_scaled_sum_of_plan_times_cosine(kind):
    world, shared, local = begin(transport=kind, entropy_reg=0.05)
    x = tensors.full(world.x[:3])
    found = world.method.predict(world.frozen, shared, local, x)
    unit = torch.nn.functional.normalize
    text = [world.frozen.text_tower(one) for one in (shared["prompt"], local["own"])]
    for row in range(3):
        for one in range(4):
            cosine = torch.stack([unit(x[row], dim=1) @ part[one] for part in text])  # (2, patches)
            wanted = 20.0 * (plan(cosine, kind, 0.8, 0.05) * cosine).sum()
            assert found[row, one] == pytest.approx(wanted.item(), abs=1e-4)


def test_averaging_is_the_mean_cosine_and_equal_prompts_are_one_prompt():
    world, shared, _ = begin(transport="averaging")
    x = tensors.full(world.x[:5])
    both = world.method.predict(world.frozen, shared, {"own": shared["prompt"]}, x)
    mean = torch.nn.functional.normalize(x, dim=-1).mean(dim=1)
    assert torch.allclose(
        both, 20.0 * mean @ world.frozen.text_tower(shared["prompt"]).mT, atol=1e-5
    )


def test_the_plan_stays_fixed_while_the_prompts_move():
    world, shared, local = begin(entropy_reg=0.02)
    x = tensors.full(world.x[:4])
    fixed = world.method.match(world.method.similarity(world.frozen, shared, local, x))

    def ours(prompt):
        return world.method.predict(world.frozen, {"prompt": prompt}, local, x)[:, 1].sum()

    def by_hand(prompt):
        cosine = world.method.similarity(world.frozen, {"prompt": prompt}, local, x)
        return 20.0 * (fixed * cosine).sum(dim=(-2, -1))[:, 1].sum()

    slope = grad(ours)(shared["prompt"])
    assert torch.allclose(slope, grad(by_hand)(shared["prompt"]), atol=1e-5)
    assert slope.abs().max() > 1e-3


def test_half_precision_patches_at_a_small_strength_give_finite_logits():
    world, shared, local = begin(entropy_reg=0.01)
    assert world.x.dtype == torch.float16
    logits = world.method.predict(world.frozen, shared, local, world.x[:8].float())
    assert logits.isfinite().all()


def test_both_prompts_learn_and_only_the_shared_one_is_uploaded():
    world, shared, local = begin()
    outcome = learn(world)
    assert set(outcome.shared) == {"prompt"}
    assert tensors.difference(outcome.shared, shared) > 1e-3
    for id in ("client-0", "client-1", "client-2"):
        assert set(outcome.local[id]) == {"own"}
        assert tensors.difference(outcome.local[id], local) > 1e-3


def test_a_client_whose_first_round_comes_late_starts_from_the_first_local_prompt():
    world, _, first = begin(rounds=1)
    ids = ("client-0", "client-1", "client-2")
    half = Plan(ids, (), fraction=0.34)
    state, fresh = start(world)
    assert tensors.difference(fresh, first) == 0
    early = train(world, Single(world), half, state, fresh, lambda state, line: None)
    took_part = participants(world, half, 0)
    assert set(early.local) == set(took_part) and len(took_part) == 1
    seen = []

    class Watching(Single):
        def round(self, number, tasks):
            seen.extend(task for task in tasks if task.trains)
            return super().round(number, tasks)

    longer = replace(world, method=replace(world.method, rounds=2))
    train(longer, Watching(longer), Plan(ids, ()), early, fresh, lambda state, line: None)
    for task in seen:
        late = task.id not in took_part
        assert (tensors.difference(task.local, first) == 0) == late


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gamma": 0.0}, r"gamma = 0.0 is outside \(0, 1\]"),
        ({"gamma": 1.2}, r"gamma = 1.2 is outside \(0, 1\]"),
        ({"entropy_reg": 0.0}, "entropy_reg = 0.0 of the entropy is not above 0"),
        ({"entropy_reg": -1.0}, "not above 0"),
        ({"transport": "magic"}, "'unbalanced' or 'classical' or 'averaging'"),
    ],
)
def test_settings_that_are_no_transport_are_refused(fields, said):
    with pytest.raises(SettingsError, match=said):
        make("fedotp", **fields)


def test_rows_without_patches_or_text_tower_are_refused_before_any_work(rows, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(SettingsError, match="fedotp needs patches of the encoder"):
        fedvlm.run("fedotp", embedded=rows, out=out)
    with_patches = replace(rows, patches=rows.x[:, None].half())
    with pytest.raises(SettingsError, match="fedotp needs text tower of the encoder"):
        fedvlm.run("fedotp", embedded=with_patches, out=out)
    with pytest.raises(SettingsError, match="promptfl needs text tower of the encoder"):
        fedvlm.run("promptfl", embedded=rows, out=out)
    assert not (out / "manifest.json").exists()


def test_a_long_prompt_and_a_class_nobody_has_are_refused_before_any_work(rows, tmp_path):
    out = tmp_path / "run"
    able = replace(
        rows, patches=rows.x[:, None].half(), text_tower=toy_text_tower(len(rows.classes), 16)
    )
    with pytest.raises(SettingsError, match="n_ctx = 50, but the text tower reads 24 tokens"):
        fedvlm.run({"name": "fedotp", "n_ctx": 50}, embedded=able, out=out)
    nobody = replace(
        able, classes=(*able.classes, "eel"), text_tower=toy_text_tower(5, 16), text=None
    )
    with pytest.raises(DataError, match="class 'eel' has no rows"):
        fedvlm.run({"name": "fedotp", **FEW}, embedded=nobody, out=out)
    assert not (out / "manifest.json").exists()
