"""FedOTP: what its logits and gradients are, who holds which prompt, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch.func import grad

import fedvlm
from fedvlm import tensors
from fedvlm.core import make
from fedvlm.engines.loop import draw_participants, initial_state, run_rounds
from fedvlm.engines.sequential import Sequential
from fedvlm.engines.state import Plan
from fedvlm.errors import DataError, SettingsError
from fedvlm.maths.optimal_transport import transport_plan
from fedvlm.testing import check_method, toy_text_tower, toy_world, train_toy

SHORT_SETTINGS = {"n_ctx": 4, "rounds": 2, "local_epochs": 1, "lr": 0.05}
KINDS = ["unbalanced", "classical", "averaging"]


def start_world(**fields):
    world = toy_world(make("fedotp", **{**SHORT_SETTINGS, **fields}))
    return world, *world.method.init(world.frozen)


@pytest.mark.parametrize("kind", KINDS[1:])  # the first is in the contract of all methods
def test_every_transport_keeps_the_contract(kind):
    check_method(make("fedotp", transport=kind, **SHORT_SETTINGS))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_scaled_sum_of_plan_times_cosine(kind):
    world, shared, local = start_world(transport=kind, entropy_reg=0.05)
    x = tensors.to_float32(world.x[:3])
    actual = world.method.predict(world.frozen, shared, local, x)
    unit = torch.nn.functional.normalize
    text = [world.frozen.text_tower(prompt) for prompt in (shared["prompt"], local["local prompt"])]
    for row in range(3):
        for label in range(4):
            cosine = torch.stack([unit(x[row], dim=1) @ part[label] for part in text])  # (2, patches)
            expected = 20.0 * (transport_plan(cosine, kind, 0.8, 0.05) * cosine).sum()
            assert actual[row, label] == pytest.approx(expected.item(), abs=1e-4)


def test_averaging_is_the_mean_cosine_and_equal_prompts_are_one_prompt():
    world, shared, _ = start_world(transport="averaging")
    x = tensors.to_float32(world.x[:5])
    logits = world.method.predict(world.frozen, shared, {"local prompt": shared["prompt"]}, x)
    mean = torch.nn.functional.normalize(x, dim=-1).mean(dim=1)
    assert torch.allclose(logits, 20.0 * mean @ world.frozen.text_tower(shared["prompt"]).mT, atol=1e-5)


def test_the_plan_stays_fixed_while_the_prompts_move():
    world, shared, local = start_world(entropy_reg=0.02)
    x = tensors.to_float32(world.x[:4])
    fixed = world.method.match(world.method.similarity(world.frozen, shared, local, x))

    def fixed_plan_loss(prompt):
        return world.method.predict(world.frozen, {"prompt": prompt}, local, x)[:, 1].sum()

    def by_hand(prompt):
        cosine = world.method.similarity(world.frozen, {"prompt": prompt}, local, x)
        return 20.0 * (fixed * cosine).sum(dim=(-2, -1))[:, 1].sum()

    gradient = grad(fixed_plan_loss)(shared["prompt"])
    assert torch.allclose(gradient, grad(by_hand)(shared["prompt"]), atol=1e-5)
    assert gradient.abs().max() > 1e-3


def test_half_precision_patches_at_a_small_strength_give_finite_logits():
    world, shared, local = start_world(entropy_reg=0.01)
    assert world.x.dtype == torch.float16
    logits = world.method.predict(world.frozen, shared, local, world.x[:8].float())
    assert logits.isfinite().all()


def test_both_prompts_learn_and_only_the_shared_one_is_uploaded():
    world, shared, local = start_world()
    outcome = train_toy(world)
    assert set(outcome.shared) == {"prompt"}
    assert tensors.max_relative_difference(outcome.shared, shared) > 1e-3
    for id in ("client-0", "client-1", "client-2"):
        assert set(outcome.local[id]) == {"local prompt"}
        assert tensors.max_relative_difference(outcome.local[id], local) > 1e-3


def test_a_client_whose_first_round_comes_late_starts_from_the_first_local_prompt():
    world, _, first = start_world(rounds=1)
    ids = ("client-0", "client-1", "client-2")
    half_plan = Plan(ids, (), fraction=0.34)
    state, initial_local = initial_state(world)
    assert tensors.max_relative_difference(initial_local, first) == 0
    early_state = run_rounds(world, Sequential(world), half_plan, state, initial_local, lambda state, line: None)
    took_part = draw_participants(world, half_plan, 0)
    assert set(early_state.local) == set(took_part) and len(took_part) == 1
    checked = []

    class Watching(Sequential):
        def round(self, number, tasks):
            checked.extend(task for task in tasks if task.trains)
            return super().round(number, tasks)

    longer = replace(world, method=replace(world.method, rounds=2))
    run_rounds(longer, Watching(longer), Plan(ids, ()), early_state, initial_local, lambda state, line: None)
    for task in checked:
        is_late = task.id not in took_part
        assert (tensors.max_relative_difference(task.local, first) == 0) == is_late


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gamma": 0.0}, "fedotp.gamma must be above 0 and at most 1, got 0.0"),
        ({"gamma": 1.2}, "fedotp.gamma must be above 0 and at most 1, got 1.2"),
        ({"entropy_reg": 0.0}, "fedotp.entropy_reg must be above 0, got 0.0"),
        ({"entropy_reg": -1.0}, "fedotp.entropy_reg must be above 0, got -1.0"),
        ({"transport": "magic"}, "'unbalanced' or 'classical' or 'averaging'"),
    ],
)
def test_settings_that_are_no_transport_are_refused(fields, message):
    with pytest.raises(SettingsError, match=message):
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
    able = replace(rows, patches=rows.x[:, None].half(), text_tower=toy_text_tower(len(rows.classes), 16))
    with pytest.raises(SettingsError, match="n_ctx = 50, but the text tower reads 24 tokens"):
        fedvlm.run({"name": "fedotp", "n_ctx": 50}, embedded=able, out=out)
    nobody = replace(able, classes=(*able.classes, "eel"), text_tower=toy_text_tower(5, 16), text=None)
    with pytest.raises(DataError, match="class 'eel' has no samples"):
        fedvlm.run({"name": "fedotp", **SHORT_SETTINGS}, embedded=nobody, out=out)
    assert not (out / "manifest.json").exists()
