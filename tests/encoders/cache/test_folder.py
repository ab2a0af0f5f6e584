"""The entries of the cache: listed, checked, removed, and never in anyone's way."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedvlm.encoders import cache as cache
from fedvlm.encoders.cache.rows import RECORD
from fedvlm.errors import DataError, SettingsError
from tests.helpers.counting import digests, values

FINGERPRINT = "ab" * 32


def test_flipped_byte_is_named_by_read_and_by_verify_and_can_be_dropped(tmp_path: Path) -> None:
    with cache.lock_entry(tmp_path, FINGERPRINT, "fake") as (entry, _):
        entry.ensure_table("pooled.float32", "float32", (4,)).append(digests(1, 2, 3), values(1, 2, 3))
    path = tmp_path / FINGERPRINT / "pooled.float32.rows"
    data = bytearray(path.read_bytes())
    data[16 + 5] ^= 1  # in row 1
    path.write_bytes(data)

    [bad] = cache.verify(tmp_path)[FINGERPRINT]
    assert (bad.table, bad.row, bad.digest) == ("pooled.float32", 1, digests(2)[0].hex())
    with cache.lock_entry(tmp_path, FINGERPRINT, "fake") as (entry, _):
        rows = entry.ensure_table("pooled.float32", "float32", (4,))
        assert np.array_equal(rows.read(digests(1, 3)), values(1, 3))
        with pytest.raises(DataError, match=r"row 1 .* damaged"):
            rows.read(digests(1, 2, 3))
        with pytest.raises(DataError, match="in use"):
            cache.verify(tmp_path, drop=True)

    assert cache.verify(tmp_path, drop=True)[FINGERPRINT] == [bad]
    assert cache.verify(tmp_path)[FINGERPRINT] == []
    assert cache.list_entries(tmp_path)[0].rows == 2


def test_lost_rows_are_named_and_can_be_dropped(tmp_path: Path) -> None:
    with cache.lock_entry(tmp_path, FINGERPRINT, "fake") as (entry, _):
        entry.ensure_table("pooled.float32", "float32", (4,)).append(digests(1, 2, 3), values(1, 2, 3))
    os.truncate(tmp_path / FINGERPRINT / "pooled.float32.rows", 20)
    assert [bad.row for bad in cache.verify(tmp_path, FINGERPRINT[:6], drop=True)[FINGERPRINT]] == [
        1,
        2,
    ]
    with cache.lock_entry(tmp_path, FINGERPRINT, "fake") as (entry, _):
        rows = entry.ensure_table("pooled.float32", "float32", (4,))
        rows.append(digests(2), values(2))
        assert np.array_equal(rows.read(digests(1, 2)), values(1, 2))


def test_ls_and_rm_work_by_the_beginning_of_a_fingerprint(tmp_path: Path) -> None:
    for fingerprint, encoder in (("ab" * 32, "one"), ("ac" * 32, "two")):
        with cache.lock_entry(tmp_path, fingerprint, encoder) as (entry, _):
            entry.ensure_table("pooled.float32", "float32", (4,)).append(digests(1, 2), values(1, 2))
            entry.ensure_table("patches.float16", "float16", (2, 4)).append(digests(1), np.ones((1, 2, 4)))
    listed = cache.list_entries(tmp_path)
    assert [(summary.encoder, summary.rows, summary.patches) for summary in listed] == [
        ("one", 2, 1),
        ("two", 2, 1),
    ]
    assert listed[0].bytes >= 2 * 16 + 16 + 3 * RECORD.size
    with pytest.raises(DataError, match=r"2 entries .* abab.*acac"):
        cache.remove_entry(tmp_path, "a")
    with pytest.raises(DataError, match="0 entries"):
        cache.remove_entry(tmp_path, "f")
    assert cache.remove_entry(tmp_path, "ac").encoder == "two"
    assert [summary.encoder for summary in cache.list_entries(tmp_path)] == ["one"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".removed", "ac"))]


def test_entry_in_use_is_not_removed(tmp_path: Path) -> None:
    with (
        cache.lock_entry(tmp_path, FINGERPRINT, "fake"),
        pytest.raises(DataError, match="in use by another process"),
    ):
        cache.remove_entry(tmp_path, "ab")
    assert len(cache.list_entries(tmp_path)) == 1


def test_cache_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert cache.list_entries(tmp_path / "nowhere") == []
    assert cache.verify(tmp_path / "nowhere") == {}
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 2, "encoder": "x", "tables": {}}'])
def test_damaged_meta_is_listed_refused_and_removable(tmp_path: Path, text: str) -> None:
    with cache.lock_entry(tmp_path, FINGERPRINT, "fake"):
        pass
    (tmp_path / FINGERPRINT / "meta.json").write_text(text)
    assert "cache rm abab" in cache.list_entries(tmp_path)[0].problem
    with (
        pytest.raises(DataError, match="cache rm abab"),
        cache.lock_entry(tmp_path, FINGERPRINT, "") as used,
    ):
        used[0].ensure_table("pooled.float32", "float32", (4,))
    cache.remove_entry(tmp_path, "ab")
    assert cache.list_entries(tmp_path) == []


def test_another_shape_under_the_same_fingerprint_is_refused(tmp_path: Path) -> None:
    with cache.lock_entry(tmp_path, FINGERPRINT, "fake") as (entry, _):
        entry.ensure_table("pooled.float32", "float32", (4,))
        with pytest.raises(DataError, match=r"\(4,\) .* \(5,\)"):
            entry.ensure_table("pooled.float32", "float32", (5,))


@pytest.mark.parametrize("fingerprint", ["", "../../etc", "AB" * 32, "short"])
def test_what_is_no_fingerprint_never_becomes_a_path(tmp_path: Path, fingerprint: str) -> None:
    with (
        pytest.raises(SettingsError, match="fingerprint"),
        cache.lock_entry(tmp_path, fingerprint, "fake"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FEDVLM_CACHE", raising=False)
    assert cache.cache_directory() == Path("/home/me/.cache/fedvlm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/big/cache")
    assert cache.cache_directory() == Path("/big/cache/fedvlm")
    monkeypatch.setenv("FEDVLM_CACHE", "~/here")
    assert cache.cache_directory() == Path("/home/me/here")
