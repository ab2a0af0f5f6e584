"""From images to embeddings: each image encoded once, whatever happens on the way."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedvlm.encoders import cache as cache
from fedvlm.encoders.cache import embed
from fedvlm.errors import DataError, EncoderError
from tests.helpers.counting import (
    DIM,
    FINGERPRINT,
    PATCHES,
    Counting,
    dataset,
    first_pixel,
    numbered,
    png,
    run,
)

BROKEN = b"words named .jpg"


def test_embeddings_have_unit_norm_and_the_rows_of_the_data(tmp_path: Path) -> None:
    data, encoder = numbered(70), Counting()
    outcome = run(data, encoder, tmp_path)
    got = outcome.embedded
    raw = encoder.embed([np.array([n, 0, 77], dtype=np.float32) for n in range(70)], False).pooled
    expected = torch.nn.functional.normalize(torch.tensor(raw), dim=1)
    assert (outcome.encoded, outcome.skipped) == (70, [])
    assert torch.allclose(got.x, expected, atol=1e-6)
    assert torch.allclose(got.x.norm(dim=1), torch.ones(70), atol=1e-6)
    assert got.labels.tolist() == data.labels.tolist()
    assert (got.domains == data.domains).all()
    assert got.scale == 50.0
    assert got.patches is None
    assert got.encoder == f"counting@{FINGERPRINT[:16]}"


def test_an_encoder_may_say_how_many_pictures_it_takes_at_once(tmp_path: Path) -> None:
    class Large(Counting):
        batch = 50

    progress_counts: list[int] = []
    for number, encoder in enumerate((Counting(), Large())):
        progress_counts.clear()
        options = {"progress": lambda done, total: progress_counts.append(done)}
        run(numbered(70), encoder, tmp_path / str(number), **options)
        assert sorted(set(progress_counts)) == ([0, 50, 70] if number else [0, 32, 64, 70])


def test_second_run_encodes_nothing(tmp_path: Path) -> None:
    first = run(numbered(40), Counting(), tmp_path)
    again = Counting()
    second = run(numbered(40), again, tmp_path)
    assert (again.images, again.sentences, second.encoded) == ([], [], 0)
    assert torch.equal(first.embedded.x, second.embedded.x)
    assert torch.equal(first.embedded.text, second.embedded.text)
    assert first.embedded.fingerprint == second.embedded.fingerprint


def test_only_new_pictures_are_encoded_and_the_order_of_the_data_is_kept(tmp_path: Path) -> None:
    run(numbered(20), Counting(), tmp_path)
    encoder = Counting()
    mixed = dataset(*(png(number) for number in (25, 3, 24, 19, 0)))
    got = run(mixed, encoder, tmp_path).embedded
    assert encoder.images == [25, 24]
    assert torch.equal(got.x, run(mixed, Counting(), tmp_path / "other").embedded.x)


def test_same_picture_twice_is_encoded_once(tmp_path: Path) -> None:
    encoder = Counting()
    outcome = run(dataset(png(1), png(2), png(1), png(1)), encoder, tmp_path)
    assert encoder.images == [1, 2]
    assert outcome.embedded.content[0] == outcome.embedded.content[2]
    assert torch.equal(outcome.embedded.x[0], outcome.embedded.x[3])


def test_another_fingerprint_encodes_anew(tmp_path: Path) -> None:
    run(numbered(4), Counting(), tmp_path)
    assert run(numbered(4), Counting(identity={"weights": "others"}), tmp_path).encoded == 4
    assert [entry.rows for entry in cache.list_entries(tmp_path)] == [4, 4]


def test_encoder_without_preprocess_gets_the_bytes_of_sound_images(tmp_path: Path) -> None:
    images = [png(number) for number in range(30)]
    data = dataset(*images, images[4][:50])  # a truncated one would cost a call for nothing
    outcome = run(data, Counting(preprocess=None), tmp_path / "a")
    assert [name for name, _ in outcome.skipped] == ["image-30.png"]
    assert torch.equal(outcome.embedded.x, run(data, Counting(), tmp_path / "b").embedded.x)


def test_unreadable_pictures_are_named_and_their_rows_are_gone(tmp_path: Path) -> None:
    images = [png(number) for number in range(40)]
    images[3], images[7] = BROKEN, b""
    data = dataset(*images)
    outcome = run(data, Counting(), tmp_path)
    got, remaining = outcome.embedded, [row for row in range(40) if row not in (3, 7)]
    assert [name for name, _ in outcome.skipped] == ["image-3.png", "image-7.png"]
    assert "begins with b'words" in outcome.skipped[0][1]
    assert "0 bytes" in outcome.skipped[1][1]
    assert got.domains.tolist() == [f"domain-{row}" for row in remaining]
    assert got.clients.tolist() == [f"client-{row}" for row in remaining]
    assert got.labels.tolist() == [row % 2 for row in remaining]
    assert len(got.x) == len(got.content) == len(got.splits) == 38


def test_more_than_five_percent_unreadable_stop_the_run(tmp_path: Path) -> None:
    images = [png(number) for number in range(40)]
    images[:3] = [BROKEN + bytes([number]) for number in range(3)]
    with pytest.raises(DataError, match=r"3 of the 40 .* 5%; .*image-0.png: .*image-2.png"):
        run(dataset(*images), Counting(), tmp_path)
    assert run(dataset(png(0), *images[1:]), Counting(), tmp_path).skipped


def test_one_unreadable_picture_counts_as_often_as_it_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 of the 40"):
        run(dataset(*[BROKEN] * 3, *(png(n) for n in range(37))), Counting(), tmp_path)


def test_file_that_cannot_be_opened_counts_as_unreadable(tmp_path: Path) -> None:
    class Torn:
        def __len__(self) -> int:
            return 40

        def name(self, row: int) -> str:
            return f"image-{row}.png"

        def read(self, row: int) -> bytes:
            if row == 5:
                raise FileNotFoundError(errno.ENOENT, "No such file", "image-5.png")
            return png(row)

    outcome = run(replace(numbered(40), source=Torn()), Counting(), tmp_path)
    assert [name for name, _ in outcome.skipped] == ["image-5.png"]
    assert len(outcome.embedded.x) == 39


def test_class_left_without_rows_is_an_error(tmp_path: Path) -> None:
    data = dataset(*(png(n) for n in range(30)), BROKEN, labels=[0] * 30 + [1])
    with pytest.raises(DataError, match="class 'dog'"):
        run(data, Counting(), tmp_path)


def test_data_without_pictures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images"):
        run(dataset(), Counting(), tmp_path)


def test_full_disk_stops_and_keeps_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, writes = os.pwrite, [0]

    def full(file: int, data: memoryview, place: int) -> int:
        writes[0] += 1
        if writes[0] > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DataError, match="No space left"):
            run(numbered(70), Counting(), tmp_path)
    assert cache.verify(tmp_path) == {FINGERPRINT: []}
    assert run(numbered(70), Counting(), tmp_path).encoded == 70 - 32


def test_float16_keeps_three_digits_in_half_the_bytes(tmp_path: Path) -> None:
    full = run(numbered(40), Counting(), tmp_path).embedded
    float16 = run(numbered(40), Counting(), tmp_path, precision="float16").embedded
    again = run(numbered(40), Counting(), tmp_path, precision="float16")
    assert again.encoded == 0
    assert float16.x.dtype == torch.float32
    assert torch.allclose(float16.x, full.x, atol=1e-3)
    assert not torch.equal(float16.x, full.x)
    folder = tmp_path / FINGERPRINT
    sizes = [(folder / f"pooled.float{bits}.rows").stat().st_size for bits in (16, 32)]
    assert sizes == [40 * DIM * 2, 40 * DIM * 4]


def test_patches_are_half_precision_in_the_order_of_the_rows(tmp_path: Path) -> None:
    run(numbered(10), Counting(), tmp_path)  # pooled alone does not count as done
    encoder = Counting()
    got = run(numbered(20), encoder, tmp_path, patches=True).embedded
    assert encoder.images == list(range(20))
    turned = run(dataset(png(7), png(3), png(7), png(12)), encoder, tmp_path, patches=True).embedded
    assert len(encoder.images) == 20
    assert got.patches is not None
    assert turned.patches is not None
    assert got.patches.shape == (20, PATCHES, DIM)
    assert got.patches.dtype == torch.float16
    assert torch.equal(turned.patches, got.patches[[7, 3, 7, 12]])
    expected = encoder.embed([first_pixel(Image.new("RGB", (1, 1), (5, 0, 77)))], True).patches
    assert torch.equal(got.patches[5], torch.tensor(expected)[0])
    assert cache.list_entries(tmp_path)[0].patches == 20


def test_patches_are_not_asked_of_an_encoder_without_them(tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="no patch embeddings; it offers image"):
        run(numbered(2), Counting(offers=frozenset({"image"})), tmp_path, patches=True)


def test_fingerprint_covers_pictures_labels_classes_templates_and_domains(tmp_path: Path) -> None:
    data = numbered(4)
    variants = [
        data,
        dataset(png(0), png(1), png(2), png(4)),
        dataset(*map(png, range(4)), labels=[0, 1, 1, 0]),
        replace(data, classes=("alarm clock", "dog")),
        replace(data, templates=("a {}",)),
        replace(data, domains=np.array(["a", "b", "c", "d"])),
        replace(data, clients=np.array(["a", "b", "c", "d"])),
        replace(data, splits=np.array(["train", "train", "train", "test"])),
    ]
    fingerprints = {run(variant, Counting(), tmp_path).embedded.fingerprint for variant in variants}
    assert len(fingerprints) == len(variants)


def test_few_bytes_are_decoded_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker_counts: list[int] = []
    real = embed.DecoderPool

    def decoders(preprocess: Any, workers: int, prefetch: int) -> Any:
        worker_counts.append(workers)
        return real(preprocess, 0, prefetch)

    monkeypatch.setattr(embed, "DecoderPool", decoders)
    run(numbered(10), Counting(), tmp_path, workers=None)
    monkeypatch.setattr(embed, "MAX_INLINE_BYTES", 100)
    run(numbered(10), Counting(), tmp_path, workers=None)  # all cached
    run(numbered(20), Counting(), tmp_path, workers=None)
    assert worker_counts[:2] == [0, 0]
    assert worker_counts[2] >= 1


def test_default_directory_is_used_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "mine"))
    embed.embed(numbered(4), Counting())
    assert cache.list_entries(tmp_path / "mine")[0].rows == 4
