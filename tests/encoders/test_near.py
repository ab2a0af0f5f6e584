"""Images saved again are found across parts; images that only look alike are not."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedvlm.cli import app
from fedvlm.data import open_dataset
from fedvlm.data.clients import Clients
from fedvlm.data.partition import list_samples, make_partition
from fedvlm.encoders.near_duplicates import near_duplicates

CLIENTS = Clients(partition="dirichlet", count=2, alpha=100.0, min_samples=2)
OPTIONS = [
    word
    for pair in ("partition=dirichlet", "count=2", "alpha=100.0", "min_samples=2")
    for word in ("--set", f"clients.{pair}")
]


def scene(seed):
    """Smooth, as photographs are, and different for every seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC)


def saved(image, **how):
    stream = BytesIO()
    image.save(stream, **how)
    return stream.getvalue()


AGAIN = {
    "other bytes, same pixels": lambda image: saved(image, format="PNG", compress_level=1),
    "another format": lambda image: saved(image, format="BMP"),
    "compressed": lambda image: saved(image, format="JPEG", quality=70),
    "scaled": lambda image: saved(image.resize((48, 48)), format="PNG"),
}


def plant(root, again=None):
    """Two classes of ten images in train and five in test; the first of test is one of train."""
    for label in range(2):
        for row in range(15):
            part = "train" if row < 10 else "test"
            file = root / part / f"class{label}" / f"{row}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(saved(scene(100 * label + row), format="PNG"))
    if again:
        (root / "test/class0/10.png").write_bytes(again(scene(3)))
    return root


def find_duplicates(root):
    dataset = open_dataset(str(root))
    return near_duplicates(dataset, make_partition(list_samples(dataset), CLIENTS, 0))


@pytest.mark.parametrize("how", AGAIN)
def test_image_saved_again_is_found_in_the_other_part(tmp_path, how):
    (duplicate,) = find_duplicates(plant(tmp_path / "set", AGAIN[how]))
    assert duplicate.name == "test/class0/10.png"
    assert duplicate.duplicate_of.endswith("/class0/3.png")
    assert duplicate.split == "test"
    assert duplicate.duplicate_split in ("train", "validation")


def test_different_images_are_not_near(tmp_path):
    assert find_duplicates(plant(tmp_path / "set")) == []


def test_near_duplicates_are_reported_only_when_asked_for_and_stay(tmp_path):
    root = plant(tmp_path / "set", AGAIN["compressed"])
    words = ["partition", str(root), *OPTIONS]
    plain = CliRunner().invoke(app, words)
    result = CliRunner().invoke(app, [*words, "--near-duplicates"])
    assert plain.exit_code == result.exit_code == 0
    assert "near-duplicate" not in plain.output
    assert "test/class0/10.png (test)" in result.output
    assert result.output.startswith(plain.output)
    assert "1 near-duplicates across splits; none was dropped" in result.output
