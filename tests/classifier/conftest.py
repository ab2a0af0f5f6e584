"""Images of two sites, runs on them, and the command line."""

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import fedvlm
from fedvlm import cli


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Images of two plain classes from two sites."""
    place = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for number in range(80):
        red = number % 2
        path = place / f"site-{number // 2 % 2}" / ("red", "blue")[red] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 90, (32, 32, 3), dtype=np.uint8)
        pixels[..., 2 * red] += 150
        Image.fromarray(pixels).save(path)
    return place


@pytest.fixture(scope="session")
def runs(folder, tmp_path_factory):
    made = {}

    def get(name, **settings):
        key = (name, *sorted(settings.items()))
        if key not in made:
            place = tmp_path_factory.mktemp("run") / "r"
            method = {"name": name, **settings}
            made[key] = fedvlm.run(method, data=str(folder), protocol="own-test", out=place)
        return made[key]

    return get


@pytest.fixture
def call():
    def invoke(*words):
        return CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)

    return invoke
