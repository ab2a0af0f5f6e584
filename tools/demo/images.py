"""The image set as the gate reads it, and what nearly repeats it."""

import io
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedvlm.data.partition import Clients, SampleList, image_digest, make_partition

from .model import MEAN, STD, normalized
from .sets import CLASSES, DOMAINS

SEEDS = (0, 1, 2)  # of the demo experiment


class Demo:
    """The image set as the project reads it: pixels and labels for each domain."""

    def __init__(self, path: Path) -> None:
        self.classes = list(CLASSES)
        self.pixels: dict[str, Tensor] = {}
        self.labels: dict[str, NDArray[np.int64]] = {}
        self.untested: dict[str, NDArray[np.bool_]] = {}
        with zipfile.ZipFile(path) as archive:
            for domain in DOMAINS:
                members = [n for n in archive.namelist() if n.startswith(domain + "/")]
                files = [archive.read(n) for n in members]
                arrays = [np.asarray(Image.open(io.BytesIO(f)).convert("RGB")) for f in files]
                stack = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
                self.pixels[domain] = normalized(stack.float() / 255)
                self.labels[domain] = np.array([self.classes.index(n.split("/")[1]) for n in members])
                self.untested[domain] = untested(domain, self.labels[domain], files)

    def split(self, domain: str, seed: int) -> list[NDArray[np.int64]]:
        """Train, validation and test rows: 60/20/20 of each class, drawn for this domain alone."""
        generator = np.random.default_rng([seed, list(DOMAINS).index(domain)])
        parts: list[list[int]] = [[], [], []]
        for label in range(len(self.classes)):
            rows = generator.permutation(np.flatnonzero(self.labels[domain] == label))
            first, second = round(0.6 * len(rows)), round(0.8 * len(rows))
            for part, chunk in zip(parts, np.split(rows, [first, second]), strict=True):
                part.extend(chunk.tolist())
        return [np.array(part) for part in parts]


def untested(domain: str, labels: NDArray[np.int64], files: list[bytes]) -> NDArray[np.bool_]:
    """Which rows of a domain no seed of the demo experiment tests on."""
    nothing = np.full(len(files), "")
    content = [image_digest(file) for file in files]
    table = SampleList(tuple(CLASSES), labels, np.full(len(files), domain), nothing, nothing, content)
    free = np.ones(len(files), dtype=np.bool_)
    for seed in SEEDS:
        free[make_partition(table, Clients(), seed).clients[domain].test] = False
    return free


def near_copies(images: NDArray[np.uint8], demo: Demo, limit: float = 0.006) -> NDArray[np.bool_]:
    """Listing of the pretraining images that nearly repeat a demo image (mean squared difference).

    Compared at 16 pixels in colour, and only the nearest demo image counts.
    """
    small = F.avg_pool2d(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255, 3).flatten(1)
    theirs = torch.cat([F.avg_pool2d(p * STD + MEAN, 3).flatten(1) for p in demo.pixels.values()])
    nearest = torch.cat([torch.cdist(c, theirs).amin(1) for c in torch.split(small, 1024)])
    is_near: NDArray[np.bool_] = (nearest**2 / small.shape[1] < limit).numpy()
    return is_near
