"""What a prompt starts from: the words of the data set's template, before and behind the class."""

import pytest
import torch

from fedvlm.core import Frozen, make, methods
from fedvlm.encoders.huggingface import HuggingFace
from fedvlm.encoders.text import fill_template
from fedvlm.engines.client import make_client
from fedvlm.errors import SettingsError
from fedvlm.maths.optimal_transport import transport_plan
from fedvlm.methods._prompts import class_features
from fedvlm.testing import check_method, toy_world, train_toy
from tests.helpers import tiny_models

CLASSES = ("cat", "very long name of a very long clock", "alarm_clock", "dog")
TEMPLATE = "a photo of a {}, image"
TOKENS = 4
NAMES = [name for name, method in methods().items() if "text tower" in method().traits.needs]
NAMES.remove("fedtpg")  # a network generates its prompt, so that it starts from no words
EXTRA_SETTINGS = {"promptfl-fedper": {"local_vectors": 1}, "fedbens": {"prompts_per_client": 1}}
PATCHES = [name for name in NAMES if "patches" in methods()[name]().traits.needs]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return HuggingFace(tiny_models.clip(tmp_path_factory.mktemp("clip")))


def load_frozen(encoder, template=TEMPLATE, seed=3):
    text = encoder.embed_text(fill_template(CLASSES, template))
    tower = encoder.text_tower(CLASSES, template)
    return Frozen(CLASSES, encoder.dim, 20.0, text, seed, tower)


def from_template(name, **fields):
    return make(name, ctx_init="template", **{**EXTRA_SETTINGS.get(name, {}), **fields})


def contexts(method, frozen):
    """Every context that the method's first state reads class features from."""
    shared, local = method.init(frozen)
    if method.name == "dp-fpl":
        return [shared["prompt"] + local["local prompt"]]
    if method.name == "promptfl-fedper":
        return [torch.cat([shared["prompt"], local["local prompt"]])]
    state = {**shared, **local}
    return [state[key] for key in ("prompt", "local prompt", "prompts") if key in state]


def rows(*shape):
    draw = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.normalize(draw, dim=-1)


def test_there_are_seventeen_prompt_methods_and_one_reads_patches():
    assert len(NAMES) == 17
    assert PATCHES == ["fedotp"]


@pytest.mark.parametrize("template", [TEMPLATE, "a photo of a {}.", "image of {}", "a photo {} {} dog"])
@pytest.mark.parametrize("name", NAMES)
def test_class_features_are_the_templates_before_the_first_round(encoder, name, template):
    frozen = load_frozen(encoder, template)
    features = contexts(from_template(name), frozen)
    assert features
    for context in features:
        assert torch.allclose(class_features(frozen, context), frozen.text, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PATCHES])
def test_answers_are_zero_shot_row_by_row_before_the_first_round(encoder, name):
    frozen, method, x = load_frozen(encoder), from_template(name), rows(40, encoder.dim)
    shared, local = method.init(frozen)
    actual = method.predict(frozen, method.send(shared, "one"), local, x)
    zero = frozen.scale * x @ frozen.text.T
    if name == "fedbens":  # of one run: the logarithm of its probabilities
        zero = zero.log_softmax(dim=1)
    assert torch.allclose(actual, zero, atol=frozen.scale * 1e-5)
    by_chance = make(name, n_ctx=TOKENS, **EXTRA_SETTINGS.get(name, {}))
    shared, local = by_chance.init(frozen)
    random_logits = by_chance.predict(frozen, by_chance.send(shared, "one"), local, x)
    assert (random_logits - zero).abs().max() > 0.1


@pytest.mark.parametrize("transport", ["unbalanced", "classical", "averaging"])
def test_fedotp_answers_by_its_plan_with_the_templates_text(encoder, transport):
    frozen, x = load_frozen(encoder), rows(10, 6, encoder.dim)
    method = from_template("fedotp", transport=transport)
    actual = method.predict(frozen, *method.init(frozen), x)
    cosines = (frozen.text @ x.mT)[:, :, None].expand(-1, -1, 2, -1)  # (rows, classes, 2, patches)
    fixed = transport_plan(cosines, transport, method.gamma, method.entropy_reg) * cosines
    assert torch.allclose(actual, frozen.scale * fixed.sum(dim=(-2, -1)), atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_start_has_as_many_vectors_as_the_template_and_no_other_number(encoder, name):
    frozen = load_frozen(encoder)
    assert all(len(context.flatten(0, -2)) == TOKENS for context in contexts(from_template(name), frozen))
    explicit = from_template(name, n_ctx=TOKENS)
    assert all(len(context.flatten(0, -2)) == TOKENS for context in contexts(explicit, frozen))
    for number in (TOKENS - 1, TOKENS + 1, 16):  # a start longer than vectors, and shorter
        with pytest.raises(SettingsError, match=rf"n_ctx = {number}, but .* has 4 tokens before"):
            from_template(name, n_ctx=number).init(frozen)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_change_a_random_start_and_not_one_from_the_template(encoder, name):
    first_frozen, second_frozen = load_frozen(encoder, seed=3), load_frozen(encoder, seed=4)
    random = make(name, n_ctx=TOKENS, **EXTRA_SETTINGS.get(name, {}))
    for method, same in ((from_template(name), True), (random, False)):
        pairs = zip(contexts(method, first_frozen), contexts(method, second_frozen), strict=True)
        assert all(torch.equal(first, second) == same for first, second in pairs)


@pytest.mark.parametrize(("name", "usual"), [("promptfl", 16), ("promptfolio", 8), ("cocoop", 4)])
def test_without_a_number_a_random_prompt_has_the_papers(name, usual):
    world = toy_world(make(name))
    assert len(world.method.init(world.frozen)[0]["prompt"]) == usual


def test_a_prompt_ends_as_the_template_does(encoder):
    context = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    plain, stop, longer = (
        encoder.text_tower(CLASSES, template)(context) for template in ("a photo of a {}", "dog {}.", "{} image")
    )
    assert (plain - stop).abs().max() > 1e-2
    assert (plain - longer).abs().max() > 1e-2
    assert torch.allclose(plain, encoder.text_tower(CLASSES, "{}")(context))


def test_a_template_without_a_place_for_the_class_is_refused(encoder):
    with pytest.raises(SettingsError, match="has no place for a class"):
        encoder.text_tower(CLASSES, "a photo")


@pytest.mark.parametrize("template", ["{}", "{}, a photo"])
def test_a_template_without_words_before_the_class_is_no_start(encoder, template):
    frozen = load_frozen(encoder, template)
    assert len(frozen.text_tower.prefix) == 0
    with pytest.raises(SettingsError, match="has 0 tokens before the class"):
        from_template("promptfl").init(frozen)
    make("promptfl", n_ctx=2).init(frozen)


def test_a_template_that_fills_the_tower_is_refused(encoder):
    tower = encoder.text_tower(CLASSES, "a photo " * 10 + "{}")
    frozen = Frozen(CLASSES, encoder.dim, 20.0, None, 0, tower)
    with pytest.raises(SettingsError, match="n_ctx = 20, but the text tower reads 24 tokens"):
        from_template("promptfl").init(frozen)


def test_own_vectors_and_runs_that_a_template_cannot_give_are_refused(encoder):
    with pytest.raises(SettingsError, match=r"local_vectors \(with n_ctx = 4\) must be between 0 and 3, got 8"):
        make("promptfl-fedper", ctx_init="template").init(load_frozen(encoder))
    with pytest.raises(SettingsError, match="set prompts_per_client = 1"):
        make("fedbens", ctx_init="template")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PATCHES])
def test_methods_that_start_from_the_template_keep_the_contract(name):
    check_method(from_template(name, rounds=2, local_epochs=1))


def test_prompts_of_fedotp_that_start_alike_move_alike_until_the_first_mean():
    first, second = (train_toy(toy_world(from_template("fedotp", rounds=rounds, local_epochs=1))) for rounds in (1, 2))
    local_prompts = [local_state["local prompt"] for local_state in first.local.values()]
    assert not torch.equal(local_prompts[0], local_prompts[1])
    # the plan does not tell them apart: what a client uploads first is its local prompt too
    world = toy_world(from_template("fedotp", local_epochs=1))
    shared, local = world.method.init(world.frozen)
    upload, new_local = world.method.update(world.frozen, shared, local, make_client(world, "client-0", 0))
    assert torch.allclose(upload["prompt"], new_local["local prompt"], atol=1e-6)
    distances = [
        (second.shared["prompt"] - local_state["local prompt"]).abs().max() for local_state in second.local.values()
    ]
    assert min(distances) > 1e-4
