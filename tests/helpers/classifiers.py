"""A classifier of a run on drawn images, exported with enough calibration samples to promise coverage."""

import numpy as np
from PIL import Image

import fedvlm
from fedvlm.classifier.export import export


def draw_images(place, n_images=720, seed=0):
    """Draw two plain classes at two sites."""
    draw = np.random.default_rng(seed)
    for number in range(n_images):
        red = number % 2
        path = place / f"site-{number // 2 % 2}" / ("red", "blue")[red] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 90, (16, 16, 3), dtype=np.uint8)
        pixels[..., 2 * red] += 150
        Image.fromarray(pixels).save(path)
    return place


def export_classifier(place, method="ridge", **settings):
    """Run a method on drawn images and export the classifier of site-0; return its folder and the images."""
    images = draw_images(place / "images")
    run = fedvlm.run(method, data=str(images), protocol="own-test", out=place / "run", **settings)
    export(run.folder, "site-0", place / "classifier")
    return place / "classifier", images
