"""Images as rows that are decoded when they are asked for."""

import os
import warnings
from hashlib import sha256
from multiprocessing import get_context
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from fedvlm.data.sources import Archive
from fedvlm.encoders.images import Pixels, decode
from fedvlm.encoders.lazy_rows import stream_images
from fedvlm.errors import DataError, EncoderError
from tests.helpers import counting

CUT = Pixels(size=(6, 5), crop=None)
IMAGE_BYTES = 3 * 6 * 5


class Read:
    """A source that counts how often it is read."""

    def __init__(self, *images: bytes) -> None:
        self.images, self.count = list(images), 0

    def __len__(self) -> int:
        return len(self.images)

    def name(self, row: int) -> str:
        return f"image-{row}.png"

    def read(self, row: int) -> bytes:
        self.count += 1
        return self.images[row]


def digests(images) -> list[str]:
    return [sha256(image).hexdigest() for image in images]


def opened(source, rows=None, **options):
    numbers = np.arange(len(source)) if rows is None else np.array(rows)
    content = digests([source.images[i] for i in numbers])
    return stream_images(source, numbers, content, CUT, **options)


def test_pixels_are_what_the_encoder_is_given():
    source = Read(*map(counting.png, range(300, 305)))
    rows = opened(source)
    assert rows.shape == (5, 3, 6, 5) and len(rows) == 5
    got = rows[torch.tensor([3, 0])]
    assert got.dtype == torch.float32
    for pixels, row in zip(got, (3, 0), strict=True):
        assert np.array_equal(pixels.numpy(), CUT(decode(source.images[row])))
    assert torch.equal(rows[1:3], rows[torch.tensor([1, 2])])


def test_taken_rows_are_the_rows_of_the_embedder():
    """Row 1 could not be read when it was encoded, so row 1 of the run is image 2."""
    source = Read(*map(counting.png, range(5)))
    rows = opened(source, rows=[0, 2, 3, 4])
    some = rows.take(torch.tensor([1, 3]))
    assert some.shape == (2, 3, 6, 5)
    assert torch.equal(some[torch.tensor([0, 1])], opened(source)[torch.tensor([2, 4])])
    assert torch.equal(some.take(np.array([1]))[:], rows[3:])
    assert rows.take(np.array([], dtype=np.int64))[:].shape == (0, 3, 6, 5)


def test_a_picture_is_decoded_once_while_it_fits():
    source = Read(*map(counting.png, (1, 2, 3, 1)))
    roomy, tight = opened(source), opened(source, budget=2 * IMAGE_BYTES)
    everything = torch.arange(4)
    first = roomy[everything]
    assert source.count == 3, "rows 0 and 3 are one image"
    assert torch.equal(roomy[everything], first) and source.count == 3
    assert torch.equal(tight[everything], first) and source.count == 6
    assert torch.equal(tight[everything], first) and source.count == 7, "one of three has no place"
    nothing = opened(source, budget=0)
    assert torch.equal(nothing[everything], first) and source.count == 11


def test_a_damaged_picture_is_refused_by_name():
    good = counting.png(1)
    source = Read(good, good[:40])
    with pytest.raises(DataError, match=r"image-1\.png: not an image that can be read"):
        opened(source)[torch.tensor([0, 1])]
    source = Read(good, counting.png(2))
    rows = opened(source)
    source.images[1] = good
    with pytest.raises(DataError, match=r"image-1\.png: the image changed"):
        rows[torch.tensor([0, 1])]


def test_an_encoder_without_a_size_is_refused():
    source = Read(counting.png(1))
    content = digests(source.images)
    with pytest.raises(EncoderError, match="crop_size"):
        stream_images(source, np.arange(1), content, Pixels(size=8, crop=None))
    with pytest.raises(EncoderError, match="has no preprocessing to pixels"):
        stream_images(source, np.arange(1), content, None)


def total(rows, times, answer):
    answer.send(float(sum(rows[:].double().sum() for _ in range(times))))


def test_forked_processes_read_the_same_archive_side_by_side(tmp_path):
    path = tmp_path / "images.zip"
    images = [counting.png(i) for i in range(60)]
    with ZipFile(path, "w") as archive:
        for row, data in enumerate(images):
            archive.writestr(f"{row}.png", data)
    source = Archive(path, [f"{row}.png" for row in range(60)])
    rows = stream_images(source, np.arange(60), digests(images), CUT, budget=20 * IMAGE_BYTES)
    expected = float(rows[:].double().sum())
    context = get_context("fork")
    ends = []
    for _ in range(2):
        receiver, theirs = context.Pipe(duplex=False)
        process = context.Process(target=total, args=(rows, 5, theirs))
        with warnings.catch_warnings():  # Python 3.12 warns of any fork beside threads
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        ends.append((receiver, process))
    for receiver, process in ends:
        assert receiver.recv() == pytest.approx(5 * expected)
        process.join()
        assert process.exitcode == 0
    assert source._owner == os.getpid()
