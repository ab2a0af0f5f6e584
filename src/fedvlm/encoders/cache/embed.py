"""Embed a data set through the cache: each image is encoded once, by the process that claims it first."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.data.table import Dataset, Digests, EmbeddedTable, count_classes, select_columns
from fedvlm.encoders import BATCH, Batching, Encoder, Vectors, fingerprint
from fedvlm.encoders.cache import Entry, cache_directory, find_entry, lock_entry
from fedvlm.encoders.cache.rows import Claims, RowFile
from fedvlm.encoders.images import DecoderPool, Prepared, check_main_guard
from fedvlm.encoders.lazy_rows import check_and_map
from fedvlm.encoders.text import class_embeddings
from fedvlm.errors import DataError, EncoderError
from fedvlm.machine import count_cores
from fedvlm.storage.files import NotRegularFileError
from fedvlm.storage.large_tensors import CHUNK_BYTES, concatenate_rows

MAX_INLINE_BYTES = 16_000_000  # of images; these are decoded sooner than worker processes start

Precision = Literal["float32", "float16"]
Progress = Callable[[int, int], None]


MAX_UNREADABLE_FRACTION = 0.05  # above it the run stops instead of skipping images


class DatasetImages:
    """The images of a data set by the digest of their bytes, and which of them cannot be read."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.digests: list[bytes] = []
        self._sizes: dict[bytes, int] = {}  # digest -> bytes
        self._unread: dict[int, str] = {}  # row -> reason
        self._undecoded: dict[bytes, str] = {}  # digest -> reason
        none = 0
        for row in range(len(dataset.source)):
            try:
                data = dataset.source.read(row)
            except (OSError, DataError) as error:
                self.digests.append(b"")
                self._unread[row] = str(error) or type(error).__name__
                none += isinstance(error, NotRegularFileError)  # skipped, but not counted as a damaged image
                continue
            self.digests.append(sha256(data).digest())
            self._sizes[self.digests[-1]] = len(data)
        if not self.digests:
            raise DataError(f"{dataset.name} has no images; check its folder")
        self._times = Counter(self.digests)
        self._lost, self._count = len(self._unread) - none, len(self.digests) - none
        self.first: dict[bytes, int] = {}  # digest -> the first row that has it
        for row, digest in enumerate(self.digests):
            if digest:
                self.first.setdefault(digest, row)
        self._stop_if_many()

    def size(self, digests: Iterable[bytes]) -> int:
        return sum(self._sizes[digest] for digest in digests)

    def name(self, digest: bytes) -> str:
        return self._dataset.source.name(self.first[digest])

    def read(self, digest: bytes) -> bytes:
        try:
            return self._dataset.source.read(self.first[digest])
        except (OSError, DataError):  # it was readable before: the digest will not match
            return b""

    def mark_unreadable(self, digest: bytes, reason: str) -> None:
        self._undecoded[digest] = reason
        self._lost += self._times[digest]
        self._stop_if_many()

    def skipped(self) -> list[tuple[str, str]]:
        pairs = enumerate(self.digests)
        reasons = ((row, self._unread.get(row) or self._undecoded.get(digest)) for row, digest in pairs)
        return [(self._dataset.source.name(row), reason) for row, reason in reasons if reason]

    def _stop_if_many(self) -> None:
        if self._lost > MAX_UNREADABLE_FRACTION * self._count:
            some = "; ".join(f"{name}: {reason}" for name, reason in self.skipped()[:3])
            raise DataError(
                f"at least {self._lost} of the {self._count} images of "
                f"{self._dataset.name} cannot be read, more than {MAX_UNREADABLE_FRACTION:.0%}; "
                f"replace or remove them. The first: {some}"
            )

    def readable_rows(self) -> NDArray[np.int64]:
        """Return the rows that can be read; refuse a class without any."""
        fine = [bool(d) and d not in self._undecoded for d in self.digests]
        rows = np.flatnonzero(np.array(fine))
        before, after = (count_classes(self._dataset, part) for part in (slice(None), rows))
        lost_classes = np.flatnonzero((before > 0) & (after == 0))
        if lost_classes.size:
            name = self._dataset.classes[int(lost_classes[0])]
            problem = f"no image of class {name!r} of {self._dataset.name} can be read"
            raise DataError(f"{problem}; replace the images or remove the class")
        return rows


@dataclass(frozen=True)
class EmbedResult:
    """The embeddings, and how many images were encoded and skipped."""

    embedded: EmbeddedTable
    encoded: int  # images this run encoded; the others were in the cache
    skipped: list[tuple[str, str]]  # images that cannot be read: name and reason
    rows: NDArray[np.int64]  # those of the data set that were not skipped


def embed(
    dataset: Dataset,
    encoder: Encoder,
    *,
    cache: Path | None = None,
    patches: bool = False,
    precision: Precision = "float32",
    workers: int | None = None,
    progress: Progress | None = None,
) -> EmbedResult:
    """Encode the images that the cache lacks, then read everything from it.

    `workers` processes decode images (0: this process does); the default is one less than the cores, or 0 for few
    images. `progress` is called with the number of encoded images and the number to encode.
    """
    if patches and "patches" not in encoder.offers:
        raise EncoderError(f"{encoder.name} has no patch embeddings; it offers {', '.join(sorted(encoder.offers))}")
    check_main_guard()
    images, key = DatasetImages(dataset), fingerprint(encoder)
    with lock_entry(cache or cache_directory(), key, encoder.name) as (entry, claims):
        tables = _Tables(entry, encoder, precision, patches)
        todo = [digest for digest in images.first if not tables.have(digest)]
        if workers is None:
            is_small = images.size(todo) < MAX_INLINE_BYTES
            workers = 0 if is_small else min(8, max(1, count_cores() - 1))
        batch = encoder.batch if todo and isinstance(encoder, Batching) else BATCH
        run = _Run(images, encoder, tables, claims, progress or (lambda done, total: None), batch)
        with DecoderPool(encoder.preprocess, workers, prefetch=2 * batch) as decoders:
            run.encode_all(todo, decoders)
        rows, skipped = images.readable_rows(), images.skipped()
        content = [images.digests[row] for row in rows]
        grid, text, negative_text = tables.patches, None, None
        if "text" in encoder.offers:
            table = entry.ensure_table("text.float32", "float32", (encoder.dim,))
            text = class_embeddings(encoder, table, dataset.classes, dataset.templates)
            if dataset.findings is not None:
                negative_text = class_embeddings(encoder, table, dataset.classes, dataset.negative_templates)
        embedded = EmbeddedTable(
            name=dataset.name,
            classes=dataset.classes,
            x=_unit_rows(tables.pooled, content),
            **select_columns(dataset, rows),
            content=Digests(b"".join(content)),
            scale=encoder.scale,
            text=text,
            patches=None if grid is None else _grid(grid, content),
            encoder=f"{encoder.name}@{key[:16]}",
            fingerprint="",
            findings=dataset.findings,
            negative_text=negative_text,
        )
    templates = dataset.templates if dataset.findings is None else (*dataset.templates, *dataset.negative_templates)
    embedded = replace(embedded, fingerprint=_fingerprint(embedded, templates))
    return EmbedResult(embedded, run.encoded, skipped, rows)


def read_cached(
    cache: Path, encoder: str, precision: Precision, patches: bool, content: Sequence[bytes]
) -> tuple[Tensor, Any]:
    """Read rows of the cache as `embed` returns them; `encoder` is the beginning of a fingerprint.

    Raises KeyError where one is missing.
    """
    tables = find_entry(cache, encoder).tables()
    x = _unit(tables[f"pooled.{precision}"].read(content))
    return x, _grid(tables["patches.float16"], content) if patches else None


def _grid(table: RowFile, content: Sequence[bytes]) -> Any:
    return check_and_map(table.mapped(content), table.sums(content), table.name)


class _Tables:
    """The tables of the cache that one data set needs."""

    def __init__(self, entry: Entry, encoder: Encoder, precision: Precision, patches: bool) -> None:
        self._entry, self.wants_patches = entry, patches
        self.pooled = entry.ensure_table(f"pooled.{precision}", precision, (encoder.dim,))
        # the number of patches is not known before the first batch
        self.patches = entry.table("patches.float16", "float16", None) if patches else None

    def have(self, digest: bytes) -> bool:
        has_patches = not self.wants_patches or (self.patches is not None and digest in self.patches)
        return has_patches and digest in self.pooled

    def refresh(self) -> None:
        if self.wants_patches and self.patches is None:
            self.patches = self._entry.table("patches.float16", "float16", None)
        for table in (self.pooled, self.patches):
            if table is not None:
                table.refresh()

    def append(self, digests: list[bytes], vectors: Vectors) -> None:
        if vectors.patches is not None and self.wants_patches:
            if self.patches is None:
                shape = vectors.patches.shape[1:]
                self.patches = self._entry.ensure_table("patches.float16", "float16", shape)
            self.patches.append(digests, vectors.patches)
        self.pooled.append(digests, vectors.pooled)


@dataclass
class _Run:
    """Take images through decoders, encoder and cache."""

    images: DatasetImages
    encoder: Encoder
    tables: _Tables
    claims: Claims
    progress: Progress
    size: int  # images per batch; a kill loses at most one batch
    encoded: int = 0
    done: int = 0

    def encode_all(self, todo: list[bytes], decoders: DecoderPool) -> None:
        total = len(todo)
        self.progress(0, total)
        while todo:
            claimed_elsewhere: list[bytes] = []  # by other processes
            prepared = decoders.stream(self._claim_images(todo, claimed_elsewhere))
            while batch := list(islice(prepared, self.size)):
                self._encode(batch)
                self.claims.release(image.digest for image in batch)
                self.done += len(batch)
                self.progress(self.done, total)
            if claimed_elsewhere:
                self.claims.wait(claimed_elsewhere[0])
                self.tables.refresh()
            todo = [digest for digest in claimed_elsewhere if not self.tables.have(digest)]
            self.done = total - len(todo)
            self.progress(self.done, total)

    def _claim_images(self, todo: Iterable[bytes], claimed_elsewhere: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Claim each image just before it is decoded; skip those that other processes have claimed."""
        for digest in todo:
            if not self.claims.take(digest):
                claimed_elsewhere.append(digest)
                continue
            self.tables.refresh()
            if self.tables.have(digest):
                self.claims.release([digest])
                self.done += 1
            else:
                yield digest, self.images.read(digest)

    def _encode(self, batch: list[Prepared]) -> None:
        good: list[Any] = [prepared.image for prepared in batch if prepared.image is not None]
        digests = [prepared.digest for prepared in batch if prepared.image is not None]
        if good:
            answer = self.encoder.embed(good, self.tables.wants_patches)
            self.tables.append(digests, self._checked(answer, digests))
            self.encoded += len(good)
        for prepared in batch:
            if prepared.image is None:
                self.images.mark_unreadable(prepared.digest, prepared.reason)

    def _checked(self, answer: Vectors, digests: list[bytes]) -> Vectors:
        """Convert vectors to the precision of the cache; refuse wrong shapes, zeros, NaN and infinity."""
        with np.errstate(over="ignore"):
            pooled = np.asarray(answer.pooled).astype(self.tables.pooled.dtype)
            grid = None if answer.patches is None else answer.patches.astype(np.float16)
        expected_shape = (len(digests), self.encoder.dim)
        shapes = [pooled.shape]
        if self.tables.wants_patches:
            shapes.append((len(grid), *grid.shape[2:]) if grid is not None else ())
        for shape in shapes:
            if shape != expected_shape:
                raise self._refuse(f"vectors of shape {shape} instead of {expected_shape}", digests[0])
        for row, digest in enumerate(digests):
            if not np.isfinite(pooled[row]).all():
                raise self._refuse("NaN or inf", digest)
            if not pooled[row].any():
                raise self._refuse("a vector of zeros", digest)
            if grid is not None and not np.isfinite(grid[row]).all():
                raise self._refuse("NaN or inf in a patch", digest)
        return Vectors(pooled, grid)

    def _refuse(self, problem: str, digest: bytes) -> EncoderError:
        remedy = "earlier batches are cached: repair the encoder, or remove the image, and run again"
        return EncoderError(f"{self.encoder.name} returned {problem} for {self.images.name(digest)}; {remedy}")


def _unit_rows(table: RowFile, content: list[bytes]) -> Tensor:
    """(content, dim) read checked rows and normalise them; large tables stay in a file."""
    (dim,) = table.shape
    size = max(1, CHUNK_BYTES // (4 * dim))
    starts = range(0, max(1, len(content)), size)
    parts = (_unit(table.read(content[first : first + size])) for first in starts)
    return concatenate_rows(table.folder, (len(content), dim), parts)


def _unit(values: NDArray[Any]) -> Tensor:
    x: Tensor = torch.from_numpy(values).float()
    lengths: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64)
    return x / lengths.float()


def _fingerprint(embedded: EmbeddedTable, templates: tuple[str, ...]) -> str:
    """Digest all that a run on these samples depends on, except the encoder."""
    digest = sha256("\x1e".join(embedded.content).encode())
    columns = [embedded.domains, embedded.clients, embedded.splits]
    columns += [] if embedded.groups is None else [embedded.groups]
    columns += [] if embedded.findings is None else [embedded.findings.ravel().astype(np.str_)]
    for words in (embedded.classes, templates, embedded.labels.astype(str), *columns):
        digest.update("\x1e".join(["\x1d", *words]).encode())
    return digest.hexdigest()
