"""A small encoder that writes down what it is asked, and data sets that live in memory."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedvlm.data.table import Dataset
from fedvlm.encoders import Vectors, fingerprint
from fedvlm.encoders.cache.embed import EmbedResult, embed
from fedvlm.encoders.cache.rows import RowFile

DIM, PATCHES = 16, 3
CHILDREN = get_context("forkserver")  # imports torch once for all the processes of the tests
CHILDREN.set_forkserver_preload(["fedvlm.encoders.cache.embed"])


@dataclass(frozen=True)
class Memory:
    images: tuple[tuple[str, bytes], ...]

    def __len__(self) -> int:
        return len(self.images)

    def name(self, row: int) -> str:
        return self.images[row][0]

    def read(self, row: int) -> bytes:
        return self.images[row][1]


@cache
def png(number: int) -> bytes:
    """Another image for another number; its first pixel says which."""
    image = Image.new("RGB", (8, 8), (number % 256, number // 256, 77))
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def dataset(*images: bytes, labels: Sequence[int] | None = None, **options: Any) -> Dataset:
    rows = len(images)
    source = Memory(tuple((f"image-{row}.png", data) for row, data in enumerate(images)))
    return Dataset(
        **{
            "name": "dots",
            "classes": ("Alarm_Clock", "dog"),
            "source": source,
            "labels": np.array(labels if labels is not None else [r % 2 for r in range(rows)]),
            "domains": np.array([f"domain-{row}" for row in range(rows)]),
            "clients": np.array([f"client-{row}" for row in range(rows)]),
            "splits": np.array(["train"] * rows),
            **options,
        }
    )


def numbered(count: int) -> Dataset:
    return dataset(*(png(number) for number in range(count)))


def first_pixel(image: Image.Image) -> NDArray[np.float32]:
    return np.asarray(image, dtype=np.float32)[0, 0]


@dataclass
class Counting:
    """Three numbers of the first pixel times a fixed matrix; every image asked for is noted."""

    log: Path | None = None  # numbers of the images, one a line, also from other processes
    delay: float = 0.0
    offers: frozenset[str] = frozenset({"image", "text", "patches"})
    preprocess: Any = first_pixel
    name: str = "counting"
    dim: int = DIM
    scale: float = 50.0
    identity: dict[str, str] = field(default_factory=dict)
    images: list[int] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    def embed(self, batch: Sequence[Any], patches: bool) -> Vectors:
        if self.preprocess is None:
            batch = [first_pixel(Image.open(BytesIO(data))) for data in batch]
        x = np.stack(list(batch))
        numbers = [int(r + 256 * g) for r, g, _ in x]
        self.images += numbers
        if self.log:
            append_line(self.log, "".join(f"{number}\n" for number in numbers))
        sleep(self.delay)
        matrix = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32)
        pooled = np.einsum("bi,ij->bj", x, matrix)  # not @: its rounding depends on the batch
        shift = np.arange(PATCHES, dtype=np.float32)[None, :, None]
        return Vectors(pooled, (pooled[:, None] / 100 + shift).astype(np.float16) if patches else None)

    def embed_text(self, sentences: Sequence[str]) -> Tensor:
        self.sentences += sentences
        seeds = [int.from_bytes(sha256(sentence.encode()).digest()[:4], "big") for sentence in sentences]
        vectors = [np.random.default_rng(seed).normal(size=DIM) for seed in seeds]
        return torch.nn.functional.normalize(torch.tensor(np.array(vectors)).float(), dim=1)


FINGERPRINT = fingerprint(Counting())


def append_line(path: Path, text: str) -> None:
    """One write to the end, so that lines of several processes never mix and none is lost."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, text.encode())
    os.close(file)


def read_counts(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def run(data: Dataset, encoder: Any, cache: Path, **how: Any) -> EmbedResult:
    return embed(data, encoder, **{"cache": cache, "workers": 0, **how})


def digests(*numbers: int) -> list[bytes]:
    return [sha256(bytes([number % 256, number // 256])).digest() for number in numbers]


def values(*numbers: int, dim: int = 4) -> np.ndarray:
    return np.array([np.arange(dim) + number for number in numbers], dtype=np.float32)


def table(folder: Path, dtype: str = "float32", dim: int = 4) -> RowFile:
    return RowFile(folder / f"pooled.{dtype}", folder / "lock", dtype, (dim,))


def filled(folder: Path, *numbers: int) -> RowFile:
    rows = table(folder)
    rows.append(digests(*numbers), values(*numbers))
    return rows
