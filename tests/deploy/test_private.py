"""Nobody else on the machine can read what a kit, a server or a cache keeps."""

import os
import stat
import sys
from pathlib import Path

from PIL import Image

import fedvlm
from fedvlm.deploy.flower.processes import Process


def readable(folder):
    """Files and folders that anyone but the owner can do something with."""
    paths = [folder, *folder.rglob("*")]
    return [str(path) for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_kits_and_server_are_their_owners_after_a_whole_run(tmp_path, rows, place_of):
    before = os.umask(0o022)
    try:
        place = place_of(tmp_path, rows)
        place.run()
    finally:
        os.umask(before)
    names = {path.name for path in (tmp_path / "kits").rglob("*")}
    assert {"ledger.jsonl", "policy.toml", "server.toml", "local.safetensors"} <= names
    for path in (tmp_path / "kits").iterdir():
        assert readable(path) == []


def test_a_cache_is_its_owners(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "cache"))
    for name in "ab":
        for row in range(8):
            path = tmp_path / "set" / name / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (ord(name), 9 * row, 5)).save(path)
    before = os.umask(0o022)
    try:
        fedvlm.run(
            "zero-shot",
            data=str(tmp_path / "set"),
            encoder="demo",
            protocol="own-test",
            clients={"partition": "dirichlet", "count": 2, "min_samples": 1},
            out=tmp_path / "run",
        )
    finally:
        os.umask(before)
    assert any(file.is_file() for file in (tmp_path / "cache").rglob("*"))
    assert readable(tmp_path / "cache") == []


def test_what_flowers_processes_write_is_their_owners(tmp_path):
    code = "open('made', 'w').close()"
    before = os.umask(0o022)
    try:
        process = Process(
            "a child",
            [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}"],
            tmp_path / "log",
            os.environ,
        )
        process.child.wait(60)
    finally:
        os.umask(before)
        process.stop()
    assert stat.S_IMODE((Path(tmp_path) / "made").stat().st_mode) == 0o600
