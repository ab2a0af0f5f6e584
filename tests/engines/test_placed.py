"""No verb of a method mixes devices: shown on the meta device, since no GPU is at hand."""

import pickle
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedvlm import tensors
from fedvlm.core import make, methods, stacked
from fedvlm.devices import choose, moved
from fedvlm.encoders import open_encoder
from fedvlm.engines.client import client
from fedvlm.engines.crowd import pad
from fedvlm.engines.placed import away, on, placed
from fedvlm.errors import SettingsError
from fedvlm.testing import check_same, learn, short, toy_world

META, CPU = torch.device("meta"), torch.device("cpu")
TOWER = sorted(name for name in methods() if "image tower" in make(name).traits.needs)
OTHERS = sorted(set(methods()) - set(TOWER))
PROMPTS = [name for name in OTHERS if "text tower" in make(name).traits.needs]
# Verbs that look at values, which meta tensors have not, and why: these run on the CPU under the
# same mode.
ROWS = "leaves out steps in which nobody has a row"
HELD = "multiplies texts with the means of classes a client has alone"
CACHE = "remembers a prompt's features by its values"
LOOKS = {
    **{(name, "update_many"): ROWS for name in PROMPTS if name not in ("cocoop", "dp-fpl")},
    **{(name, "predict"): CACHE for name in PROMPTS},
    **{(name, "update_many"): ROWS for name in ("faa-clip", "fedclip", "fedavg", "fedprox")},
    **{(name, "update_many"): ROWS for name in ("fedot", "fedot-all-global", "fedot-all-local")},
    **{(name, "update_many"): ROWS for name in ("scaffold", "fedrep")},
    **{("tofa", verb): HELD for verb in ("update", "update_many")},
}


class OneDevice(TorchDispatchMode):
    """Refuses an operation whose tensors live on different devices; meta alone lets some pass."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = {
            one.device.type
            for one in tree_leaves((args, kwargs or {}))
            if isinstance(one, torch.Tensor)
        }
        assert len(found) <= 1, f"{operation} mixes {sorted(found)}"
        return operation(*args, **(kwargs or {}))


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


@pytest.mark.parametrize("name", OTHERS)
def test_no_verb_mixes_devices(name):
    for verb, plain, frozen, rest in verbs(make(name)):
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


def test_the_mode_refuses_what_meta_alone_lets_pass():
    with OneDevice(), pytest.raises(AssertionError, match="mixes"):
        torch.zeros(2, 3, device=META) @ torch.zeros(3, 2)


def pixels_for(encoder):
    size = encoder.model.config.vision_config.image_size
    return np.random.default_rng(0).normal(size=(2, 3, size, size)).astype(np.float32)


@pytest.mark.parametrize("verb", ["image", "patches", "text"])
def test_an_encoder_does_not_mix_devices(verb, monkeypatch):
    encoder = open_encoder("demo")
    encoder.model.to(META)
    encoder.device = META
    monkeypatch.setattr(encoder, "halved", nullcontext)
    # Everything is done there; only what meta tensors have not, values, cannot be brought back.
    work = partial(encoder.embed, list(pixels_for(encoder)), verb == "patches")
    if verb == "text":
        work = partial(encoder.embed_text, ["a cat", "two cats"])
    with OneDevice(), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        work()


def test_an_encoder_in_half_precision_is_close_and_gives_float32():
    encoder = open_encoder("demo")
    batch, texts = list(pixels_for(encoder)), ["a cat", "two cats"]
    plain, words = encoder.embed(batch, True), encoder.embed_text(texts)
    encoder.half = True
    half, near = encoder.embed(batch, True), encoder.embed_text(texts)
    assert half.pooled.dtype == np.float32 and near.dtype == torch.float32
    for a, b in ((plain.pooled, half.pooled), (plain.patches, half.patches), (words, near)):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert 0 < np.abs(a - b).max() < 0.02 * np.abs(a).max()


@pytest.fixture
def as_before():
    was = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(was)


@pytest.mark.parametrize("name", ["fedot", "fedrep", "tofa", "fedotp", "promptfl-ft"])
@pytest.mark.usefixtures("as_before")
def test_a_placed_method_gives_the_same_and_is_deterministic(name):
    world = toy_world(short(make(name)))
    other = replace(world, method=placed(world.method, CPU))
    assert torch.are_deterministic_algorithms_enabled()
    assert (stacked(other.method) is None) == (stacked(world.method) is None)
    assert type(pickle.loads(pickle.dumps(other.method)).update) is type(other.method.update)  # noqa: S301
    check_same(learn(other), learn(world), 0.0, "a placed method differs")


def test_the_image_tower_stays_on_the_cpu():
    with pytest.raises(SettingsError, match="set device"):
        placed(make(TOWER[0]), CPU)


def test_auto_takes_the_gpu_that_is_there(monkeypatch):
    for cuda, mps, wanted in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=cuda: there)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=mps: there)
        assert choose("auto").type == wanted
    with pytest.raises(SettingsError, match="torch finds none here"):
        choose("cuda")
    method = make("fedot")
    assert on(method, "auto") is method
