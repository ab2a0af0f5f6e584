"""Through the network that hospitals have: proxies with and without a password, NAT, IPv6, and wrong clocks."""

import socket
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Event

import httpx
import pytest

from fedvlm.deploy.flower import fleet, network
from fedvlm.deploy.flower.fleet import FleetClient, NotAdmitted
from fedvlm.deploy.flower.network import (
    Unreachable,
    check_server,
    describe_proxy,
    describe_skew,
    find_proxy,
    join_address,
    split_address,
)
from fedvlm.deploy.flower.processes import free_port, is_server_up, start_superlink
from fedvlm.deploy.identity import keys
from fedvlm.deploy.identity.keys import create_certificates
from fedvlm.deploy.kits import create_kits, listen_address, local_address, read_server, read_site, write_site
from fedvlm.deploy.operations.events import read_events
from fedvlm.deploy.operations.status import check_folder
from fedvlm.deploy.operations.webhook import send_message
from fedvlm.deploy.server.launch import run_over_sites, running_processes, start_site
from fedvlm.deploy.site.service import describe_refusal, serve_site
from fedvlm.encoders.http import _client
from fedvlm.errors import FederationError, SettingsError
from fedvlm.runner.settings import build
from tests.deploy.conftest import CLASSES, store
from tests.deploy.test_kits import Listener
from tests.helpers.proxies import HAPROXY, TINYPROXY, RecordingProxy, haproxy, tinyproxy

PUBLIC = "127.0.0.2"  # an address of this machine that no proxy setting treats as local
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def set_proxies(monkeypatch, url):
    for name in PROXY_VARIABLES[:3]:
        monkeypatch.setenv(name, url)
        monkeypatch.setenv(name.lower(), url)


# Addresses


def test_addresses_of_ipv4_ipv6_and_names_are_split_and_joined():
    for host in ("server.example", "192.0.2.7", "2001:db8::7"):
        assert split_address(join_address(host, 8443)) == (host, 8443)
    assert join_address("::1", 80) == "[::1]:80"
    for wrong in ("server", "server:", ":80", "server:0", "server:99999", "server:x"):
        with pytest.raises(SettingsError, match="HOST:PORT"):
            split_address(wrong)


@pytest.mark.parametrize(
    ("host", "listen", "at", "local"),
    [
        ("127.0.0.1", "", ("127.0.0.1", 443), "127.0.0.1:443"),
        ("server.example", "", ("0.0.0.0", 443), "127.0.0.1:443"),
        ("2001:db8::7", "", ("::", 443), "[::1]:443"),
        ("server.example", "10.0.0.5:8443", ("10.0.0.5", 8443), "10.0.0.5:8443"),
        ("server.example", "[::]:8443", ("::", 8443), "[::1]:8443"),
    ],
)
def test_the_listening_address_is_apart_from_the_public_one(tmp_path, host, listen, at, local):
    create_kits(tmp_path / "fed", ["a"], host, 443, **({"listen": listen} if listen else {}))
    kit = read_server(tmp_path / "fed" / "server")
    assert listen_address(kit) == at and local_address(kit) == local
    assert read_site(tmp_path / "fed" / "site-a").address == kit.address == join_address(host, 443)


def test_a_wrong_listening_address_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(SettingsError, match="HOST:PORT"):
        create_kits(tmp_path / "fed", [], "server.example", 443, listen="eth0")
    assert not (tmp_path / "fed").exists()


def test_the_doctor_names_a_listening_address_that_is_not_of_this_machine_and_a_wrong_proxy(tmp_path, monkeypatch):
    create_kits(tmp_path / "fed", ["a"], "server.invalid", 443, listen="203.0.113.5:8443")
    monkeypatch.setenv("HTTPS_PROXY", "socks5://user:s3cret@proxy.example")
    findings = {finding.check: finding for finding in check_folder(tmp_path / "fed" / "server")}
    assert not findings["port"].ok and "cannot listen on 203.0.113.5:8443" in findings["port"].detail
    for check in ("proxy", "from outside"):
        assert not findings[check].ok and "HTTPS_PROXY must be" in findings[check].detail
    assert "s3cret" not in str(findings)


# Which proxy


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({}, ""),
        ({"HTTP_PROXY": "http://p:1"}, ""),  # all calls are HTTPS
        ({"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
        ({"https_proxy": "p:1"}, "http://p:1"),
        ({"ALL_PROXY": "http://p:1"}, "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "other.example,clinic.example"}, ""),
        ({"HTTPS_PROXY": "http://p:1", "no_proxy": ".clinic.example"}, ""),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*"}, ""),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "example.org"}, "http://p:1"),
    ],
)
def test_the_environment_says_which_proxy_is_used(monkeypatch, environment, proxy):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_proxy("server.clinic.example:8443") == proxy
    assert not find_proxy("localhost:8443") and not find_proxy("127.0.0.1:8443") and not find_proxy("[::1]:8443")


@pytest.mark.parametrize("url", ["socks5://p:1", "https://p:1", "http://", "http://p:x"])
def test_another_kind_of_proxy_is_refused_without_its_password(monkeypatch, url):
    monkeypatch.setenv("HTTPS_PROXY", url.replace("://", "://user:s3cret@"))
    with pytest.raises(SettingsError, match="HTTPS_PROXY must be http://HOST:PORT") as error:
        find_proxy("server.example:8443")
    assert "s3cret" not in str(error.value)


def test_a_password_is_never_shown():
    assert describe_proxy("http://user:s3cret@proxy.example:3128") == "the proxy proxy.example:3128"


# What goes to a proxy


def test_the_token_of_a_plain_encoder_and_a_plain_webhook_do_not_go_to_a_proxy(monkeypatch, tmp_path):
    (tmp_path / "token").write_text("s3cret-token")
    with RecordingProxy() as proxy:
        set_proxies(monkeypatch, proxy.url)
        with suppress(httpx.TransportError), _client("http://127.0.0.2:9/", tmp_path / "token", None, 1.0) as client:
            client.get("/")
        monkeypatch.setattr("fedvlm.deploy.operations.webhook.TRIES", 1)
        assert not send_message("http://127.0.0.2:9/hooks/s3cret", {"event": "run finished"})
        assert proxy.heads == []


@contextmanager
def listening(folder, papers, host=PUBLIC):
    listener = Listener(folder, papers, host)
    try:
        yield listener.address
    finally:
        listener.door.close()


def test_a_proxy_with_a_password_is_used_and_a_wrong_password_is_named(tmp_path, monkeypatch):
    with listening(tmp_path, create_certificates(PUBLIC)) as address, RecordingProxy("user:s%cret") as proxy:
        url = f"http://user:s%25cret@127.0.0.1:{proxy.port}"
        monkeypatch.setenv("HTTPS_PROXY", url)
        check_server(address, tmp_path / "ca.crt")
        assert proxy.heads[-1].startswith(f"CONNECT {address} ".encode())
        monkeypatch.setenv("HTTPS_PROXY", url.replace("s%25", "wrong"))
        with pytest.raises(FederationError, match=f"the proxy 127.0.0.1:{proxy.port} wants a user and a password") as e:
            check_server(address, tmp_path / "ca.crt")
        assert "wrongcret" not in str(e.value)
        monkeypatch.setenv("NO_PROXY", PUBLIC)
        check_server(address, tmp_path / "ca.crt")
        assert len(proxy.heads) == 2


def test_a_proxy_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    (tmp_path / "ca.crt").write_bytes(create_certificates(PUBLIC)["ca.crt"])
    with pytest.raises(Unreachable, match="the proxy 127.0.0.1:9, which HTTPS_PROXY names, does not answer"):
        check_server(f"{PUBLIC}:8443", tmp_path / "ca.crt")


def test_a_proxy_that_opens_tls_is_named_and_sent_nothing(tmp_path, monkeypatch):
    """With its own root and a certificate for our server's name, as inspection firewalls have."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "ca.crt").write_bytes(create_certificates(PUBLIC)["ca.crt"])
    monkeypatch.setattr(keys, "ROOT_NAME", "Clinic Inspection CA")
    with listening(tmp_path, create_certificates(PUBLIC)) as address, RecordingProxy() as proxy:
        with pytest.raises(
            FederationError, match="'Clinic Inspection CA' signed it.*a proxy or firewall on the way opens"
        ):
            check_server(address, tmp_path / "ours" / "ca.crt")
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(FederationError, match=f"the proxy 127.0.0.1:{proxy.port} opens the encryption"):
            check_server(address, tmp_path / "ours" / "ca.crt")


# The clock


def test_a_certificate_of_tomorrow_is_a_matter_of_the_clock(tmp_path):
    papers = create_certificates(PUBLIC, datetime.now(UTC) + timedelta(days=1))
    with (
        listening(tmp_path, papers) as address,
        pytest.raises(FederationError, match="the clock of this machine is wrong"),
    ):
        check_server(address, tmp_path / "ca.crt")


@pytest.mark.parametrize(("seconds", "text"), [(0, ""), (59, ""), (400, "400 s ahead of"), (-400, "400 s behind")])
def test_a_clock_is_named_by_how_far_it_is_off(seconds, text):
    assert (text in describe_skew(seconds)) and bool(describe_skew(seconds)) == bool(text)


# Real processes


class Kits:
    """A server and a site with its own samples."""

    def __init__(self, folder, rows, host, port, **server):
        rules = {"quorum": 1.0, "deadline": 120.0, "wait": 120.0, "plain": True}  # one site has no sum to hide in
        create_kits(folder / "fed", ["art"], host, port, **rules, **server)
        self.folder, self.server, self.site = folder, folder / "fed" / "server", folder / "fed" / "site-art"
        policy = self.site / "policy.toml"
        policy.write_text(policy.read_text().replace("plain = false", "plain = true"))
        path = store(folder / "art.npz", rows, rows.domains == "art")
        write_site(replace(read_site(self.site), encoder=f"store:{path}"))

    @property
    def kit(self):
        return read_server(self.server)

    def run(self, out="out"):
        source = {"classes": CLASSES}
        settings = build({"method": {"name": "fedavg", "rounds": 2}, "protocol": "own-test", "source": source})
        return run_over_sites(self.kit, settings, self.folder / out)

    def findings(self, folder):
        return {finding.check: finding for finding in check_folder(folder)}


@pytest.mark.deployed
def test_secrets_never_go_to_a_proxy(tmp_path, rows, monkeypatch):
    """A proxy sees where a site connects to, and nothing else; the server's own commands use none."""
    kits = Kits(tmp_path, rows, PUBLIC, free_port())
    with RecordingProxy() as proxy, running_processes() as running:
        set_proxies(monkeypatch, proxy.url)
        running.append(start_superlink(kits.kit))
        assert is_server_up(kits.kit) and proxy.heads == []
        running.append(start_site(kits.site))
        result = kits.run()
        heads = list(proxy.heads)
    assert len(result.rounds) == 2
    assert heads and {head.split(b" ")[0] for head in heads} == {b"CONNECT"}
    assert {head.split(b" ")[1].decode() for head in heads} == {kits.kit.address}
    assert not any(b"flwr" in head.lower() or b"fedvlm" in head.lower() for head in heads)


@pytest.mark.deployed
@pytest.mark.skipif(not (TINYPROXY and HAPROXY), reason="tinyproxy or haproxy is not installed (make tools)")
def test_a_run_goes_through_tinyproxy_with_a_password_and_haproxy_as_nat(tmp_path, rows, monkeypatch):
    """Site, forward proxy with a password, TCP proxy at the public address, server at another port."""
    public, inner = free_port(), free_port()
    kits = Kits(tmp_path, rows, PUBLIC, public, listen=f"127.0.0.1:{inner}")
    with (
        tinyproxy(tmp_path, "user", "s3cret") as port,
        haproxy(tmp_path, (PUBLIC, public), ("127.0.0.1", inner)),
        running_processes() as running,
    ):
        running.append(start_superlink(kits.kit))
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        wrong = kits.findings(kits.site)["server"]
        assert not wrong.ok and f"the proxy 127.0.0.1:{port} wants a user and a password" in wrong.detail
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:s3cret@127.0.0.1:{port}")
        found = kits.findings(kits.site)
        assert all(found[check].ok for check in ("name", "proxy", "server", "clock")), found
        assert f"the proxy 127.0.0.1:{port} is used" in found["proxy"].detail and "s3cret" not in str(found)
        assert kits.findings(kits.server)["from outside"].ok
        running.append(start_site(kits.site))
        result = kits.run()
        assert [sorted(line["clients"]) for line in result.rounds] == [["art"], ["art"]]
    log = (tmp_path / "tinyproxy.log").read_text()
    assert f"CONNECT {PUBLIC}:{public}" in log
    told = (kits.site / "site.log").read_text() + str(read_events(kits.site))
    assert "s3cret" not in told


@pytest.mark.deployed
@pytest.mark.skipif(not TINYPROXY, reason="tinyproxy is not installed (make tools)")
def test_a_forward_proxy_that_refuses_the_address_is_named(tmp_path, monkeypatch):
    (tmp_path / "ca.crt").write_bytes(create_certificates(PUBLIC)["ca.crt"])
    with tinyproxy(tmp_path, refuses=PUBLIC) as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        with pytest.raises(Unreachable, match=rf"the proxy 127.0.0.1:{port} does not connect to {PUBLIC}:8443 \(403"):
            check_server(f"{PUBLIC}:8443", tmp_path / "ca.crt")


@pytest.mark.deployed
@pytest.mark.skipif(not HAPROXY, reason="haproxy is not installed (make tools)")
def test_a_site_refuses_an_haproxy_that_terminates_tls_and_says_so_in_its_log(tmp_path, rows, monkeypatch):
    public, inner = free_port(), free_port()
    kits = Kits(tmp_path, rows, PUBLIC, public, listen=f"127.0.0.1:{inner}")
    monkeypatch.setattr(keys, "ROOT_NAME", "Clinic Inspection CA")
    papers = create_certificates(PUBLIC)
    (tmp_path / "inspection.pem").write_bytes(papers["server.pem"] + papers["server.key"])
    with (
        haproxy(tmp_path, (PUBLIC, public), ("127.0.0.1", inner), tmp_path / "inspection.pem"),
        running_processes() as running,
    ):
        running.append(start_superlink(kits.kit))
        with pytest.raises(FederationError, match="'Clinic Inspection CA' signed it"):
            serve_site(read_site(kits.site), lambda text: None)
        finding = kits.findings(kits.site)["server"]
    assert "opens the encryption" in str(read_events(kits.site)) and not finding.ok
    assert "Clinic Inspection CA" in finding.detail


@pytest.mark.deployed
def test_a_site_whose_clock_is_wrong_is_told_of_the_clock(tmp_path, rows, monkeypatch):
    """The server refuses a signature of another time; neither the key nor the certificate is the reason."""
    kits = Kits(tmp_path, rows, "127.0.0.1", free_port())

    class LateClock(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(zone) - timedelta(hours=2)

    with running_processes() as running:
        running.append(start_superlink(kits.kit))
        for module in (fleet, network):
            monkeypatch.setattr(module, "datetime", LateClock)
        client = FleetClient(kits.kit.address, kits.site, Event())
        with closing(client.http), pytest.raises(NotAdmitted) as error:
            client.connect()
        with pytest.raises(FederationError, match="the clock of this machine is 7[12].. s behind the server's"):
            serve_site(read_site(kits.site), lambda text: None)
        finding = kits.findings(kits.site)["clock"]
    assert "not known there" not in describe_refusal(read_site(kits.site), error.value)
    assert not finding.ok and "behind the server's" in finding.detail
    assert "behind the server's" in str(read_events(kits.site))


def has_ipv6():
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.deployed
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_run_over_ipv6(tmp_path, rows):
    kits = Kits(tmp_path, rows, "::1", free_port())
    with running_processes() as running:
        running.append(start_superlink(kits.kit))
        running.append(start_site(kits.site))
        assert len(kits.run().rounds) == 2
        found = kits.findings(kits.server)
    assert found["from outside"].ok and kits.kit.address.startswith("[::1]:")
