"""No verb of a method mixes devices: shown on the meta device, since no GPU is at hand."""

import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from one_device import META, OneDevice
from torch.utils._pytree import tree_leaves

from fedvlm import devices, tensors
from fedvlm.core import make, methods, stacked
from fedvlm.devices import CPU, choose, moved
from fedvlm.engines import batched
from fedvlm.engines import placed as placing
from fedvlm.engines.batched import Batched, chunks
from fedvlm.engines.client import Task, client
from fedvlm.engines.crowd import crowd, pad
from fedvlm.engines.placed import away, on, placed
from fedvlm.engines.single import Single
from fedvlm.errors import SettingsError
from fedvlm.runner import provenance
from fedvlm.runner.provenance import places
from fedvlm.runner.settings import build
from fedvlm.testing import check_same, learn, short, toy_world

EVERY = sorted(methods())
PROMPTS = [name for name in EVERY if "text tower" in make(name).traits.needs]
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
def as_before(monkeypatch):
    """Flags and the environment are put back; cuDNN and cuBLAS have theirs without a GPU too."""
    was = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(devices.CUBLAS, "")
    monkeypatch.delenv(devices.CUBLAS)
    flags = [
        (torch.backends.cudnn, "deterministic"),
        (torch.backends.cudnn, "benchmark"),
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cuda.matmul, "allow_tf32"),
    ]
    before = [getattr(*one) for one in flags]
    yield
    for one, value in zip(flags, before, strict=True):
        setattr(*one, value)
    torch.use_deterministic_algorithms(was)


@pytest.mark.usefixtures("as_before")
def test_the_record_tells_device_name_flags_and_precision(monkeypatch):
    settings = build({"method": "fedot"})
    plain = {"training": {"device": "cpu"}}
    assert places(settings, memory=True) == plain
    assert places(settings, memory=False)["encoding"] == {"device": "cpu", "precision": "float32"}
    assert places(replace(settings, encoder="store:x.npz"), memory=False) == plain
    monkeypatch.setattr(provenance, "choose", lambda name: torch.device(name))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    found = places(replace(settings, device="cuda", access={"device": "mps"}), memory=False)
    flags = {
        "deterministic algorithms": True,
        "cudnn.deterministic": True,
        "cudnn.benchmark": False,
        "TF32": False,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert found == {
        "training": {"device": "cuda", "name": "a GPU", **flags},
        "encoding": {"device": "mps", "name": "mps", **flags, "precision": "float16"},
    }


def test_free_memory_is_that_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4, 9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 20)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 8)
    monkeypatch.setattr(devices, "free_memory", lambda: 5)
    assert [devices.free(torch.device(one)) for one in ("cuda", "mps", "cpu")] == [7, 12, 5]
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 21)
    assert devices.free(torch.device("mps")) == 0


@pytest.mark.usefixtures("as_before")
def test_rows_stay_on_the_device_where_they_fit_and_are_picked_there(monkeypatch):
    world = toy_world(short(make("fedot")))
    away_world = replace(world, method=placed(world.method, META))
    monkeypatch.setattr(placing, "free", lambda device: 4 * world.x.nbytes - 1)
    assert placing.resident(away_world).x is world.x
    monkeypatch.setattr(placing, "free", lambda device: 4 * world.x.nbytes)
    there = placing.resident(away_world)
    assert there.x.device == META and there.y.device == CPU
    assert Single(away_world).world.x is Batched(away_world).world.x is there.x
    assert placing.resident(there) is there and placing.resident(world) is world
    seen = weakref.ref(there.x)
    del away_world, there
    assert seen() is None  # nothing holds a GPU's memory once a training is over
    there = placing.resident(replace(world, method=placed(world.method, META)))
    with OneDevice():
        every = crowd(there, list(there.members), 0)
        one = client(there, "client-0", 0)
    assert every.x.device == every.held_x.device == one.x.device == META
    assert every.y.device == one.y.device == CPU
    plain = crowd(world, list(world.members), 0)
    assert every.x.shape == plain.x.shape and torch.equal(every.y, plain.y)


@pytest.mark.usefixtures("as_before")
def test_a_gpu_takes_larger_chunks_and_no_worker_processes(monkeypatch):
    world = toy_world(short(make("fedot")))
    room = 4 * 12 * batched.ROW_BYTES
    monkeypatch.setattr(placing, "free", lambda device: room)
    assert (Batched(world, 3).times, Batched(world, 3).workers) == (1, 3)
    there = Batched(replace(world, method=placed(world.method, META)), 3)
    assert (there.times, there.workers, there.eager) == (8, 1, False)
    monkeypatch.setattr(batched, "MOST", 1)
    shared, local = world.method.init(world.frozen)
    tasks = [Task(id, shared, local, True) for id in world.members]
    assert [len(chunks(world, tasks, times)) for times in (1, 2, 4)] == [4, 2, 1]


@pytest.mark.parametrize("name", ["fedot", "fedrep", "faa-clip", "fedgh", "promptfl"])
def test_bits_do_not_follow_the_size_of_chunks(name, monkeypatch):
    world = toy_world(short(make(name)))
    whole = learn(world)
    for most in (1, 3):
        monkeypatch.setattr(batched, "MOST", most)
        check_same(learn(world), whole, 0.0, f"chunks of {most} differ")


def test_what_all_were_sent_goes_to_a_device_once():
    many = torch.arange(6.0).reshape(2, 3).expand(5, 2, 3)
    there = moved({"head": many}, META)["head"]
    assert there.device == META and there.shape == many.shape and there.stride(0) == 0
    assert torch.equal(moved(many, CPU), many) and moved(many[:1], CPU).shape == (1, 2, 3)


class Pages:
    """Rows that are read when they are asked for."""

    def __init__(self, x):
        self.x, self.shape = x, x.shape

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index]

    def take(self, index):
        return Pages(self.x[index])


def test_rows_that_are_read_on_demand_go_to_the_device_as_they_are_read():
    world = toy_world(short(make("lora")))
    one = client(replace(world, x=Pages(world.x)), "client-0", 0)
    there = moved(one, META)
    assert there.x.shape == one.x.shape and len(there.x) == len(one.x)
    index = torch.tensor([2, 0])
    assert there.x[index].device == there.x.take(index)[:1].device == META
    shared, local = world.method.init(world.frozen)
    here = replace(one, x=devices.Fetched(one.x, CPU))
    found = [
        world.method.update(world.frozen, shared, local, each)[0]
        for each in (here, client(world, "client-0", 0))
    ]
    assert all(torch.equal(found[0][key], found[1][key]) for key in shared)


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
