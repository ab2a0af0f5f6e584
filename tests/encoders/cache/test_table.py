"""The tables of the cache: a row is whole or absent, whatever happens while it is written."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch

from fedvlm.encoders.cache.rows import RECORD, Claims, file_lock
from fedvlm.errors import DataError
from tests.helpers.counting import CHILDREN, digests, filled, table, values


def test_rows_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3)
    assert np.array_equal(table(tmp_path).read(digests(3, 1, 3)), values(3, 1, 3))
    assert np.array_equal(table(tmp_path).mapped(digests(3, 1, 3)), values(3, 1, 3))
    assert np.array_equal(table(tmp_path).mapped(digests(2, 3)), values(2, 3))


def test_a_row_is_kept_once_and_its_first_value_stays(tmp_path: Path) -> None:
    rows = filled(tmp_path, 1, 2)
    rows.append(digests(2, 3, 3), values(9, 3, 8))
    assert len(rows) == 3
    assert np.array_equal(table(tmp_path).read(digests(1, 2, 3)), values(1, 2, 8))


def test_append_of_one_is_seen_by_another_after_refresh(tmp_path: Path) -> None:
    writer, reader = table(tmp_path), table(tmp_path)
    writer.append(digests(1), values(1))
    reader.refresh()
    assert digests(1)[0] in reader
    reader.append(digests(2), values(2))
    writer.append(digests(3), values(3))
    assert np.array_equal(writer.read(digests(1, 2, 3)), values(1, 2, 3))


def test_mapped_rows_can_be_written_to_without_touching_the_file(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    torch.from_numpy(table(tmp_path).mapped(digests(1, 2))).zero_()
    assert np.array_equal(table(tmp_path).read(digests(1, 2)), values(1, 2))


def test_gathered_rows_leave_no_file_behind(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    before = set(tmp_path.iterdir())
    assert np.array_equal(table(tmp_path).mapped(digests(2, 1)), values(2, 1))
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("cut", [1, 4, 5, 16, 47, 48, 49, 95, 96, 143])
def test_torn_end_of_the_index_is_dropped_and_written_over(tmp_path: Path, cut: int) -> None:
    filled(tmp_path, 1, 2, 3)
    index = tmp_path / "pooled.float32.index"
    os.truncate(index, 3 * RECORD.size - cut)
    rows = table(tmp_path)
    surviving = [1, 2, 3][: (3 * RECORD.size - cut) // RECORD.size]
    assert len(rows) == len(surviving)
    rows.append(digests(4, 5), values(4, 5))
    again = table(tmp_path)
    assert np.array_equal(again.read(digests(*surviving, 4, 5)), values(*surviving, 4, 5))
    assert list(again.verify()) == []


@pytest.mark.parametrize("rubbish", [b"\0" * 3 * RECORD.size, b"\xff" * (RECORD.size + 5)])
def test_rubbish_at_the_end_of_the_index_is_no_row(tmp_path: Path, rubbish: bytes) -> None:
    filled(tmp_path, 1, 2)
    with (tmp_path / "pooled.float32.index").open("ab") as file:
        file.write(rubbish)
    rows = table(tmp_path)
    assert len(rows) == 2
    rows.append(digests(3), values(3))
    again = table(tmp_path)
    assert np.array_equal(again.read(digests(1, 2, 3)), values(1, 2, 3))
    assert all("record" in bad.reason for bad in again.verify())
    again.drop(set())
    assert list(table(tmp_path).verify()) == []
    assert len(table(tmp_path)) == 3


def test_rows_without_a_record_are_passed_over(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    with (tmp_path / "pooled.float32.rows").open("ab") as file:
        file.write(b"half")  # less than a row
    table(tmp_path).append(digests(2), values(2))
    assert np.array_equal(table(tmp_path).read(digests(1, 2)), values(1, 2))


def test_wrong_length_of_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\(4,\)"):
        table(tmp_path).append(digests(1), values(1, dim=5))


def test_lost_rows_do_not_come_back_as_other_rows(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3)
    os.truncate(tmp_path / "pooled.float32.rows", 20)
    rows = table(tmp_path)
    with pytest.raises(DataError, match="verify --drop"):
        rows.read(digests(1))
    rows.append(digests(4, 5), values(4, 5))
    assert np.array_equal(table(tmp_path).read(digests(1, 4, 5)), values(1, 4, 5))
    assert [bad.row for bad in table(tmp_path).verify()] == [1, 2]


@pytest.mark.parametrize("victim", ["rows", "index"])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_full_disk_is_a_data_error_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, call: str
) -> None:
    rows = filled(tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    real, inode = getattr(os, call), (tmp_path / f"pooled.float32.{victim}").stat().st_ino

    def full(file: int, *args: Any) -> Any:
        if os.fstat(file).st_ino != inode:
            return real(file, *args)
        if call == "pwrite":
            real(file, args[0][:5], args[1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(DataError, match=r"No space left on device.*FEDVLM_CACHE"):
            rows.append(digests(2, 3), values(2, 3))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    rows.append(digests(3), values(3))
    assert np.array_equal(table(tmp_path).read(digests(1, 3)), values(1, 3))


def in_child(action: Callable[..., None], *arguments: Any) -> int | None:
    process = CHILDREN.Process(target=action, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def append_and_die(folder: Path, step: int) -> None:
    """Two appends, killed at a write or fsync, which for a write is half done."""
    remaining, real = [step], {"pwrite": os.pwrite, "fsync": os.fsync}

    def dying(name: str) -> Callable[..., Any]:
        def call(file: int, *args: Any) -> Any:
            remaining[0] -= 1
            if remaining[0] == 0:
                if name == "pwrite":
                    real[name](file, args[0][: len(args[0]) // 2 + 1], args[1])
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](file, *args)

        return call

    os.pwrite, os.fsync = dying("pwrite"), dying("fsync")
    rows = table(folder)
    rows.append(digests(2, 3), values(2, 3))
    (folder / "finished").touch()
    rows.append(digests(4, 5), values(4, 5))


@pytest.mark.parametrize("step", range(1, 9))
def test_kill_at_any_step_of_an_append_loses_only_that_append(tmp_path: Path, step: int) -> None:
    filled(tmp_path, 1)
    assert in_child(append_and_die, tmp_path, step) == -signal.SIGKILL
    rows = table(tmp_path)
    assert (tmp_path / "finished").exists() == (step > 4)
    finished = [1, 2, 3] if step > 4 else [1]
    assert np.array_equal(rows.read(digests(*finished)), values(*finished))
    assert list(rows.verify()) == []
    rows.append(digests(2, 3, 4, 5), values(2, 3, 4, 5))
    assert np.array_equal(table(tmp_path).read(digests(1, 2, 3, 4, 5)), values(1, 2, 3, 4, 5))


def fill_at_random(folder: Path, seed: int) -> None:
    rows, order = table(folder), np.random.default_rng(seed).permutation(120)
    for start in range(0, 120, 6):
        numbers = order[start : start + 6].tolist()
        rows.append(digests(*numbers), values(*numbers))
        assert np.array_equal(rows.read(digests(*numbers)), values(*numbers))


def test_processes_appending_the_same_rows_at_once_keep_each_row_once(tmp_path: Path) -> None:
    processes = [CHILDREN.Process(target=fill_at_random, args=(tmp_path, n)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    rows = table(tmp_path)
    assert len(rows) == 120
    assert (tmp_path / "pooled.float32.rows").stat().st_size == 120 * 16
    assert np.array_equal(rows.read(digests(*range(120))), values(*range(120)))
    assert list(rows.verify()) == []


def take_what_is_taken(path: Path) -> None:
    claims = Claims(path)
    claimed, free = digests(1, 2)
    sys.exit(10 * claims.take(claimed) + claims.take(free))


def test_a_claim_holds_against_other_processes_until_released(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    assert claims.take(digests(1)[0])
    assert in_child(take_what_is_taken, tmp_path / "claims") == 1
    claims.release(digests(1))
    assert in_child(take_what_is_taken, tmp_path / "claims") == 11
    claims.close()


def test_lock_that_cannot_be_made_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot lock"), file_lock(tmp_path / "no" / "folder"):
        pass


def test_float16_rows_are_half_as_large(tmp_path: Path) -> None:
    rows = table(tmp_path, "float16")
    rows.append(digests(1, 2), values(1, 2))
    assert (tmp_path / "pooled.float16.rows").stat().st_size == 2 * 4 * 2
    assert rows.read(digests(2, 1)).dtype == np.float16
    assert np.array_equal(rows.read(digests(2, 1)), values(2, 1))


def test_ten_thousand_rows_are_read_quickly(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(10_000, 512)).astype(np.float32)
    names = [sha256(row.tobytes()).digest() for row in x]
    table(tmp_path, dim=512).append(names, x)
    times = []
    for _ in range(5):
        start = process_time()  # not the clock: other processes may be busy
        stored = torch.from_numpy(table(tmp_path, dim=512).read(names))
        times.append(process_time() - start)
    assert torch.equal(stored, torch.from_numpy(x))
    assert min(times) < 0.1
