"""Registration refuses loudly, and settings are checked against a method's fields."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

import fedvlm
from fedvlm import parts
from fedvlm.core import (
    METHODS,
    VERBS,
    ClassTraits,
    PrivacyTraits,
    Schedule,
    TrainingTraits,
    Traits,
    make,
    methods,
    register,
    schedule,
    tunable_settings,
    upload_sum,
)
from fedvlm.core.registry import CONTRACT_SETTINGS, OPTIONAL_VERBS, TRAIT_TYPES
from fedvlm.errors import SettingsError
from fedvlm.methods.fedavg import FedAvg
from fedvlm.methods.zeroshot import ZeroShot
from fedvlm.runner.settings import build

GRADIENT_METHOD = {
    "loss": parts.cross_entropy,
    "batch_size": 8,
    "local_epochs": 1,
    "lr": 0.1,
}  # what a gradient part reads


def method_class(**changes):
    """A complete method class, with some attributes replaced or (None) left out."""
    body = {
        "name": "test-method",
        "rounds": 1,
        "traits": Traits(needs=frozenset({"image"})),
        "init": lambda self, frozen: ({}, {}),
        "predict": ZeroShot.predict,
        "send": parts.send_all,
        "update": parts.no_update,
        "aggregate": parts.mean,
        "adapt": parts.no_adaptation,
        **changes,
    }
    kind = type("Made", (), {key: value for key, value in body.items() if value is not None})
    return dataclass(frozen=True)(kind)


@pytest.fixture(autouse=True)
def same_list_after():
    methods()
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def test_a_whole_method_is_registered_under_its_name():
    assert register(method_class()) is METHODS["test-method"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": None}, "no name; add"),
        ({"name": "fedavg"}, "taken by FedAvg; choose another"),
        ({"predict": None}, "no predict; write it or name a part"),
        ({"send": None}, "no send; write it or name a part"),
        ({"update": parts.sgd, **GRADIENT_METHOD, "loss": None}, "needs a `loss`; add one"),
        (
            {"update": parts.sgd, **GRADIENT_METHOD, "batch_size": None},
            "needs a batch_size; add a field such as",
        ),
        (
            {"update": parts.adam, **GRADIENT_METHOD, "local_epochs": None},
            "needs a local_epochs; add a field such as",
        ),
        ({**GRADIENT_METHOD, "lr": None}, "needs a lr; add a field such as `lr: float = 1e-3`"),
        ({"rounds": None}, "no rounds; add a field"),
        ({"traits": None}, "no traits; add `traits = Traits"),
        ({"traits": Traits(needs={"image"})}, "traits.needs must be .*, got {'image'}"),
        ({"traits": Traits(needs=frozenset({"sound"}))}, "needs 'sound'; an encoder can offer"),
        (
            {"traits": Traits(privacy=PrivacyTraits(upload_sum="all"))},
            "traits.privacy.upload_sum must be 'samples' or .*, got 'all'",
        ),
        (
            {"traits": Traits(classes=ClassTraits(min_class_samples=4))},
            "name min_class_samples, which is not one of its settings; add a",
        ),
        ({"traits": Traits(training=TrainingTraits(tunable=("pull",)))}, "name pull, which is not one of its settings"),
        ({"needs": frozenset({"image"})}, r"needs is a trait; write it as `traits = Traits\(needs"),
        ({"batch": 8}, "setting 'batch' is called 'batch_size'; rename it"),
        ({"rate": 0.1}, "setting 'rate' is called 'lr'"),
        ({"epochs": 2}, "setting 'epochs' is called 'local_epochs'"),
        ({"decay": 0.1}, "setting 'decay' is called 'weight_decay'"),
        ({"smallest": 16}, "setting 'smallest' is called 'min_class_samples'"),
        ({"learning_rate": 0.1}, "setting 'learning_rate' is called 'lr'"),
        ({"weight_decy": 0.1}, "it has a weight_decy, .* did you mean weight_decay?"),
        ({"update_any": parts.no_update}, "it has a update_any, .* did you mean update_many?"),
        ({"noise": 0.1, "__annotations__": {"noise": float}}, "setting noise has the name of a verb"),
        ({"send": 1, "__annotations__": {"send": int}}, "no send; write it"),
        ({"describe": 1}, "its describe is not a function"),
        (
            {"covered_classes": lambda self, upload: None},
            "described by covered_classes, class_means and the trait min_class_samples",
        ),
    ],
)
def test_registration_refuses_and_says_what_to_add(changes, message):
    with pytest.raises(SettingsError, match=message):
        register(method_class(**changes))


def test_registration_names_everything_that_is_missing_at_once():
    with pytest.raises(SettingsError) as refused:
        register(method_class(name=None, send=None, predict=None, rounds=None))
    for message in ("no name; add", "no send; write it", "no predict; write it", "no rounds; add"):
        assert message in str(refused.value)


def test_registration_refuses_what_is_no_frozen_dataclass():
    with pytest.raises(SettingsError, match="put @dataclass\\(frozen=True\\)"):
        register(type("Plain", (), {"name": "plain"}))


def test_registration_refuses_a_field_without_a_default():
    with pytest.raises(SettingsError, match="field lr has no default"):
        register(method_class(__annotations__={"lr": float}))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedto", {}, "no method is called 'fedto'; did you mean 'fedot'"),
        ("fedot", {"rate": 1e-3}, "no setting of fedot is called 'rate'; .*lr"),
        ("fedot", {"bloks": 4}, "no setting of fedot is called 'bloks'; did you mean 'blocks'"),
        ("fedot", {"lr": "fast"}, "fedot.lr must be a number, got 'fast'"),
        ("fedot", {"rounds": 1.5}, "fedot.rounds must be a whole number, got 1.5"),
        ("fedot", {"rounds": True}, "fedot.rounds must be a whole number, got True"),
        ("fedot", {"head": "txt"}, "fedot.head must be 'text' or 'random', got 'txt'; did you mean 'text'\\?"),
        ("fedot", {"rounds": -1}, "fedot.rounds must be at least 0, got -1"),
        ("fedot", {"local_epochs": 0}, "fedot.local_epochs must be between 1 and 10000, got 0"),
        ("fedot", {"batch_size": 0}, "fedot.batch_size must be between 1 and 1000000000, got 0"),
        ("fedot", {"tau": -1.0}, "fedot.tau must be above 0, got -1.0"),
        ("fedprox", {"mu": -1.0}, "fedprox.mu must be at least 0, got -1.0"),
        ("promptfl", {"n_ctx": 0}, "promptfl.n_ctx must be between 1 and 1000, got 0"),
        ("fedot", {"lr": -1.0}, "fedot.lr must be above 0 and at most 1000, got -1.0"),
        ("fedot", {"lr": float("nan")}, "fedot.lr must be finite and above 0"),
        ("fedot", {"lr": float("inf")}, "fedot.lr must be finite and above 0"),
        ("fedot", {"momentum": 1.0}, "fedot.momentum must be at least 0 and below 1, got 1.0"),
        ("fedot", {"weight_decay": -0.1}, "fedot.weight_decay must be between 0 and 100, got -0.1"),
        ("fedclip", {"eps": 0.0}, "fedclip.eps must be above 0, got 0.0"),
        ("fens", {"server_lr": 0.0}, "fens.server_lr must be above 0"),
    ],
)
def test_a_wrong_name_or_value_is_refused_with_the_remedy(name, settings, message):
    with pytest.raises(SettingsError, match=message):
        make(name, **settings)


def test_a_number_is_checked_in_a_method_that_was_made_by_hand():
    with pytest.raises(SettingsError, match="fedavg.lr must be above 0"):
        build({"method": FedAvg(lr=-1)})


def test_a_method_without_the_settings_of_a_walk_has_the_usual_ones():
    assert schedule(make("zero-shot")) == Schedule()
    assert schedule(make("fedclip", batch_size=7)).betas == (0.9, 0.98)
    assert schedule(make("fedclip", batch_size=7)).batch_size == 7


def test_the_rate_is_tuned_where_there_is_a_loss_and_nothing_where_there_is_none():
    assert tunable_settings(make("fedavg")) == ("lr",)
    assert tunable_settings(make("zero-shot")) == ()
    assert tunable_settings(method_class(traits=Traits(training=TrainingTraits(tunable=("pull",))))()) == ("pull",)


def test_what_an_aggregate_is_a_sum_of_is_said_by_the_part_or_the_traits():
    assert upload_sum(make("fedavg")) == "samples"
    assert upload_sum(make("fedot")) == "clients"
    assert upload_sum(make("tofa")) == "total"
    assert upload_sum(make("tofa", rounds=2)) is None
    assert upload_sum(make("promptfl-fedamp")) is None


def test_text_is_needed_only_for_a_head_that_starts_from_it():
    assert make("fedot").traits.needs == {"image", "text"}
    assert make("fedot", head="random").traits.needs == {"image"}


def test_no_one_outside_core_looks_for_the_words_of_the_contract_by_getattr():
    home = Path(fedvlm.__file__).parent
    words = {
        *VERBS,
        *OPTIONAL_VERBS,
        *(name for _, name in TRAIT_TYPES),
        *CONTRACT_SETTINGS,
        "traits",
        "factors",
        "gamma",
        "noise_multiplier",
    }
    calls = []
    for path in sorted(home.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or "core" in path.relative_to(home).parts:
                continue
            if getattr(call.func, "id", "") in ("getattr", "hasattr"):
                of, name = (ast.unparse(argument) for argument in call.args[:2])
                if "method" in of or name.strip("'") in words:
                    calls.append(f"{path}:{call.lineno} {ast.unparse(call)}")
    assert not calls, "a method's words are read through Traits, Schedule or a protocol: " + calls[0]


def test_a_whole_number_passes_as_a_float():
    assert make("fedprox", mu=1).mu == 1


def test_another_package_cannot_take_the_place_of_a_method_by_its_class_name():
    our_class = METHODS["fedavg"]
    theirs = dataclass(frozen=True)(type("FedAvg", (our_class,), {"__module__": "theirs"}))
    with pytest.raises(SettingsError, match="the name 'fedavg' is taken"):
        register(theirs)
    assert METHODS["fedavg"] is our_class
