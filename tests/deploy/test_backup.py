"""A server's folder and a site's kit come back as they were, or not at all."""

import sqlite3
import stat
import tarfile
from contextlib import closing

import pytest

from fedvlm.deploy.kits import create_kits, read_server, read_site, restore_backup, write_backup
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.errors import DataError, SettingsError
from fedvlm.storage.files import exclusive_lock


@pytest.fixture
def kits(tmp_path):
    create_kits(tmp_path / "kits", ["a", "b"], "127.0.0.1", 9000)
    return tmp_path / "kits"


def content(folder):
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in paths}


def test_folder_of_a_server_comes_back_with_its_keys_runs_and_database(kits, tmp_path):
    folder = kits / "server"
    (folder / "runs").mkdir()
    (folder / "runs/note").write_text("x")
    with closing(sqlite3.connect(folder / "superlink.db")) as base:  # open while it is copied
        base.execute("create table node (id int)")
        base.execute("insert into node values (7)")
        base.commit()
        count = write_backup(folder, tmp_path / "kept.tar")
    assert stat.S_IMODE((tmp_path / "kept.tar").stat().st_mode) == 0o600
    assert restore_backup(tmp_path / "kept.tar", tmp_path / "back") == count
    before, after = content(folder), content(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[name] == after[name] for name in before if name != "superlink.db")
    assert stat.S_IMODE((tmp_path / "back").stat().st_mode) == 0o700
    assert read_server(tmp_path / "back").sites == ("a", "b")
    with closing(sqlite3.connect(tmp_path / "back/superlink.db")) as base:
        assert base.execute("select id from node").fetchall() == [(7,)]


def test_ledger_of_a_site_comes_back_whole_and_goes_on(kits, tmp_path):
    folder = kits / "site-a"
    for number in range(3):
        Ledger(folder).add("out", number)
    write_backup(folder, tmp_path / "kept.tar")
    restore_backup(tmp_path / "kept.tar", tmp_path / "back")
    assert Ledger(tmp_path / "back").read() == Ledger(folder).read()
    Ledger(tmp_path / "back").add("out", 3)
    history = Ledger(tmp_path / "back").read()
    assert (len(history.lines), history.broken) == (4, ())
    assert read_site(tmp_path / "back").name == "a"


def test_any_damage_of_a_backup_is_refused_and_leaves_nothing(kits, tmp_path):
    write_backup(kits / "site-a", tmp_path / "kept.tar")
    intact = (tmp_path / "kept.tar").read_bytes()
    with tarfile.open(tmp_path / "kept.tar") as archive:
        places = [entry.offset_data + entry.size // 2 for entry in archive.getmembers() if entry.size]
    for place in places:
        spoilt = bytearray(intact)
        spoilt[place] ^= 1
        (tmp_path / "bad.tar").write_bytes(spoilt)
        with pytest.raises(DataError, match="damaged|not a complete backup"):
            restore_backup(tmp_path / "bad.tar", tmp_path / "back")
    for end in (0, 100, len(intact) // 2):
        (tmp_path / "bad.tar").write_bytes(intact[:end])
        with pytest.raises(DataError, match="damaged|not a complete backup"):
            restore_backup(tmp_path / "bad.tar", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar", "kept.tar", "kits"]


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("name", ["extra.txt", ".node", "state/more"])
def test_a_member_that_the_index_does_not_list_is_refused(kits, tmp_path, kind, name):
    write_backup(kits / "site-a", tmp_path / "kept.tar")
    with tarfile.open(tmp_path / "kept.tar", "a") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "site.toml"
        archive.addfile(member)
    with pytest.raises(DataError, match=r"holds '[a-z./]+', which is not in its index|not a complete backup"):
        restore_backup(tmp_path / "kept.tar", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_nothing_is_overwritten_and_nothing_in_use_is_copied(kits, tmp_path):
    (tmp_path / "there").write_text("x")
    with pytest.raises(SettingsError, match="exists already"):
        write_backup(kits / "server", tmp_path / "there")
    with pytest.raises(SettingsError, match="neither a server's folder"):
        write_backup(tmp_path, tmp_path / "kept.tar")
    with exclusive_lock(kits / "site-a/.lock", "busy"), pytest.raises(DataError, match="stop the site"):
        write_backup(kits / "site-a", tmp_path / "kept.tar")
    write_backup(kits / "site-a", tmp_path / "kept.tar")
    with pytest.raises(SettingsError, match="never overwritten"):
        restore_backup(tmp_path / "kept.tar", kits / "site-b")
