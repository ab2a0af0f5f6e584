"""`fedvlm verify` names whatever is no longer what was written."""

import json
import stat
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import fedvlm
from fedvlm.classifier.export import export
from fedvlm.cli import app
from fedvlm.deploy.kits import create_kits
from fedvlm.encoders.store import open_store, save_store
from fedvlm.errors import DataError
from fedvlm.report.verify import verify_files
from tests.helpers.counting import Counting, numbered
from tests.helpers.counting import run as fill


def spoil(path, place=-3):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


@pytest.fixture
def done(tmp_path, rows):
    fedvlm.run({"name": "fedot", "rounds": 2}, embedded=rows, out=tmp_path / "run")
    return tmp_path / "run"


def test_every_file_of_a_run_is_in_its_index(done):
    checked, problems = verify_files(str(done))
    assert problems == []
    files = [path for path in done.rglob("*") if path.is_file() and path.name[0] != "."]
    assert checked == len(files) - 1  # the index itself has a seal of its own
    for path in files:
        content = path.read_bytes()
        spoil(path)
        if path.name == "index.json":
            with pytest.raises(DataError, match="is damaged"):
                verify_files(str(done))
        else:
            assert [name for name, _ in verify_files(str(done))[1]] == [str(path.relative_to(done))]
        path.write_bytes(content)


def test_run_that_was_stopped_is_verified_by_its_seals(done):
    (done / "index.json").unlink()
    assert verify_files(str(done))[1] == []
    spoil(done / "result.json")
    assert [name for name, _ in verify_files(str(done))[1]] == ["result.json"]
    output = CliRunner().invoke(app, ["verify", str(done)])
    assert output.exit_code == 1
    assert "result.json" in output.output


def test_damaged_rows_of_the_cache_are_counted(tmp_path, monkeypatch):
    fill(numbered(5), Counting(), tmp_path / "cache", patches=True)
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "cache")
    assert verify_files("cache")[1] == []
    spoil(next((tmp_path / "cache").glob("*/patches*.rows")))
    assert len(verify_files("cache")[1]) == 1


def test_any_flipped_bit_of_a_store_is_refused(tmp_path, rows):
    file = save_store(tmp_path / "a", rows)
    assert verify_files(str(file)) == (1, [])
    sidecar = file.with_suffix(".json")
    content = sidecar.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 300)):
        spoil(sidecar, place)
        with pytest.raises(DataError):
            open_store(file)
        sidecar.write_bytes(content)
    for place in range(len(content) - 90, len(content)):  # the seal itself
        spoil(sidecar, place)
        with pytest.raises(DataError):
            open_store(file)
        sidecar.write_bytes(content)
    assert torch.equal(open_store(file).x, rows.x)


def test_folders_of_kits_and_caches_are_their_owners(tmp_path):
    fill(numbered(2), Counting(), tmp_path / "cache")
    create_kits(tmp_path / "kits", ["a", "b"], "127.0.0.1", 9000)
    for name in ("cache", "kits", "kits/server", "kits/site-a", "kits/site-b"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


def test_crash_shows_no_local_variables():
    code = (
        "from fedvlm import cli\n"
        "@cli.app.command()\n"
        "def crash():\n"
        "    secret_value = 'sesame'\n"
        "    raise RuntimeError('no')\n"
        "import sys; sys.argv = ['fedvlm', 'crash']; cli.main()\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "RuntimeError: no" in process.stderr
    assert "sesame" not in process.stderr + process.stdout


def test_any_damaged_file_of_an_export_is_named(done, tmp_path):
    client = json.loads((done / "manifest.json").read_text())["clients"]
    export(done, next(iter(client)), tmp_path / "own", onnx=True)
    assert verify_files(str(tmp_path / "own")) == (4, [])  # with run_onnx.py
    data = (tmp_path / "own/classifier.onnx").read_bytes()
    for place in range(0, len(data), max(1, len(data) // 40)):
        spoil(tmp_path / "own/classifier.onnx", place)
        assert [name for name, _ in verify_files(str(tmp_path / "own"))[1]] == ["classifier.onnx"]
        (tmp_path / "own/classifier.onnx").write_bytes(data)
