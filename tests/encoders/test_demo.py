"""The files that are shipped: what the demo model and the demo images are, not how they look."""

import io
import socket
from collections import Counter
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedvlm.data import open_dataset
from fedvlm.data.clients import Clients
from fedvlm.data.partition import make_partition
from fedvlm.encoders import ENCODERS, open_encoder
from fedvlm.encoders.cache.embed import embed
from fedvlm.encoders.huggingface import demo_directory
from fedvlm.encoders.images import Pixels

MEGABYTE = 1_000_000
DOMAINS = {"noto", "twemoji", "fluent-flat", "high-contrast"}


@pytest.fixture(scope="module")
def network_requests():
    """Every address that anybody tried to reach since the first test of this file."""
    requests = []

    def refuse(*address, **_):
        requests.append(address)
        raise OSError("the network is off in this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield requests


@pytest.fixture(scope="module")
def encoder(network_requests):
    return open_encoder("demo")


@pytest.fixture(scope="module")
def dataset(network_requests):
    return open_dataset("demo")


@pytest.fixture(scope="module")
def embedded(dataset, encoder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    done = embed(dataset, encoder, cache=cache, workers=0)
    assert not done.skipped
    return done.embedded


@pytest.fixture(scope="module")
def images(dataset):
    """Decoded, because two files may hold the same image."""
    return [Image.open(io.BytesIO(dataset.source.read(row))).convert("RGB") for row in range(len(dataset.source))]


def size(folder: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


def test_the_demo_runs_from_pictures_to_embeddings_without_network(network_requests, embedded):
    assert len(embedded.x) == len(embedded.labels) > 1000
    assert network_requests == []


def test_the_demo_offers_all_that_its_kind_says(encoder):
    assert encoder.offers == set(ENCODERS["demo"].offers)


def test_what_the_demo_offers_is_there(encoder, dataset, images):
    pixels = [encoder.preprocess(image) for image in images[:3]]
    answer = encoder.embed(pixels, patches=True)
    assert answer.pooled.shape == (3, encoder.dim)
    assert answer.patches.shape == (3, 36, encoder.dim)
    assert encoder.embed_text(["a cat", "a dog"]).shape == (2, encoder.dim)
    assert encoder.text_tower(dataset.classes, "{}").room >= 16  # context vectors, as prompt papers use
    tower = encoder.image_tower()
    again = tower(tower.weights, torch.from_numpy(np.stack(pixels)))
    assert torch.allclose(again, torch.from_numpy(answer.pooled), atol=1e-5)


def test_pictures_reach_the_demo_model_without_resampling(encoder, images):
    assert isinstance(encoder.preprocess, Pixels)
    assert {image.size for image in images} == {(encoder.preprocess.size,) * 2}


def test_the_prompt_path_gives_the_official_text_features(encoder, dataset):
    words = "a picture of a"
    ids = encoder.tokenizer(words, add_special_tokens=False, return_tensors="pt")["input_ids"]
    context = encoder.model.text_model.embeddings.token_embedding(ids[0])
    features = encoder.text_tower(dataset.classes, "{}.")(context)
    sentences = [f"{words} {name}." for name in dataset.classes]
    tokens = encoder.tokenizer(sentences, padding=True, return_tensors="pt")
    official = encoder.model.get_text_features(**tokens).pooler_output
    official = torch.nn.functional.normalize(official, dim=-1)
    assert torch.allclose(features, official, atol=1e-5)
    assert torch.allclose(encoder.embed_text(sentences), official, atol=1e-5)
    assert (official @ official.T).fill_diagonal_(0).max() < 0.99  # it tells the classes apart


@pytest.mark.parametrize("domain", sorted(DOMAINS))
def test_zero_shot_is_at_least_three_times_chance(embedded, domain):
    in_domain = embedded.domains == domain
    guess = nearest(embedded.x[in_domain], embedded.text)
    assert (guess == embedded.labels[in_domain]).mean() >= 3 / len(embedded.classes)


def nearest(rows, text) -> np.ndarray:
    return (rows @ text.T).argmax(1).numpy()


@pytest.fixture(scope="module")
def views(encoder, images):
    """Unit pooled embeddings, and the mean over the unit patches, of every image."""
    pixels = [encoder.preprocess(image) for image in images]
    vectors = [encoder.embed(pixels[at : at + 128], patches=True) for at in range(0, len(pixels), 128)]
    pooled = torch.from_numpy(np.concatenate([batch.pooled for batch in vectors]))
    patches = torch.from_numpy(np.concatenate([batch.patches for batch in vectors])).float()
    unit = torch.nn.functional.normalize
    return unit(pooled, dim=-1), unit(patches, dim=-1).mean(1)


@pytest.fixture(scope="module")
def endings(encoder, dataset):
    """The class texts without and with a full stop."""
    (template,) = dataset.templates
    return [encoder.embed_text([template.format(name) + end for name in dataset.classes]) for end in ("", ".")]


def test_the_mean_patch_knows_the_class_texts_nearly_as_well_as_the_pooled_view(views, endings, dataset):
    pooled, patch = ((nearest(view, endings[0]) == dataset.labels).mean() for view in views)
    assert patch >= 0.85 * pooled


@pytest.mark.parametrize("view", [0, 1], ids=["pooled", "mean patch"])
def test_a_full_stop_changes_zero_shot_by_two_points_at_most(views, endings, dataset, view):
    plain, stopped = ((nearest(views[view], text) == dataset.labels).mean() for text in endings)
    assert abs(plain - stopped) <= 0.02


def test_the_demo_has_four_domains_with_the_same_classes(dataset):
    assert set(dataset.domains) == DOMAINS
    assert 12 <= len(dataset.classes) <= 20
    of_each = [Counter(dataset.labels[dataset.domains == domain]) for domain in sorted(DOMAINS)]
    assert all(counts == of_each[0] for counts in of_each)
    assert min(of_each[0].values()) >= 10
    assert set(of_each[0]) == set(range(len(dataset.classes)))


def test_no_demo_picture_is_there_twice(images):
    drawn = Counter(image.tobytes() for image in images)
    assert max(drawn.values()) == 1


def test_every_row_of_the_demo_is_in_one_part_of_one_client(embedded):
    partition = make_partition(embedded, Clients(), seed=0)
    assert partition.dropped == 0
    assert set(partition.clients) == DOMAINS
    parts = [(m.train, m.validation, m.test) for m in partition.clients.values()]
    assigned = np.concatenate([rows for member in parts for rows in member])
    assert np.array_equal(np.sort(assigned), np.arange(len(embedded.labels)))


def test_the_demo_is_small():
    model, data = demo_directory(), Path(str(files("fedvlm.data") / "demo"))
    assert 0 < size(model, "*.safetensors") <= 6 * MEGABYTE
    assert size(model) + size(data) <= 8 * MEGABYTE


@pytest.mark.parametrize("template", ["a picture of a {}", "a black{}, drawn", "sun{}s", "{} here"])
def test_the_templates_own_tokens_give_its_text_features_also_where_words_join(encoder, dataset, template):
    tower = encoder.text_tower(dataset.classes, template)
    expected = encoder.embed_text([template.replace("{}", name) for name in dataset.classes])
    assert torch.allclose(tower(tower.prefix), expected, atol=1e-5)
