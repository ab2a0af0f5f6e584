"""What lies in a folder of one person is that person's alone, whatever the umask."""

import fcntl
import os
import stat

import pytest

from fedvlm.errors import DataError
from fedvlm.storage import files
from fedvlm.storage.files import exclusive_lock, is_locked, make_private_folder, open_for_append, write_file


@pytest.fixture(autouse=True)
def generous():
    """Files of programs that do not care would be readable by all."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_folders_in_a_private_folder_are_private(tmp_path):
    private = tmp_path / "own"
    make_private_folder(private)
    write_file(private / "plain", b"1")
    write_file(private / "deep" / "deeper" / "file", b"1")
    with open_for_append(private / "log") as file:
        file.write(b"1")
    with exclusive_lock(private / "lock", "busy"):
        pass
    modes = {str(path.relative_to(private)): mode(path) for path in private.rglob("*")}
    folders = {"deep", "deep/deeper"}
    assert {name: modes.pop(name) for name in folders} == dict.fromkeys(folders, 0o700)
    assert set(modes) == {"plain", "deep/deeper/file", "log", "lock"}
    assert set(modes.values()) == {0o600}


def test_files_in_an_open_folder_are_as_the_umask_says(tmp_path):
    (tmp_path / "all").mkdir(mode=0o755)
    write_file(tmp_path / "all" / "file", b"1")
    write_file(tmp_path / "all" / "more" / "file", b"1")
    assert mode(tmp_path / "all" / "file") == mode(tmp_path / "all" / "more" / "file") == 0o644
    assert mode(tmp_path / "all" / "more") == 0o755
    os.umask(0o077)
    write_file(tmp_path / "all" / "other", b"1")
    assert mode(tmp_path / "all" / "other") == 0o600


def test_who_only_looks_at_a_lock_keeps_nobody_out(tmp_path, monkeypatch):
    """As `status` does every second: it has the lock for the moment of looking."""
    descriptors = [os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)]
    fcntl.flock(descriptors[0], fcntl.LOCK_SH)
    monkeypatch.setattr(files, "sleep", lambda seconds: os.close(descriptors.pop()) if descriptors else None)
    with exclusive_lock(tmp_path / "lock", "taken"):
        assert is_locked(tmp_path / "lock")
        with pytest.raises(DataError, match="taken"), exclusive_lock(tmp_path / "lock", "taken"):
            pass
    assert not is_locked(tmp_path / "lock")
