"""A run that trains the image tower, from images on disk to its table."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

import fedvlm
from fedvlm import machine
from fedvlm.core import make
from fedvlm.errors import SettingsError
from fedvlm.runner import forecast as room
from fedvlm.runner.load import load
from fedvlm.runner.settings import Settings, build
from fedvlm.testing import toy_world
from tests.helpers import tiny_models

DOMAINS, CLASSES, ROWS = ("art", "photo", "sketch"), ("cat", "dog"), 10
NOW = {"batch_size": 8, "rounds": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.clip(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Three domains of two classes; one of the sixty images is damaged."""
    root = tmp_path_factory.mktemp("images")
    draw = np.random.Generator(np.random.PCG64(0))
    for domain in DOMAINS:
        for label in CLASSES:
            (root / domain / label).mkdir(parents=True)
            for row in range(ROWS):
                noise = draw.integers(0, 256, (20, 20, 3), np.uint8)
                Image.fromarray(noise).save(root / domain / label / f"{row}.png")
    content = (root / "art" / "dog" / "3.png").read_bytes()
    (root / "art" / "dog" / "3.png").write_bytes(content[:50])
    return root


def settings_of(model, images, **options):
    return {"data": str(images), "encoder": f"hf:{model}", **options}


def test_pictures_stay_beside_their_embeddings_when_one_is_damaged(model, images):
    settings = build({"method": "fedavg-tower", **settings_of(model, images)})
    rows, notes = load(settings, lambda *progress: None)
    assert len(rows.images) == len(rows.x) == 59
    assert len(notes) == 1 and "art/dog/3.png" in notes[0]
    features = rows.image_tower({}, rows.images[torch.arange(59)])
    assert torch.allclose(normalize(features, dim=1), rows.x, atol=1e-5)


def test_a_run_of_two_processes_is_a_run_of_one(model, images, tmp_path):
    def ran(workers):
        return fedvlm.run(
            {"name": "moon-tower", "lr": 1e-2, **NOW},
            **settings_of(model, images, workers=workers),
            out=tmp_path / str(workers),
        )

    one_process, two = ran(1), ran(2)
    lines = [one_line for one_line in one_process.rounds if one_line["training"] == "0-art"]
    assert len(lines) == 2
    assert one_process.tables == two.tables
    assert [line["loss"] for line in one_process.rounds] == [line["loss"] for line in two.rounds]
    assert lines[1]["loss"] != lines[0]["loss"]
    logits = two.personalised("photo").logits(torch.zeros(2, 3, 16, 16))
    assert logits.shape == (2, len(CLASSES)) and logits.isfinite().all()


def test_a_smoke_run_takes_few_images(model, images, tmp_path, monkeypatch):
    monkeypatch.setattr("fedvlm.runner.load.SMOKE_SAMPLES", 30)
    made = fedvlm.run({"name": "lora", **NOW}, **settings_of(model, images, smoke=True), out=tmp_path / "run")
    sizes = made.manifest["clients"].values()
    assert sum(sum(counts.values()) for counts in sizes) <= 30
    assert "lora trains 2,496 parameters" in made.manifest["notes"][-1]


def test_rows_without_pictures_are_refused(rows, tmp_path):
    with pytest.raises(SettingsError, match="fedavg-tower needs image tower of the encoder"):
        fedvlm.run("fedavg-tower", embedded=rows, out=tmp_path / "run")


def test_what_does_not_fit_is_refused_before_the_work(model, images, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "free_memory", lambda: 1_000_000)
    with pytest.raises(SettingsError, match=r"would take about 0\.\d\d GB and 0\.00 GB are free"):
        fedvlm.run({"name": "fedavg-tower", **NOW}, **settings_of(model, images), out=tmp_path / "run")
    assert not (tmp_path / "run" / "rounds.jsonl").exists()
    monkeypatch.setattr(room, "free_memory", lambda: None)  # nobody says, so nobody refuses
    fedvlm.run(
        {"name": "vpt", "batch_size": 8, "rounds": 1},
        **settings_of(model, images),
        out=tmp_path / "other",
    )


def test_on_a_gpu_what_trains_has_to_fit_there_and_the_rest_here(monkeypatch):
    world = toy_world(make("fedavg-tower"), sizes=(3,))
    arguments = (Settings(world.method, device="cuda"), world.frozen, world.x.shape[1:], 10)
    expected = room.estimate(*arguments)
    assert expected.processes == 1 and expected.total == expected.all_clients + expected.concurrent
    monkeypatch.setattr(room, "choose_device", torch.device)
    for host_free, device_free, short in (
        (expected.all_clients, expected.concurrent, ""),
        (expected.all_clients, expected.concurrent - 1, "GB on cuda and"),
        (expected.all_clients - 1, expected.concurrent, "GB and"),
    ):
        monkeypatch.setattr(room, "free_memory", lambda host_free=host_free: host_free)
        monkeypatch.setattr(room, "free_device_memory", lambda device, device_free=device_free: device_free)
        with pytest.raises(SettingsError, match=short) if short else nullcontext():
            room.check_memory(*arguments)


def estimate(name, clients=10, workers=1, **settings):
    world = toy_world(make(name, **settings), sizes=(3,))
    run = Settings(world.method, workers=workers)
    return room.estimate(run, world.frozen, world.x.shape[1:], clients)


def test_auto_counts_the_processes_of_a_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    world = toy_world(make("fedavg-tower"), sizes=(3,))
    run = Settings(world.method, workers=3, device="auto")
    assert room.estimate(run, world.frozen, world.x.shape[1:], 10).processes == 3


def test_the_estimate_grows_with_what_is_held():
    full, part = estimate("fedavg-tower"), estimate("fedavg-tower", blocks=1)
    assert part.trained < full.trained and part.graph < full.graph
    assert estimate("fedavg-tower", batch_size=64).graph > 1.9 * full.graph
    assert estimate("fedavg-tower", clients=20).total == full.total + 10 * full.upload
    assert estimate("fedavg-tower", workers=2).total > full.total
    moon = estimate("moon-tower")
    assert 2 * moon.local == moon.upload and moon.total > full.total
    lora = estimate("lora", average="products")
    assert lora.upload == lora.trained < lora.shared
    assert estimate("lora", rank=0).total == 0


def test_this_machine_has_memory(monkeypatch, tmp_path):
    free = machine.free_memory()
    assert free is None or free > 1 << 20
    for word, content in (("max", "5000000"), ("current", "4000000"), ("stat", "inactive_file 7\n")):
        (tmp_path / f"memory.{word}").write_text(content)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.free_memory() == 1_000_007
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory() != 1_000_007
    machine.release_memory()
