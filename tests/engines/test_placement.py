"""No verb of a method mixes devices: shown on the meta device, since no GPU is at hand."""

import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fedvlm import devices, encoders, tensors
from fedvlm.core import as_stacked, make, methods
from fedvlm.devices import CPU, choose_device, to_device
from fedvlm.engines import chunks
from fedvlm.engines import placement as placing
from fedvlm.engines.batched import Batched
from fedvlm.engines.chunks import make_chunks, pad_clients, stack_clients
from fedvlm.engines.client import Task, make_client
from fedvlm.engines.placement import place_method, run_on_device, with_device
from fedvlm.engines.sequential import Sequential
from fedvlm.errors import SettingsError
from fedvlm.runner import manifest
from fedvlm.runner.manifest import device_info
from fedvlm.runner.settings import build
from fedvlm.testing import check_same, shorten, toy_world, train_toy
from tests.helpers.one_device import META, OneDevice

METHOD_NAMES = sorted(methods())
PROMPTS = [name for name in METHOD_NAMES if "text tower" in make(name).traits.needs]
# Verbs that look at values, which meta tensors have not, and why: these run on the CPU under the
# same mode.
ROWS = "leaves out steps in which nobody has a row"
HELD = "multiplies texts with the means of classes a client has alone"
CONVERGED = "stops when its fit has converged"
CACHE = "remembers a prompt's features by its values"
DATA_DEPENDENT = {
    **{(name, "update_many"): ROWS for name in PROMPTS if name not in ("cocoop", "dp-fpl", "fedtpg", "pfedmoap")},
    **{(name, "predict"): CACHE for name in PROMPTS},
    **{(name, "update_many"): ROWS for name in ("faa-clip", "fedclip", "fedavg", "fedprox")},
    **{(name, "update_many"): ROWS for name in ("fedot", "fedot-all-global", "fedot-all-local")},
    **{(name, "update_many"): ROWS for name in ("scaffold", "fedrep")},
    ("pooled", "update"): CONVERGED,
    **{("tofa", verb): HELD for verb in ("update", "update_many")},
}


def verbs(method):
    """A method's verbs with what they take."""
    method = shorten(method)
    world = toy_world(method)
    shared, local = method.init(world.frozen)
    sent = method.send(shared, "client-0")
    client_pair = [make_client(world, id, 0) for id in ("client-0", "client-1")]
    yield "update", method.update, world.frozen, (sent, local, client_pair[0])
    yield "predict", method.predict, world.frozen, (sent, local, tensors.to_float32(client_pair[0].x))
    if as_stacked(method) is not None:
        stacked_pair = (tensors.stack([sent, sent]), tensors.stack([local, local]))
        yield "update_many", method.update_many, world.frozen, (*stacked_pair, pad_clients(client_pair))


def on_meta(frozen):
    frozen_on_meta = to_device(frozen, META)
    if frozen.text_tower is not None:  # where names end is looked up once, when a tower is made
        frozen_on_meta.text_tower.__dict__["_tokens"] = to_device(frozen.text_tower._tokens, META)
    return frozen_on_meta


CASES = [(name, {}) for name in METHOD_NAMES] + [
    ("lora", {"average": "products"}),
    ("vpt", {"depth": 2}),
    ("fedavg-tower", {"blocks": 1}),
]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_no_verb_mixes_devices(name, settings):
    for verb, plain, frozen, rest in verbs(make(name, **settings)):
        if (name, verb) in DATA_DEPENDENT:
            with pytest.raises((RuntimeError, TypeError)):
                run_on_device(plain, META, on_meta(frozen), *rest)
            with OneDevice():
                run_on_device(plain, CPU, frozen, *rest)
            continue
        with OneDevice():
            result = run_on_device(plain, META, on_meta(frozen), *to_device(rest, META))
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        assert {tensor.device for tensor in made} <= {META}, (verb, made)


def test_a_race_of_maps_runs_under_the_same_mode():
    for verb, plain, frozen, rest in verbs(make("fedot", blocks="auto")):
        if verb != "predict":
            with pytest.raises((RuntimeError, TypeError)):
                run_on_device(plain, META, on_meta(frozen), *rest)
        with OneDevice():
            run_on_device(plain, CPU, frozen, *rest)


@pytest.fixture
def as_before(monkeypatch):
    """Flags and the environment are put back; cuDNN and cuBLAS have theirs without a GPU too."""
    was = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(devices.CUBLAS_VARIABLE, "")
    monkeypatch.delenv(devices.CUBLAS_VARIABLE)
    flags = [
        (torch.backends.cudnn, "deterministic"),
        (torch.backends.cudnn, "benchmark"),
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cuda.matmul, "allow_tf32"),
    ]
    before = [getattr(*flag) for flag in flags]
    yield
    for flag, value in zip(flags, before, strict=True):
        setattr(*flag, value)
    torch.use_deterministic_algorithms(was)


@pytest.mark.usefixtures("as_before")
def test_the_record_tells_device_name_flags_and_precision(monkeypatch):
    settings = build({"method": "fedot"})
    plain = {"training": {"device": "cpu"}}
    assert device_info(settings, in_memory=True) == plain
    assert device_info(settings, in_memory=False)["encoding"] == {"device": "cpu", "precision": "float32"}
    assert device_info(replace(settings, encoder="store:x.npz"), in_memory=False) == plain
    monkeypatch.setattr(manifest, "choose_device", lambda name: torch.device(name))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    description = device_info(replace(settings, device="cuda", access={"device": "mps"}), in_memory=False)
    flags = {
        "deterministic algorithms": True,
        "cudnn.deterministic": True,
        "cudnn.benchmark": False,
        "TF32": False,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert description == {
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
    assert [devices.free_device_memory(torch.device(kind)) for kind in ("cuda", "mps", "cpu")] == [7, 12, 5]
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 21)
    assert devices.free_device_memory(torch.device("mps")) == 0


@pytest.mark.usefixtures("as_before")
def test_rows_stay_on_the_device_where_they_fit_and_are_picked_there(monkeypatch):
    world = toy_world(shorten(make("fedot")))
    away_world = replace(world, method=place_method(world.method, META))
    monkeypatch.setattr(placing, "free_device_memory", lambda device: 4 * world.x.nbytes - 1)
    assert placing.with_resident_rows(away_world).x is world.x
    monkeypatch.setattr(placing, "free_device_memory", lambda device: 4 * world.x.nbytes)
    resident_world = placing.with_resident_rows(away_world)
    assert resident_world.x.device == META and resident_world.y.device == CPU
    assert Sequential(away_world).world.x is Batched(away_world).world.x is resident_world.x
    assert placing.with_resident_rows(resident_world) is resident_world and placing.with_resident_rows(world) is world
    reference = weakref.ref(resident_world.x)
    del away_world, resident_world
    assert reference() is None  # nothing holds a GPU's memory once a training is over
    resident_world = placing.with_resident_rows(replace(world, method=place_method(world.method, META)))
    with OneDevice():
        stacked_clients = stack_clients(resident_world, list(resident_world.members), 0)
        client_data = make_client(resident_world, "client-0", 0)
    assert stacked_clients.x.device == stacked_clients.val_x.device == client_data.x.device == META
    assert stacked_clients.y.device == client_data.y.device == CPU
    plain = stack_clients(world, list(world.members), 0)
    assert stacked_clients.x.shape == plain.x.shape and torch.equal(stacked_clients.y, plain.y)


@pytest.mark.usefixtures("as_before")
def test_a_gpu_takes_larger_chunks_and_no_worker_processes(monkeypatch):
    world = toy_world(shorten(make("fedot")))
    room = 4 * 12 * chunks.CHUNK_ROW_BYTES
    monkeypatch.setattr(placing, "free_device_memory", lambda device: room)
    assert (Batched(world, 3).chunk_factor, Batched(world, 3).workers) == (1, 3)
    engine = Batched(replace(world, method=place_method(world.method, META)), 3)
    assert (engine.chunk_factor, engine.workers, engine.forks) == (8, 1, False)
    monkeypatch.setattr(chunks, "MAX_CLIENTS_PER_CHUNK", 1)
    shared, local = world.method.init(world.frozen)
    tasks = [Task(id, shared, local, True) for id in world.members]
    assert [len(make_chunks(world, tasks, times)) for times in (1, 2, 4)] == [4, 2, 1]


@pytest.mark.parametrize("name", ["fedot", "fedrep", "faa-clip", "fedgh", "promptfl"])
def test_bits_do_not_follow_the_size_of_chunks(name, monkeypatch):
    world = toy_world(shorten(make(name)))
    expected = train_toy(world)
    for limit in (1, 3):
        monkeypatch.setattr(chunks, "MAX_CLIENTS_PER_CHUNK", limit)
        check_same(train_toy(world), expected, 0.0, f"chunks of {limit} differ")


def test_what_all_were_sent_goes_to_a_device_once():
    expanded = torch.arange(6.0).reshape(2, 3).expand(5, 2, 3)
    on_device = to_device({"head": expanded}, META)["head"]
    assert on_device.device == META and on_device.shape == expanded.shape and on_device.stride(0) == 0
    assert torch.equal(to_device(expanded, CPU), expanded) and to_device(expanded[:1], CPU).shape == (1, 2, 3)


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
    world = toy_world(shorten(make("lora")))
    client_data = make_client(replace(world, x=Pages(world.x)), "client-0", 0)
    on_device = to_device(client_data, META)
    assert on_device.x.shape == client_data.x.shape and len(on_device.x) == len(client_data.x)
    index = torch.tensor([2, 0])
    assert on_device.x[index].device == on_device.x.take(index)[:1].device == META
    shared, local = world.method.init(world.frozen)
    on_cpu = replace(client_data, x=devices.DeviceRows(client_data.x, CPU))
    results = [
        world.method.update(world.frozen, shared, local, variant)[0]
        for variant in (on_cpu, make_client(world, "client-0", 0))
    ]
    assert all(torch.equal(results[0][key], results[1][key]) for key in shared)


@pytest.mark.parametrize("name", ["fedot", "fedrep", "tofa", "fedotp", "promptfl-ft", "lora"])
@pytest.mark.usefixtures("as_before")
def test_a_placed_method_gives_the_same_and_is_deterministic(name):
    world = toy_world(shorten(make(name)))
    device_world = replace(world, method=place_method(world.method, CPU))
    assert torch.are_deterministic_algorithms_enabled()
    assert (as_stacked(device_world.method) is None) == (as_stacked(world.method) is None)
    assert type(pickle.loads(pickle.dumps(device_world.method)).update) is type(device_world.method.update)  # noqa: S301
    check_same(train_toy(device_world), train_toy(world), 0.0, "a placed method differs")


def test_auto_takes_the_gpu_that_is_there(monkeypatch):
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=cuda: is_there)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda is_there=mps: is_there)
        assert choose_device("auto").type == expected
    with pytest.raises(SettingsError, match="torch finds no such device"):
        choose_device("cuda")
    method = make("fedot")
    assert with_device(method, "auto") is method


def test_the_record_tells_the_device_of_an_encoder_of_another_package(monkeypatch):
    kind = encoders.Kind("mine:NAME", "made", ("image",), __name__, "my_encoder")
    monkeypatch.setitem(encoders.ENCODERS, "mine", kind)
    settings = replace(build({"method": "fedot"}), encoder="mine:a")
    assert device_info(settings, in_memory=False)["encoding"] == {"device": "cpu"}


def my_encoder(name, *, device="cpu"): ...
