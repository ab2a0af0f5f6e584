"""Kills, several processes at once and dying workers: no batch is lost or repeated."""

import os
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from multiprocessing import parent_process
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from numpy.random import default_rng
from PIL import Image

from fedvlm.encoders import cache as cache
from fedvlm.encoders.cache.rows import file_lock
from fedvlm.errors import DataError
from tests.helpers.counting import (
    CHILDREN,
    DIM,
    FINGERPRINT,
    Counting,
    append_line,
    dataset,
    first_pixel,
    numbered,
    png,
    read_counts,
    run,
)


def embed_in_child(count: int, log: Path, cache: Path, done: Path) -> None:
    def finished(images: int, total: int) -> None:
        append_line(done, f"{images}\n")

    run(numbered(count), Counting(log, 0.03), cache, progress=finished)


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, "waited in vain"
        sleep(0.005)


def cached_rows(place: Path, count: int) -> set[int]:
    with cache.lock_entry(place, FINGERPRINT, "counting") as (entry, _):
        table = entry.ensure_table("pooled.float32", "float32", (DIM,))
        return {n for n in range(count) if sha256(png(n)).digest() in table}


def test_kill_at_any_moment_neither_loses_nor_repeats_a_finished_batch(tmp_path: Path) -> None:
    log, place, rng, kills, exitcode = tmp_path / "log", tmp_path / "cache", default_rng(5), 0, None
    while exitcode != 0:
        before, n_logged, done = cached_rows(place, 500), len(read_counts(log)), tmp_path / f"done-{kills}"
        child = CHILDREN.Process(target=embed_in_child, args=(500, log, place, done))
        child.start()
        wait_for(lambda a=n_logged, c=child: len(read_counts(log)) > a or not c.is_alive())
        sleep(rng.uniform(0, 0.12))
        child.kill()
        child.join()
        exitcode = child.exitcode
        assert cache.verify(place) == {FINGERPRINT: []}
        assert not before & set(read_counts(log)[n_logged:])  # nothing finished is repeated
        assert before <= cached_rows(place, 500)
        assert len(cached_rows(place, 500)) >= len(before) + read_counts(done)[-1]  # nothing finished is lost
        kills += exitcode != 0
    assert kills >= 3
    assert len(read_counts(log)) <= 500 + 32 * kills  # at most the batch a kill fell into
    again = Counting()
    complete = run(numbered(500), again, place).embedded
    assert again.images == []
    assert torch.equal(complete.x, run(numbered(500), Counting(), tmp_path / "whole").embedded.x)


def test_killed_process_leaves_no_worker_behind(tmp_path: Path) -> None:
    log, alive = tmp_path / "log", tmp_path / "alive"
    child = CHILDREN.Process(target=embed_with_marks, args=(log, tmp_path / "cache", alive))
    child.start()
    wait_for(lambda: is_held(alive))
    child.kill()
    child.join()
    with file_lock(alive):  # the system frees it when the last worker is gone; the timeout watches
        pass


def is_held(path: Path) -> bool:
    try:
        with file_lock(path, wait=False):
            return False
    except BlockingIOError:
        return True


class Marked:
    """A preprocess whose worker process holds a lock for as long as it lives."""

    def __init__(self, path: Path) -> None:
        self.path, self.owner = path, os.getpid()
        self.mark: Any = None

    def __call__(self, image: Image.Image) -> Any:
        if self.mark is None and os.getpid() != self.owner:
            self.mark = file_lock(self.path, shared=True)
            self.mark.__enter__()
        return first_pixel(image)


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
    assert Counter(read_counts(log)) == Counter(range(400))  # each image by one of them
    assert cache.verify(tmp_path / "cache") == {FINGERPRINT: []}
    again = Counting()
    combined = run(numbered(400), again, tmp_path / "cache").embedded
    assert again.images == []
    assert torch.equal(combined.x, run(numbered(400), Counting(), tmp_path / "alone").embedded.x)


def test_work_of_a_killed_process_is_taken_over_by_the_one_that_waits(tmp_path: Path) -> None:
    log, place = tmp_path / "log", tmp_path / "cache"
    slow = CHILDREN.Process(target=embed_slowly, args=(log, place))
    slow.start()
    wait_for(lambda: read_counts(log))  # it holds claims on its first batch and sleeps
    encoder = Counting()
    waiting_process = CHILDREN.Process(target=embed_in_child, args=(40, tmp_path / "other", place, tmp_path / "done"))
    waiting_process.start()
    wait_for(lambda: len(read_counts(tmp_path / "other")) == 8)  # what the first has not claimed
    sleep(0.1)
    assert waiting_process.is_alive()
    slow.kill()
    slow.join()
    waiting_process.join()
    assert waiting_process.exitcode == 0
    assert run(numbered(40), encoder, place).encoded == 0


def embed_slowly(log: Path, cache: Path) -> None:
    run(numbered(40), Counting(log, 1000), cache)


def test_dead_worker_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="workers=0"):
        run(numbered(40), Counting(preprocess=die_in_worker), tmp_path, workers=1)


def die_in_worker(image: Image.Image) -> Any:
    if parent_process() is not None:
        os._exit(1)
    return first_pixel(image)


UNGUARDED = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from tests.helpers.counting import Counting, dataset, png, run
run(dataset(*map(png, range(40))), Counting(), Path({cache!r}), workers=1)
"""


def test_script_without_a_guard_is_told_so_and_does_not_hang(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    path = sys.path
    script.write_text(UNGUARDED.format(path=path, cache=str(tmp_path / "cache")))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert "DataError: a decoding process died" in done.stderr
    assert 'put what it does under `if __name__ == "__main__":`' in done.stderr


def test_worker_processes_give_the_same_as_none(tmp_path: Path) -> None:
    images = [png(number) for number in range(99)] + [b"no image"]
    data = dataset(*images)
    steps: list[tuple[int, int]] = []
    with_workers = run(data, Counting(), tmp_path / "a", workers=2, progress=lambda *s: steps.append(s))
    without_workers = run(data, Counting(), tmp_path / "b")
    assert torch.equal(with_workers.embedded.x, without_workers.embedded.x)
    assert with_workers.embedded.fingerprint == without_workers.embedded.fingerprint
    assert with_workers.skipped == without_workers.skipped
    assert steps[0] == (0, 100)
    assert steps[-1] == (100, 100)
    assert steps == sorted(steps)
