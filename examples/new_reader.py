"""A kind of data of one's own: images, labels and sites in one .npz file, opened as npz:FILE.

Run it: python examples/new_reader.py
"""

from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from fedvlm.data import Clients, Dataset, list_samples, make_partition, open_dataset, register, tabulate


class Rows:
    """Where the bytes of the images are; each is asked for once, when it is embedded."""

    def __init__(self, pixels: Any) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, row: int) -> str:
        return f"row {row}"

    def read(self, row: int) -> bytes:
        out = BytesIO()
        Image.fromarray(self.pixels[row]).save(out, "PNG")
        return out.getvalue()


def read_npz(path: str, sites: str = "sites") -> Dataset:
    """An .npz with images (rows, height, width, 3), labels, and a column of sites."""
    with np.load(path, allow_pickle=False) as file:
        columns = {key: file[key] for key in ("images", "labels", sites)}
    labels, clients = columns["labels"].tolist(), columns[sites].tolist()
    return tabulate(Path(path).stem, Rows(columns["images"]), labels, clients=clients)


register("npz", read_npz)


def main() -> None:
    with TemporaryDirectory() as folder:
        draw, file = np.random.default_rng(0), f"{folder}/scans.npz"
        images = draw.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
        labels, wards = np.tile(["healthy", "ill"], 20), np.repeat(["east", "west"], 20)
        np.savez(file, images=images, labels=labels, ward=wards)
        data = open_dataset(f"npz:{file}", sites="ward")
        for member in make_partition(list_samples(data), Clients(partition="own"), seed=0).clients.values():
            print(f"{data.name}, {member.id}: {len(member.train)} rows to train")


if __name__ == "__main__":
    main()
