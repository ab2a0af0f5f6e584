"""Key files with a passphrase: of a file that the environment names, or asked for."""

import os
import shutil
import subprocess
import sys

import pytest

from fedvlm.deploy.identity import keys
from fedvlm.deploy.identity.keys import PASSPHRASE_VARIABLE, Signer, Verifier, create_server_certificate
from fedvlm.deploy.kits import create_kits
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import SettingsError

SECRET = "correct horse"


@pytest.fixture
def passphrase(tmp_path, monkeypatch):
    path = tmp_path / "passphrase"
    path.write_text(f"{SECRET}\n")
    monkeypatch.setenv(PASSPHRASE_VARIABLE, str(path))
    return path


@pytest.fixture
def kits(tmp_path, passphrase):
    create_kits(tmp_path / "kits", ["a"], "127.0.0.1", 9000)
    return tmp_path / "kits"


def signs(path):
    signer = Signer(path)
    Verifier(signer.public)(signer(Message({"kind": "x"})), "it")
    return True


def test_all_new_keys_have_the_passphrase_and_are_used_with_it(kits):
    paths = [kits / "server" / name for name in ("signing.key", "ca.key", "server.key")] + [kits / "site-a" / "key"]
    assert all(b"BEGIN ENCRYPTED PRIVATE KEY" in path.read_bytes() for path in paths)
    assert signs(paths[0]) and signs(paths[3])
    assert create_server_certificate("127.0.0.1", paths[1].read_bytes())["server.pem"]


def test_without_or_with_another_passphrase_the_key_is_refused(kits, passphrase, monkeypatch):
    passphrase.write_text("wrong")
    with pytest.raises(SettingsError, match=r"key is not a private key, or its passphrase is wrong"):
        Signer(kits / "site-a" / "key")
    passphrase.unlink()
    with pytest.raises(SettingsError, match=f"{PASSPHRASE_VARIABLE} = .* cannot be read"):
        Signer(kits / "site-a" / "key")
    monkeypatch.delenv(PASSPHRASE_VARIABLE)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(SettingsError, match=f"key has a passphrase; write it to a file that {PASSPHRASE_VARIABLE}"):
        Signer(kits / "site-a" / "key")


def test_in_a_terminal_it_is_asked_for_once_and_children_have_it(kits, monkeypatch):
    asked = []
    monkeypatch.delenv(PASSPHRASE_VARIABLE)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(keys, "getpass", lambda prompt: asked.append(prompt) or SECRET)
    assert signs(kits / "site-a" / "key") and signs(kits / "server" / "signing.key")
    if sys.platform == "linux":
        assert len(asked) == 1 and "site-a" in asked[0]
        path = os.environ[PASSPHRASE_VARIABLE]
        assert subprocess.run(["cat", path], capture_output=True).stdout.decode() == SECRET
    monkeypatch.delenv(PASSPHRASE_VARIABLE)


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs OpenSSH")
def test_a_key_gets_a_passphrase_by_ssh_keygen(tmp_path, monkeypatch):
    create_kits(tmp_path / "kits", ["a"], "127.0.0.1", 9000)
    key = tmp_path / "kits" / "site-a" / "key"
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", SECRET, "-f", str(key)]
    copy = shutil.copy(key, tmp_path / "copy")
    subprocess.run([*change, "-m", "PKCS8"], check=True)
    (tmp_path / "passphrase").write_text(SECRET)
    monkeypatch.setenv(PASSPHRASE_VARIABLE, str(tmp_path / "passphrase"))
    assert signs(key)
    subprocess.run([*change[:-1], str(copy)], check=True)  # OpenSSH's own encryption
    with pytest.raises(SettingsError, match="ssh-keygen -p -m PKCS8 -f"):
        Signer(copy)
