"""Images without a label at a deployed site."""

import numpy as np
from PIL import Image

from fedvlm.deploy.kits import SiteKit
from fedvlm.deploy.site.policy import Policy
from fedvlm.deploy.site.training import load_site_training
from fedvlm.engines.client import make_client
from fedvlm.runner.settings import build

CLASSES = ["cat", "dog", "emu"]


def write_images(root):
    draw = np.random.default_rng(0)
    for name in ("dog", "emu", "unlabelled"):  # this site has no cat
        for number in range(20):
            path = root / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
    return root


def site_client(folder, policy):
    kit = SiteKit(folder, "north", "", str(write_images(folder / "images")), "demo", source={"layout": "class"})
    settings = build({"method": "auto", "protocol": "own-test"})
    spec = {"seed": 0, "training": "all", "classes": CLASSES}
    site_training = load_site_training(kit, settings, spec, None, policy)
    return site_training, make_client(site_training.world, "north", 0)


def test_a_site_learns_from_its_folder_of_images_without_a_label(tmp_path):
    site_training, client = site_client(tmp_path, Policy())
    assert client.unlabelled.shape == (20, site_training.world.frozen.dim)
    assert set(site_training.labels.tolist()) == {1, 2} and set(client.y.tolist()) == {1, 2}


def test_the_most_samples_of_its_policy_limit_them_too(tmp_path):
    _, client = site_client(tmp_path, Policy(max_samples=7))
    assert len(client.unlabelled) == len(client.y) == 7
