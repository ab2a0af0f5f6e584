"""From pictures to embeddings: each picture encoded once, whatever happens on the way."""

import errno
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
from counting import (
    CHILDREN,
    DIM,
    FINGERPRINT,
    PATCHES,
    Counting,
    dataset,
    first_pixel,
    note,
    noted,
    png,
    run,
)
from numpy.random import default_rng
from PIL import Image

from fedvlm.data.table import Dataset
from fedvlm.encoders import cache, embed
from fedvlm.encoders.interface import Vectors
from fedvlm.encoders.locks import held
from fedvlm.encoders.text import clean, sentences
from fedvlm.errors import DataError, EncoderError, SettingsError

BROKEN = b"words named .jpg"


def numbered(count: int) -> Dataset:
    return dataset(*(png(number) for number in range(count)))


def test_embeddings_have_unit_norm_and_the_rows_of_the_data(tmp_path: Path) -> None:
    data, encoder = numbered(70), Counting()
    outcome = run(data, encoder, tmp_path)
    got = outcome.embedded
    raw = encoder.embed([np.array([n, 0, 77], dtype=np.float32) for n in range(70)], False).pooled
    wanted = torch.nn.functional.normalize(torch.tensor(raw), dim=1)
    assert (outcome.encoded, outcome.skipped) == (70, [])
    assert torch.allclose(got.x, wanted, atol=1e-6)
    assert torch.allclose(got.x.norm(dim=1), torch.ones(70), atol=1e-6)
    assert got.labels.tolist() == data.labels.tolist()
    assert (got.domains == data.domains).all()
    assert got.scale == 50.0
    assert got.patches is None
    assert got.encoder == f"counting@{FINGERPRINT[:16]}"


def test_second_run_encodes_nothing(tmp_path: Path) -> None:
    first = run(numbered(40), Counting(), tmp_path)
    again = Counting()
    second = run(numbered(40), again, tmp_path)
    assert (again.pictures, again.sentences, second.encoded) == ([], [], 0)
    assert torch.equal(first.embedded.x, second.embedded.x)
    assert torch.equal(first.embedded.text, second.embedded.text)
    assert first.embedded.fingerprint == second.embedded.fingerprint


def test_only_new_pictures_are_encoded_and_the_order_of_the_data_is_kept(tmp_path: Path) -> None:
    run(numbered(20), Counting(), tmp_path)
    encoder = Counting()
    mixed = dataset(*(png(number) for number in (25, 3, 24, 19, 0)))
    got = run(mixed, encoder, tmp_path).embedded
    assert encoder.pictures == [25, 24]
    assert torch.equal(got.x, run(mixed, Counting(), tmp_path / "other").embedded.x)


def test_same_picture_twice_is_encoded_once(tmp_path: Path) -> None:
    encoder = Counting()
    outcome = run(dataset(png(1), png(2), png(1), png(1)), encoder, tmp_path)
    assert encoder.pictures == [1, 2]
    assert outcome.embedded.content[0] == outcome.embedded.content[2]
    assert torch.equal(outcome.embedded.x[0], outcome.embedded.x[3])


def test_another_fingerprint_encodes_anew(tmp_path: Path) -> None:
    run(numbered(4), Counting(), tmp_path)
    assert run(numbered(4), Counting(), tmp_path, fingerprint="f" * 64).encoded == 4
    assert [one.rows for one in cache.ls(tmp_path)] == [4, 4]


def test_worker_processes_give_the_same_as_none(tmp_path: Path) -> None:
    pictures = [png(number) for number in range(99)] + [BROKEN]
    data = dataset(*pictures)
    steps: list[tuple[int, int]] = []
    many = run(data, Counting(), tmp_path / "a", workers=2, progress=lambda *s: steps.append(s))
    one = run(data, Counting(), tmp_path / "b")
    assert torch.equal(many.embedded.x, one.embedded.x)
    assert many.embedded.fingerprint == one.embedded.fingerprint
    assert many.skipped == one.skipped
    assert steps[0] == (0, 100)
    assert steps[-1] == (100, 100)
    assert steps == sorted(steps)


def test_encoder_without_preprocess_gets_the_bytes_of_sound_pictures(tmp_path: Path) -> None:
    pictures = [png(number) for number in range(30)]
    data = dataset(*pictures, pictures[4][:50])  # a truncated one would cost a call for nothing
    outcome = run(data, Counting(preprocess=None), tmp_path / "a")
    assert [name for name, _ in outcome.skipped] == ["picture-30.png"]
    assert torch.equal(outcome.embedded.x, run(data, Counting(), tmp_path / "b").embedded.x)


def test_unreadable_pictures_are_named_and_their_rows_are_gone(tmp_path: Path) -> None:
    pictures = [png(number) for number in range(40)]
    pictures[3], pictures[7] = BROKEN, b""
    data = dataset(*pictures)
    outcome = run(data, Counting(), tmp_path)
    got, left = outcome.embedded, [row for row in range(40) if row not in (3, 7)]
    assert [name for name, _ in outcome.skipped] == ["picture-3.png", "picture-7.png"]
    assert "begins with b'words" in outcome.skipped[0][1]
    assert "0 bytes" in outcome.skipped[1][1]
    assert got.domains.tolist() == [f"domain-{row}" for row in left]
    assert got.clients.tolist() == [f"client-{row}" for row in left]
    assert got.labels.tolist() == [row % 2 for row in left]
    assert len(got.x) == len(got.content) == len(got.splits) == 38


def test_more_than_five_percent_unreadable_stop_the_run(tmp_path: Path) -> None:
    pictures = [png(number) for number in range(40)]
    pictures[:3] = [BROKEN + bytes([number]) for number in range(3)]
    with pytest.raises(DataError, match=r"3 of the 40 .* 5%; .*picture-0.png: .*picture-2.png"):
        run(dataset(*pictures), Counting(), tmp_path)
    assert run(dataset(png(0), *pictures[1:]), Counting(), tmp_path).skipped


def test_one_unreadable_picture_counts_as_often_as_it_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 of the 40"):
        run(dataset(*[BROKEN] * 3, *(png(n) for n in range(37))), Counting(), tmp_path)


def test_file_that_cannot_be_opened_counts_as_unreadable(tmp_path: Path) -> None:
    class Torn:
        def __len__(self) -> int:
            return 40

        def name(self, row: int) -> str:
            return f"picture-{row}.png"

        def read(self, row: int) -> bytes:
            if row == 5:
                raise FileNotFoundError(errno.ENOENT, "No such file", "picture-5.png")
            return png(row)

    outcome = run(replace(numbered(40), source=Torn()), Counting(), tmp_path)
    assert [name for name, _ in outcome.skipped] == ["picture-5.png"]
    assert len(outcome.embedded.x) == 39


def test_class_left_without_rows_is_an_error(tmp_path: Path) -> None:
    data = dataset(*(png(n) for n in range(30)), BROKEN, labels=[0] * 30 + [1])
    with pytest.raises(DataError, match="class 'dog'"):
        run(data, Counting(), tmp_path)


def test_data_without_pictures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no pictures"):
        run(dataset(), Counting(), tmp_path)


class Spoilt(Counting):
    """Answers wrongly about one picture."""

    spoil: Any = None

    def embed(self, batch: Sequence[Any], patches: bool) -> Vectors:
        numbers = [int(x[0]) for x in batch]
        answer = super().embed(batch, patches)
        return self.spoil(answer, numbers.index(50)) if 50 in numbers else answer


def with_value(value: float) -> Any:
    def spoil(answer: Vectors, at: int) -> Vectors:
        answer.pooled[at, slice(None) if value == 0 else 2] = value
        return answer

    return spoil


def with_bad_patch(answer: Vectors, at: int) -> Vectors:
    assert answer.patches is not None
    answer.patches[at, 1, 1] = np.inf
    return answer


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (with_value(np.nan), "NaN or inf for picture-50.png"),
        (with_value(-np.inf), "NaN or inf for picture-50.png"),
        (with_value(0), "zeros for picture-50.png"),
        (lambda answer, _: replace(answer, pooled=answer.pooled[:, :-1]), r"\(32, 15\)"),
        (lambda answer, _: replace(answer, pooled=answer.pooled[1:]), r"\(31, 16\)"),
        (lambda answer, _: replace(answer, pooled=answer.pooled[0]), r"shape \(16,\)"),
        (lambda answer, _: replace(answer, patches=None), r"shape \(\)"),
        (lambda answer, _: replace(answer, patches=answer.patches[:, :, 1:]), r"\(32, 15\)"),
        (with_bad_patch, "in a patch for picture-50.png"),
    ],
)
def test_unsound_answer_stops_and_keeps_what_was_done(
    tmp_path: Path, spoil: Any, words: str
) -> None:
    encoder = Spoilt()
    encoder.spoil = spoil
    with pytest.raises(EncoderError, match=words):
        run(numbered(70), encoder, tmp_path, patches=True)
    mended = Counting()
    run(numbered(70), mended, tmp_path, patches=True)
    assert sorted(mended.pictures) == list(range(32, 70))


def test_encoder_error_keeps_what_was_done(tmp_path: Path) -> None:
    def spoil(answer: Vectors, at: int) -> Vectors:
        raise EncoderError("the network is down")

    encoder = Spoilt()
    encoder.spoil = spoil
    with pytest.raises(EncoderError, match="network"):
        run(numbered(70), encoder, tmp_path)
    assert cache.ls(tmp_path)[0].rows == 32


def test_full_disk_stops_and_keeps_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    half = run(numbered(40), Counting(), tmp_path, precision="float16").embedded
    again = run(numbered(40), Counting(), tmp_path, precision="float16")
    assert again.encoded == 0
    assert half.x.dtype == torch.float32
    assert torch.allclose(half.x, full.x, atol=1e-3)
    assert not torch.equal(half.x, full.x)
    folder = tmp_path / FINGERPRINT
    sizes = [(folder / f"pooled.float{bits}.rows").stat().st_size for bits in (16, 32)]
    assert sizes == [40 * DIM * 2, 40 * DIM * 4]


def test_vector_too_long_for_float16_is_refused(tmp_path: Path) -> None:
    encoder = Spoilt()
    encoder.spoil = with_value(1e6)
    with pytest.raises(EncoderError, match=r"NaN or inf for picture-50.png"):
        run(numbered(70), encoder, tmp_path, precision="float16")


def test_patches_are_half_precision_in_the_order_of_the_rows(tmp_path: Path) -> None:
    run(numbered(10), Counting(), tmp_path)  # pooled alone does not count as done
    encoder = Counting()
    got = run(numbered(20), encoder, tmp_path, patches=True).embedded
    assert encoder.pictures == list(range(20))
    turned = run(dataset(png(7), png(3), png(7), png(12)), encoder, tmp_path, patches=True).embedded
    assert len(encoder.pictures) == 20
    assert got.patches is not None
    assert turned.patches is not None
    assert got.patches.shape == (20, PATCHES, DIM)
    assert got.patches.dtype == torch.float16
    assert torch.equal(turned.patches, got.patches[[7, 3, 7, 12]])
    expected = encoder.embed([first_pixel(Image.new("RGB", (1, 1), (5, 0, 77)))], True).patches
    assert torch.equal(got.patches[5], torch.tensor(expected)[0])
    assert cache.ls(tmp_path)[0].patches == 20


def test_patches_are_not_asked_of_an_encoder_without_them(tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="no patch embeddings; it offers image"):
        run(numbered(2), Counting(offers=frozenset({"image"})), tmp_path, patches=True)


def test_class_names_are_cleaned_in_sentences() -> None:
    assert clean("Alarm_Clock") == "alarm clock"
    assert clean(" Air__ Plane ") == "air plane"
    assert clean("camelCase") == "camelcase"
    assert sentences(["TV {}", "dog"], "a {}, {}.") == ["a tv {}, tv {}.", "a dog, dog."]
    with pytest.raises(SettingsError, match="'a dog' has no place"):
        sentences(["dog"], "a dog")


def test_several_templates_give_the_mean_of_their_unit_vectors(tmp_path: Path) -> None:
    templates = ("a photo of a {}", "a sketch of a {}")
    encoder = Counting()
    text = run(replace(numbered(4), templates=templates), encoder, tmp_path).embedded.text
    said = [[t.format(c) for t in templates] for c in ("alarm clock", "dog")]
    assert sorted(encoder.sentences) == sorted(said[0] + said[1])
    wanted = torch.stack([encoder.embed_text(group).mean(0) for group in said])
    assert text is not None
    assert torch.allclose(text, torch.nn.functional.normalize(wanted, dim=1), atol=1e-6)


def test_encoder_without_text_gives_none(tmp_path: Path) -> None:
    encoder = Counting(offers=frozenset({"image"}))
    assert run(numbered(4), encoder, tmp_path).embedded.text is None
    assert encoder.sentences == []


def test_fingerprint_covers_pictures_labels_classes_templates_and_domains(tmp_path: Path) -> None:
    data = numbered(4)
    others = [
        data,
        dataset(png(0), png(1), png(2), png(4)),
        dataset(*map(png, range(4)), labels=[0, 1, 1, 0]),
        replace(data, classes=("alarm clock", "dog")),
        replace(data, templates=("a {}",)),
        replace(data, domains=np.array(["a", "b", "c", "d"])),
        replace(data, clients=np.array(["a", "b", "c", "d"])),
        replace(data, splits=np.array(["train", "train", "train", "test"])),
    ]
    seen = {run(one, Counting(), tmp_path).embedded.fingerprint for one in others}
    assert len(seen) == len(others)


def embed_in_child(count: int, log: Path, cache: Path, done: Path) -> None:
    def finished(pictures: int, total: int) -> None:
        note(done, f"{pictures}\n")

    run(numbered(count), Counting(log, 0.03), cache, progress=finished)


def wait_for(what: Any, seconds: float = 60) -> None:
    end = monotonic() + seconds
    while not what():
        assert monotonic() < end, "waited in vain"
        sleep(0.005)


def kept(place: Path, count: int) -> set[int]:
    with cache.use(place, FINGERPRINT, "counting") as (entry, _):
        table = entry.need("pooled.float32", "float32", (DIM,))
        return {n for n in range(count) if sha256(png(n)).digest() in table}


def test_kill_at_any_moment_neither_loses_nor_repeats_a_finished_batch(tmp_path: Path) -> None:
    log, place, rng, kills, exitcode = tmp_path / "log", tmp_path / "cache", default_rng(5), 0, None
    while exitcode != 0:
        before, asked, done = kept(place, 200), len(noted(log)), tmp_path / f"done-{kills}"
        child = CHILDREN.Process(target=embed_in_child, args=(200, log, place, done))
        child.start()
        wait_for(lambda a=asked, c=child: len(noted(log)) > a or not c.is_alive())
        sleep(rng.uniform(0, 0.12))
        child.kill()
        child.join()
        exitcode = child.exitcode
        assert cache.verify(place) == {FINGERPRINT: []}
        assert not before & set(noted(log)[asked:])  # nothing finished is repeated
        assert before <= kept(place, 200)
        assert len(kept(place, 200)) >= len(before) + noted(done)[-1]  # nothing finished is lost
        kills += exitcode != 0
    assert kills >= 3
    assert len(noted(log)) <= 200 + 32 * kills  # at most the batch a kill fell into
    again = Counting()
    whole = run(numbered(200), again, place).embedded
    assert again.pictures == []
    assert torch.equal(whole.x, run(numbered(200), Counting(), tmp_path / "whole").embedded.x)


def test_killed_process_leaves_no_worker_behind(tmp_path: Path) -> None:
    log, alive = tmp_path / "log", tmp_path / "alive"
    child = CHILDREN.Process(target=embed_with_marks, args=(log, tmp_path / "cache", alive))
    child.start()
    wait_for(lambda: noted(log))
    with pytest.raises(BlockingIOError), held(alive, wait=False):
        pass
    child.kill()
    child.join()
    with held(alive):  # the system frees it when the last worker is gone; the timeout watches
        pass


class Marked:
    """A preprocess whose process holds a lock for as long as it lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark: Any = None

    def __call__(self, picture: Image.Image) -> Any:
        if self.mark is None:
            self.mark = held(self.path, shared=True)
            self.mark.__enter__()
        return first_pixel(picture)


def embed_with_marks(log: Path, cache: Path, alive: Path) -> None:
    run(numbered(600), Counting(log, 0.2, preprocess=Marked(alive)), cache, workers=1)


def test_two_processes_at_once_share_the_work_and_agree(tmp_path: Path) -> None:
    log = tmp_path / "log"
    children = [
        CHILDREN.Process(target=embed_in_child, args=(400, log, tmp_path / "cache", tmp_path / n))
        for n in ("done-1", "done-2")
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert Counter(noted(log)) == Counter(range(400))  # each picture by one of them
    assert cache.verify(tmp_path / "cache") == {FINGERPRINT: []}
    again = Counting()
    both = run(numbered(400), again, tmp_path / "cache").embedded
    assert again.pictures == []
    assert torch.equal(both.x, run(numbered(400), Counting(), tmp_path / "alone").embedded.x)


def test_work_of_a_killed_process_is_taken_over_by_the_one_that_waits(tmp_path: Path) -> None:
    log, place = tmp_path / "log", tmp_path / "cache"
    slow = CHILDREN.Process(target=embed_slowly, args=(log, place))
    slow.start()
    wait_for(lambda: noted(log))  # it holds claims on its first batch and sleeps
    encoder = Counting()
    other = CHILDREN.Process(
        target=embed_in_child, args=(40, tmp_path / "other", place, tmp_path / "done")
    )
    other.start()
    wait_for(lambda: len(noted(tmp_path / "other")) == 8)  # what the first has not claimed
    sleep(0.1)
    assert other.is_alive()
    slow.kill()
    slow.join()
    other.join()
    assert other.exitcode == 0
    assert run(numbered(40), encoder, place).encoded == 0


def embed_slowly(log: Path, cache: Path) -> None:
    run(numbered(40), Counting(log, 1000), cache)


def test_dead_worker_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="workers=0"):
        run(numbered(4), Counting(preprocess=die), tmp_path, workers=1)


def die(picture: Image.Image) -> Any:
    os._exit(1)


UNGUARDED = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from counting import Counting, dataset, png, run
run(dataset(*map(png, range(40))), Counting(), Path({cache!r}), workers=1)
"""


def test_script_without_a_guard_is_told_so_and_does_not_hang(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    path = [str(Path(__file__).parent), *sys.path]
    script.write_text(UNGUARDED.format(path=path, cache=str(tmp_path / "cache")))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 1
    assert "DataError: a decoding process died" in done.stderr
    assert 'put what it does under `if __name__ == "__main__":`' in done.stderr


def test_few_bytes_are_decoded_without_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = embed.Decoders

    def decoders(preprocess: Any, workers: int, ahead: int) -> Any:
        asked.append(workers)
        return real(preprocess, 0, ahead)

    monkeypatch.setattr(embed, "Decoders", decoders)
    run(numbered(10), Counting(), tmp_path, workers=None)
    monkeypatch.setattr(embed, "FEW_BYTES", 100)
    run(numbered(10), Counting(), tmp_path, workers=None)  # all cached
    run(numbered(20), Counting(), tmp_path, workers=None)
    assert asked[:2] == [0, 0]
    assert asked[2] >= 1


def test_default_directory_is_used_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "mine"))
    embed.embed(numbered(4), Counting(), fingerprint=FINGERPRINT)
    assert cache.ls(tmp_path / "mine")[0].rows == 4
