"""The limit below which two images count as nearly the same: fedvlm.encoders.near_duplicates.MAX_DUPLICATE_RMS.

python -m tools.near [--data demo] [--images 300]
Only training images are looked at. Each is saved again in the usual ways, and held against itself
and against the nearest other image; the limit is half of the least of the latter.
"""

import argparse
from io import BytesIO

import numpy as np
from PIL import Image

from fedvlm.data import open_dataset
from fedvlm.data.clients import Clients
from fedvlm.data.partition import list_samples, make_partition
from fedvlm.encoders.images import decode
from fedvlm.encoders.near_duplicates import MAX_DUPLICATE_RMS, thumbnail

WAYS = {
    "PNG": ("PNG", 1.0, {}),
    "JPEG 95": ("JPEG", 1.0, {"quality": 95}),
    "JPEG 85": ("JPEG", 1.0, {"quality": 85}),
    "JPEG 70": ("JPEG", 1.0, {"quality": 70}),
    "JPEG 50": ("JPEG", 1.0, {"quality": 50}),
    "WebP 80": ("WEBP", 1.0, {"quality": 80}),
    "half as large": ("PNG", 0.5, {}),
    "twice as large": ("PNG", 2.0, {}),
    "half as large, JPEG 70": ("JPEG", 0.5, {"quality": 70}),
}


def again(data: bytes, kind: str, factor: float, options: dict[str, int]) -> bytes:
    image = decode(data)
    size = (max(1, round(factor * image.width)), max(1, round(factor * image.height)))
    file = BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(file, kind, **options)
    return file.getvalue()


def apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.sqrt(((one.astype(float) - other.astype(float)) ** 2).mean(-1))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--data", default="demo")
    ask.add_argument("--images", type=int, default=300)
    told = ask.parse_args()
    dataset = open_dataset(told.data)
    rows = np.concatenate([one.train for one in make_partition(list_samples(dataset), Clients(), 0).clients.values()])
    rows = np.random.default_rng(0).permutation(rows)[: told.images]
    files = [dataset.source.read(int(row)) for row in rows]
    small = np.stack([thumbnail(data) for data in files])
    nearest = np.array([np.partition(apart(one, small), 1)[1] for one in small])
    limit = nearest.min() / 2
    print(f"nearest other image: least {nearest.min():.1f}, median {np.median(nearest):.1f}; ", end="")
    print(f"half of the least is {limit:.1f}, and NEAR is {MAX_DUPLICATE_RMS}\n")
    print("| saved again | median | 99 % | largest | found |\n|---|---|---|---|---|")
    for name, (kind, factor, options) in WAYS.items():
        other = np.stack([thumbnail(again(data, kind, factor, options)) for data in files])
        far = apart(small, other)
        numbers = [np.median(far), np.quantile(far, 0.99), far.max()]
        print(f"| {name} | {' | '.join(f'{n:.1f}' for n in numbers)} | {(far <= MAX_DUPLICATE_RMS).mean():.1%} |")


if __name__ == "__main__":
    main()
