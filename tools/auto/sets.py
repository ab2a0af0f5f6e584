"""The data sets that auto is measured on: the demo, digits as three sites, and stored embeddings.

Stores are looked for in the folder of --stores; those that are missing are left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.data.table import EmbeddedTable
from fedvlm.runner.load import load
from fedvlm.runner.settings import build

SIX = ["dog", "elephant", "giraffe", "horse", "house", "person"]  # the classes with a text vector
DISJOINT = {"partition": "pathological", "count": 10, "shots": 16}
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LODO, OWN = "leave-one-domain-out", "own-test"


@dataclass(frozen=True)
class Set:
    name: str
    clients: dict[str, Any]
    protocol: str
    rows: EmbeddedTable


def every(stores: Path, work: Path) -> Iterator[tuple[str, Callable[[], Set]]]:
    """Names, and how to open each; images with patches and a text tower, which FedOTP needs."""

    def stored(file: str, text: bool = True, **source: Any) -> EmbeddedTable:
        values = {"method": "alone", "encoder": f"store:{stores / file}", "source": source}
        rows = load(build(values), silent)[0]
        return rows if text else replace(rows, text=None)

    def demo() -> EmbeddedTable:
        return load(build({"method": "fedotp"}), silent)[0]

    def digits() -> EmbeddedTable:
        folder = write_digits(work / "digits")
        return load(build({"method": "fedotp", "data": str(folder)}), silent)[0]

    pacs, pets = "pacs_vitb16.npz", "pets23_vitb32.npz"
    caltech, flowers = "caltech101_vitb32.npz", "flowers102_vitb32.npz"
    mixed = {"partition": "dirichlet", "count": 4, "alpha": 1.0}
    domain = {"partition": "domain"}
    sites = {**domain, "calibration_ratio": 1 / 3}  # as any folder of images
    table: list[tuple[str, dict[str, Any], str, Callable[[], EmbeddedTable], str]] = [
        ("demo, styles", domain, LODO, demo, ""),
        ("demo, two classes each", {"partition": "pathological", "count": 8}, OWN, demo, ""),
        ("digits, three sites", sites, OWN, digits, ""),
        ("digits, a site unseen", sites, LODO, digits, ""),
        ("pets, disjoint", DISJOINT, OWN, lambda: stored(pets), pets),
        ("pets, mixed", mixed, OWN, lambda: stored(pets), pets),
        ("caltech, disjoint", DISJOINT, OWN, lambda: stored(caltech), caltech),
        ("caltech, mixed", mixed, OWN, lambda: stored(caltech), caltech),
        ("flowers, disjoint", DISJOINT, OWN, lambda: stored(flowers), flowers),
        ("flowers, mixed", mixed, OWN, lambda: stored(flowers), flowers),
        ("pacs, six classes", domain, LODO, lambda: stored(pacs, classes=SIX), pacs),
        ("pacs, no text", domain, LODO, lambda: stored(pacs, False), pacs),
        ("pacs, six rows a class", {**domain, "shots": 6}, LODO, lambda: stored(pacs, False), pacs),
    ]
    for name, clients, protocol, rows, file in table:
        if not file or (stores / file).exists():

            def opened(
                name: str = name,
                clients: dict[str, Any] = clients,
                protocol: str = protocol,
                rows: Callable[[], EmbeddedTable] = rows,
            ) -> Set:
                return Set(name, clients, protocol, rows())

            yield name, opened


def silent(what: str, done: int, total: int) -> None:
    """Progress nobody looks at."""


def write_digits(folder: Path) -> Path:
    """scikit-learn's digits at three sites: as they are, inverted, dim and blurred; own mixes."""
    from PIL import Image, ImageFilter
    from sklearn.datasets import load_digits

    if folder.exists():
        return folder
    digits, draw = load_digits(), np.random.default_rng(0)
    mix = draw.dirichlet(np.ones(3), size=10)
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        site = draw.choice(3, p=mix[label])
        gray = Image.fromarray((image / 16 * 255).astype(np.uint8)).resize((48, 48))
        pixels = np.asarray(gray, dtype=np.float64)
        if site == 1:
            pixels = 255 - pixels
        if site == 2:
            blurred = np.asarray(gray.filter(ImageFilter.GaussianBlur(2)), dtype=np.float64)
            pixels = 0.6 * blurred + 60 + draw.normal(0, 15, blurred.shape)
        place = folder / f"site-{site}" / DIGITS[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number}.png")
    return folder
