"""Through the network that hospitals have: proxies with and without a password, NAT, IPv6, and wrong clocks."""

from dataclasses import replace

import pytest

from fedvlm.deploy.flower.processes import free_port, start_superlink
from fedvlm.deploy.kits import create_kits, read_server, read_site, write_site
from fedvlm.deploy.server.launch import run_over_sites, running_processes, start_site
from fedvlm.runner.settings import build
from tests.deploy.conftest import CLASSES, store
from tests.helpers.proxies import RecordingProxy

PUBLIC = "127.0.0.2"  # an address of this machine that no proxy setting treats as local


@pytest.mark.deployed
def test_secrets_never_go_to_a_proxy(tmp_path, rows, monkeypatch):
    """A proxy sees where a site connects to, and nothing else: no token, no signature, no plain call."""
    create_kits(tmp_path / "fed", ["art"], PUBLIC, free_port(), quorum=1.0, deadline=120.0, wait=120.0)
    kit, site = read_server(tmp_path / "fed" / "server"), tmp_path / "fed" / "site-art"
    write_site(replace(read_site(site), encoder=f"store:{store(tmp_path / 'a.npz', rows, rows.domains == 'art')}"))
    settings = build(
        {"method": {"name": "fedavg", "rounds": 1}, "protocol": "own-test", "source": {"classes": CLASSES}}
    )
    with RecordingProxy() as proxy, running_processes() as running:
        running.append(start_superlink(kit))
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        running.append(start_site(site))
        run_over_sites(kit, settings, tmp_path / "out")
        heads = list(proxy.heads)
    assert heads and {head.split(b" ")[0] for head in heads} == {b"CONNECT"}
    assert {head.split(b" ")[1].decode() for head in heads} == {kit.address}
    secret = (kit.folder / "control.key").read_bytes() if (kit.folder / "control.key").exists() else b"flwr-"
    for head in heads:
        assert b"flwr-" not in head and b"fedvlm" not in head.lower() and secret not in head
