"""Kits hold what a site needs and nothing of another's; certificates are refused in words."""

import http.server
import socket
import ssl
import stat
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Event, Thread

import numpy as np
import pytest

from fedvlm.cli import main
from fedvlm.deploy.flower.network import Unreachable, check_server
from fedvlm.deploy.identity.keys import Signer, Verifier, create_certificates
from fedvlm.deploy.kits import create_kits, read_server, read_site, with_options, write_site
from fedvlm.deploy.site.service import serve_site
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import FederationError, SettingsError
from fedvlm.storage.files import exclusive_lock

SECRETS = ("key", "signing.key", "server.key")


@pytest.fixture
def kits(tmp_path):
    return create_kits(tmp_path / "fed", ["a", "b", "clinic 3"], "127.0.0.1", 8443)


def test_private_keys_are_their_owners_and_in_one_kit_only(kits):
    private = [path for kit in kits for path in kit.rglob("*") if b"PRIVATE" in content(path)]
    expected = ["ca.key", *["key"] * 3, "server.key", "signing.key"]
    assert sorted(path.name for path in private) == expected
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in private)
    assert len({content(path) for path in private}) == len(private)
    sites = [kit for kit in kits if kit.name != "server"]
    for kit in sites:
        assert not list(kit.glob("*.key"))
        assert len((kit / "README.txt").read_text().splitlines()) == 3
        assert "fedvlm deploy site" in (kit / "README.txt").read_text()


def content(path):
    return path.read_bytes() if path.is_file() else b""


def test_kits_are_read_as_they_were_written(kits):
    server = read_server(kits[0])
    assert server.sites == ("a", "b", "clinic 3") and server.address == "127.0.0.1:8443"
    site = read_site(kits[3])
    assert (site.name, site.address) == ("clinic 3", server.address)
    options = {"data": str(kits[0]), "encoder": "demo", "source": {"layout": "class"}}
    configured_kit = with_options(site, options)
    write_site(configured_kit)
    assert read_site(kits[3]) == configured_kit and configured_kit.source == {"layout": "class"}


def test_kits_are_never_overwritten(kits):
    with pytest.raises(SettingsError, match="is not empty; kits hold keys"):
        create_kits(kits[0].parent, ["a"], "127.0.0.1", 8443)


@pytest.mark.parametrize(
    ("sites", "error"),
    [(["a/b"], "'a/b' is invalid"), (["a", "A"], "not all different")],
)
def test_site_names_that_make_no_folder_are_refused(tmp_path, sites, error):
    with pytest.raises(SettingsError, match=error):
        create_kits(tmp_path / "x", sites, "127.0.0.1", 8443)


@pytest.mark.parametrize(
    ("host", "port", "error"),
    [
        ("my server", 8443, "host = 'my server'"),
        ("https://server", 8443, "host = 'https://server'"),
        (":::1", 8443, "host = ':::1'"),
        ("fe80::1%eth0", 8443, "host = 'fe80"),
        ("server", 99999, "port = 99999"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_and_nothing_is_written(tmp_path, host, port, error):
    with pytest.raises(SettingsError, match=error):
        create_kits(tmp_path / "x", ["a"], host, port)
    assert not (tmp_path / "x").exists()


def test_a_server_is_started_once(kits, monkeypatch, capsys):
    monkeypatch.setattr("fedvlm.cli.deploy._stop_gently", lambda: None)
    monkeypatch.setattr(sys, "argv", ["fedvlm", "deploy", "server", str(kits[0])])
    with exclusive_lock(kits[0] / ".lock", ""), pytest.raises(SystemExit):
        main()
    assert "is already running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("quorum = 2.0", "quorum must be above 0 and at most 1, got 2.0"),
        ("quorums = 0.5", "no setting of .*did you mean 'quorum'"),
        ("deadline = 'soon'", "deadline must be .*, got 'soon'"),
    ],
)
def test_a_mistake_in_a_kit_is_named(kits, line, error):
    path = kits[0] / "server.toml"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(SettingsError, match=error):
        read_server(kits[0])


@pytest.mark.parametrize(("file", "read"), [("server.toml", read_server), ("site.toml", read_site)])
def test_a_kit_of_another_format_is_refused_with_the_reason(kits, file, read):
    folder = kits[0] if file == "server.toml" else kits[1]
    text = (folder / file).read_text()
    for older in (text.replace("format = 2\n", ""), text.replace("format = 2", "format = 1")):
        (folder / file).write_text(older)
        with pytest.raises(SettingsError, match=r"needs kits of format 2, got format 1; create new kits"):
            read(folder)


def test_a_signature_is_of_one_message_and_one_key(kits):
    sign = Signer(kits[1] / "key")
    check = Verifier(sign.public)
    message = sign(Message({"round": 1}, {"head": np.ones(3)}))
    check(message, "site a")
    for changed in (
        Message({**message.header, "round": 2}, message.arrays),
        Message(message.header, {"head": np.ones(3) * 2}),
        Message({**message.header, "signature": ""}, message.arrays),
    ):
        with pytest.raises(FederationError, match="not signed by site a of this federation"):
            check(changed, "site a")
    with pytest.raises(FederationError, match="not signed"):
        Verifier(Signer(kits[2] / "key").public)(message, "site b")


class Listener:
    """A server with a certificate, on a free port of this machine, for as long as a test."""

    def __init__(self, folder, papers, host="127.0.0.1"):
        for name, data in papers.items():
            (folder / name).write_bytes(data)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self.door = socket.create_server((host, 0))
        self.address = f"{host}:{self.door.getsockname()[1]}"
        Thread(target=self._serve, args=[context], daemon=True).start()

    def _serve(self, context):
        while True:
            try:
                stream, _ = self.door.accept()
                context.wrap_socket(stream, server_side=True).close()
            except ssl.SSLError:
                continue
            except OSError:
                return


def test_an_expired_certificate_is_refused_with_the_remedy(tmp_path):
    listener = Listener(tmp_path, create_certificates("127.0.0.1", datetime(2020, 1, 1, tzinfo=UTC), 30))
    with listener.door, pytest.raises(FederationError, match="expired.*fedvlm deploy renew"):
        check_server(listener.address, tmp_path / "ca.crt")


def test_a_certificate_of_another_federation_or_host_is_refused(tmp_path, kits):
    listener = Listener(tmp_path, create_certificates("127.0.0.1"))
    with listener.door:
        check_server(listener.address, tmp_path / "ca.crt")
        with pytest.raises(FederationError, match="made for another federation"):
            check_server(listener.address, kits[0] / "ca.crt")
    (tmp_path / "b").mkdir()
    named = Listener(tmp_path / "b", create_certificates("clinic.example"), "127.0.0.2")
    with named.door, pytest.raises(FederationError, match="--host"):
        check_server(named.address, tmp_path / "b" / "ca.crt")


@pytest.mark.parametrize("loopback", ["127.0.0.1", "localhost"])
def test_a_server_with_a_name_is_believed_by_flowers_own_processes_beside_it(tmp_path, loopback):
    listener = Listener(tmp_path, create_certificates("clinic.example"))
    with listener.door:
        check_server(listener.address.replace("127.0.0.1", loopback), tmp_path / "ca.crt")


def test_plain_http_is_refused(kits):
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    Thread(target=server.handle_request, daemon=True).start()
    with pytest.raises(FederationError, match="does not answer with TLS.*plain HTTP is refused"):
        check_server(f"127.0.0.1:{server.server_port}", kits[1] / "ca.crt")
    server.server_close()
    with pytest.raises(Unreachable, match="no server answers at 127.0.0.1:.*refused"):
        check_server(f"127.0.0.1:{server.server_port}", kits[1] / "ca.crt")


def test_a_site_waits_for_its_server_and_says_why(kits):
    kit = replace(read_site(kits[1]), address="nobody.invalid:8443")
    stop, printed = Event(), []

    def print_line(text):
        printed.append(text)
        if len(printed) == 2:
            stop.set()

    serve_site(kit, print_line, stop)
    assert "its certificate lasts 364 more days" in printed[0]
    assert "no server answers at nobody.invalid:8443 (" in printed[1] and "retrying" in printed[1]


def test_a_certificate_lasts_a_year():
    from cryptography.x509 import load_pem_x509_certificate

    certificate = load_pem_x509_certificate(create_certificates("127.0.0.1")["server.pem"])
    remaining = certificate.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=364) < remaining < timedelta(days=366)
