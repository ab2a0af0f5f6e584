"""Registration refuses loudly, and settings are checked against a method's fields."""

from dataclasses import dataclass

import pytest

from fedvlm import parts
from fedvlm.core import METHODS, make, methods, register
from fedvlm.errors import SettingsError
from fedvlm.methods.zeroshot import ZeroShot


def whole(**changes):
    """A complete method class, with some attributes replaced or (None) left out."""
    body = {
        "name": "test-method",
        "rounds": 1,
        "needs": frozenset({"image"}),
        "memory": frozenset(),
        "init": lambda self, frozen: ({}, {}),
        "predict": ZeroShot.predict,
        "send": parts.everything,
        "update": parts.idle,
        "aggregate": parts.mean,
        "adapt": parts.nothing,
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
    assert register(whole()) is METHODS["test-method"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": None}, "no name; add"),
        ({"name": "fedavg"}, "taken by FedAvg; choose another"),
        ({"predict": None}, "no predict; write it or name a part"),
        ({"send": None}, "no send; write it or name a part"),
        ({"update": parts.sgd}, "needs a `loss`; add one"),
        ({"rounds": None}, "no rounds; add a field"),
        ({"needs": None}, "no needs; add"),
        ({"memory": None}, "no memory; add"),
        ({"needs": frozenset({"sound"})}, "needs 'sound'; an encoder can offer image"),
    ],
)
def test_registration_refuses_and_says_what_to_add(changes, says):
    with pytest.raises(SettingsError, match=says):
        register(whole(**changes))


def test_registration_refuses_what_is_no_frozen_dataclass():
    with pytest.raises(SettingsError, match="put @dataclass\\(frozen=True\\)"):
        register(type("Plain", (), {"name": "plain"}))


def test_registration_refuses_a_field_without_a_default():
    with pytest.raises(SettingsError, match="field rate has no default"):
        register(whole(__annotations__={"rate": float}))


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("fedto", {}, "no method is called 'fedto'; did you mean 'fedot'"),
        ("fedot", {"bloks": 4}, "no setting of fedot is called 'bloks'; did you mean 'blocks'"),
        ("fedot", {"rate": "fast"}, "fedot.rate = 'fast' does not fit; it takes a float"),
        ("fedot", {"rounds": 1.5}, "fedot.rounds = 1.5 does not fit; it takes a int"),
        ("fedot", {"rounds": True}, "fedot.rounds = True does not fit"),
        ("fedot", {"head": "txt"}, "it takes 'text' or 'random'"),
    ],
)
def test_a_wrong_name_or_value_is_refused_with_the_remedy(name, settings, says):
    with pytest.raises(SettingsError, match=says):
        make(name, **settings)


def test_a_whole_number_passes_as_a_float():
    assert make("fedprox", mu=1).mu == 1


def test_methods_of_outside_packages_are_found(tmp_path, monkeypatch):
    (tmp_path / "outside.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedvlm.core import register\n"
        "from fedvlm.methods.zeroshot import ZeroShot\n"
        "@register\n@dataclass(frozen=True)\nclass Outside(ZeroShot):\n    name = 'outside'\n"
    )
    info = tmp_path / "outside-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[fedvlm.methods]\noutside = outside\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "outside" in methods()


def test_a_broken_outside_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "brokenoutside.py").write_text("1 / 0\n")
    info = tmp_path / "brokenoutside-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brokenoutside\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[fedvlm.methods]\nmine = brokenoutside\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match="entry point mine = brokenoutside .* uninstall it"):
        methods()
