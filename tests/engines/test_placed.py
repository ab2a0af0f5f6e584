"""No verb of a method mixes devices: shown on the meta device, since no GPU is at hand."""

import pickle
from dataclasses import replace

import pytest
import torch
from one_device import META, OneDevice
from torch.utils._pytree import tree_leaves

from fedvlm import tensors
from fedvlm.core import make, methods, stacked
from fedvlm.devices import CPU, choose, moved
from fedvlm.engines.client import client
from fedvlm.engines.crowd import pad
from fedvlm.engines.placed import away, on, placed
from fedvlm.errors import SettingsError
from fedvlm.testing import check_same, learn, short, toy_world

EVERY = sorted(methods())
PROMPTS = [name for name in EVERY if "text tower" in make(name).traits.needs]
# Verbs that look at values, which meta tensors have not, and why: these run on the CPU under the
# same mode.
ROWS = "leaves out steps in which nobody has a row"
CACHE = "remembers a prompt's features by its values"
LOOKS = {
    **{(name, "update_many"): ROWS for name in PROMPTS if name not in ("cocoop", "dp-fpl")},
    **{(name, "predict"): CACHE for name in PROMPTS},
    **{(name, "update_many"): ROWS for name in ("faa-clip", "fedclip", "fedavg", "fedprox")},
    **{(name, "update_many"): ROWS for name in ("fedot", "fedot-all-global", "fedot-all-local")},
    **{(name, "update_many"): ROWS for name in ("scaffold", "fedrep")},
}


def verbs(method):
    """A method's verbs with what they take."""
    method = short(method)
    world = toy_world(method)
    shared, local = method.init(world.frozen)
    sent = method.send(shared, "client-0")
    ones = [client(world, id, 0) for id in ("client-0", "client-1")]
    yield "update", method.update, world.frozen, (sent, local, ones[0])
    yield "predict", method.predict, world.frozen, (sent, local, tensors.full(ones[0].x))
    if stacked(method) is not None:
        both = (tensors.stack([sent, sent]), tensors.stack([local, local]))
        yield "update_many", method.update_many, world.frozen, (*both, pad(ones))


def on_meta(frozen):
    there = moved(frozen, META)
    if frozen.text_tower is not None:  # where names end is looked up once, when a tower is made
        there.text_tower.__dict__["_tokens"] = moved(frozen.text_tower._tokens, META)
    return there


CASES = [(name, {}) for name in EVERY] + [
    ("lora", {"average": "products"}),
    ("vpt", {"depth": 2}),
    ("fedavg-tower", {"blocks": 1}),
]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_no_verb_mixes_devices(name, settings):
    for verb, plain, frozen, rest in verbs(make(name, **settings)):
        if (name, verb) in LOOKS:
            with pytest.raises((RuntimeError, TypeError)):
                away(plain, META, on_meta(frozen), *rest)
            with OneDevice():
                away(plain, CPU, frozen, *rest)
            continue
        with OneDevice():
            found = away(plain, META, on_meta(frozen), *moved(rest, META))
        made = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        assert {one.device for one in made} <= {META}, (verb, made)


def test_a_race_of_maps_runs_under_the_same_mode():
    for verb, plain, frozen, rest in verbs(make("fedot", blocks="auto")):
        if verb != "predict":
            with pytest.raises((RuntimeError, TypeError)):
                away(plain, META, on_meta(frozen), *rest)
        with OneDevice():
            away(plain, CPU, frozen, *rest)


@pytest.fixture
def as_before():
    was = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(was)


@pytest.mark.parametrize("name", ["fedot", "fedrep", "tofa", "fedotp", "promptfl-ft", "lora"])
@pytest.mark.usefixtures("as_before")
def test_a_placed_method_gives_the_same_and_is_deterministic(name):
    world = toy_world(short(make(name)))
    other = replace(world, method=placed(world.method, CPU))
    assert torch.are_deterministic_algorithms_enabled()
    assert (stacked(other.method) is None) == (stacked(world.method) is None)
    assert type(pickle.loads(pickle.dumps(other.method)).update) is type(other.method.update)  # noqa: S301
    check_same(learn(other), learn(world), 0.0, "a placed method differs")


def test_auto_takes_the_gpu_that_is_there(monkeypatch):
    for cuda, mps, wanted in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=cuda: there)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=mps: there)
        assert choose("auto").type == wanted
    with pytest.raises(SettingsError, match="torch finds none here"):
        choose("cuda")
    method = make("fedot")
    assert on(method, "auto") is method
