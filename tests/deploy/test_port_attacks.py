"""A run of real processes while strangers, and a lying site, work at the server's port for two minutes."""

import gc
import os
import socket
import ssl
import sys
import warnings
from base64 import b64encode
from contextlib import ExitStack, suppress
from threading import Event, Thread
from time import monotonic, sleep

import psutil
import pytest

from fedvlm.deploy.server.launch import run_over_sites
from fedvlm.engines.flower import import_flower

import_flower()
from cryptography.hazmat.primitives.serialization import load_ssh_private_key  # noqa: E402
from flwr.supercore.date import now  # noqa: E402
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message  # noqa: E402

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.long,  # `make test-long`: it takes more than two minutes
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("federation"),
]
SECONDS = 120.0
MEGABYTE = 1 << 20


class Attackers:
    """Threads that repeat an attack until they are stopped, from an address of their own and from that of the sites."""

    def __init__(self, federation):
        self.kit, self.stop, self.count = federation.kit, Event(), 0
        self.key = (federation.site("photo") / "key").read_bytes()
        attacks = (self.endless, self.large_headers, self.long_path, self.half_headers, self.no_tls, self.slow_body)
        attacks = (*attacks, self.large_message, self.many_calls)
        sources = ("127.0.0.2", "127.0.0.1")
        self.threads = [Thread(target=self.repeat, args=(a, s), daemon=True) for a in attacks for s in sources]

    def repeat(self, attack, source):
        while not self.stop.is_set():
            with suppress(OSError):
                attack(source)
            self.count += 1
            sleep(0.05)  # the machine has two cores, and the attackers share them with the server

    def plain(self, source):
        port = int(self.kit.address.rpartition(":")[2])
        return socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0))

    def connect(self, source):
        context = ssl.create_default_context(cafile=str(self.kit.folder / "ca.crt"))
        plain = self.plain(source)
        try:
            return context.wrap_socket(plain, server_hostname="127.0.0.1")
        except OSError:
            plain.close()
            raise

    def send(self, source, data):
        with self.connect(source) as caller:
            caller.sendall(data)
            return caller.recv(1000)

    def endless(self, source):
        with self.connect(source) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nh: ")
            while not self.stop.is_set():
                caller.sendall(b"a" * MEGABYTE)

    def large_headers(self, source):
        self.send(source, b"GET / HTTP/1.1\r\nHost: x\r\n" + (b"h: " + b"a" * MEGABYTE + b"\r\n") * 5)

    def long_path(self, source):
        self.send(source, b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")

    def half_headers(self, source):
        with ExitStack() as callers:
            for _ in range(100):
                with suppress(OSError):
                    caller = callers.enter_context(self.connect(source))
                    caller.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nX: ")
            self.stop.wait(5)

    def no_tls(self, source):
        with ExitStack() as callers:
            for _ in range(100):
                with suppress(OSError):
                    callers.enter_context(self.plain(source))
            self.stop.wait(5)

    def many_calls(self, source):
        self.send(source, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 500)

    def signed(self, path, size):
        key, time = load_ssh_private_key(self.key, None), now().isoformat()
        words = {
            "flwr-public-key": b64encode(public_key_to_bytes(key.public_key())).decode(),
            "flwr-timestamp": time,
            "flwr-signature": b64encode(sign_message(key, time.encode())).decode(),
            "content-type": "application/protobuf",
            "content-length": size,
        }
        return f"POST {path} HTTP/1.1\r\n{''.join(f'{key}: {word}' + chr(13) + chr(10) for key, word in words.items())}"

    def slow_body(self, source):
        with self.connect(source) as caller:
            caller.sendall(self.signed("/v1/fleet/push-object", 5 * MEGABYTE).encode() + b"\r\n")
            for _ in range(20):
                caller.sendall(b"a")
                self.stop.wait(0.5)

    def large_message(self, source):
        """As long as a message of 300,000 empty tensors is as a list of Flower's objects."""
        head = self.signed("/v1/fleet/push-messages", 21 * MEGABYTE).encode() + b"\r\n"
        return self.send(source, head + os.urandom(1000))


def test_a_run_goes_on_while_the_port_is_attacked(federation, tmp_path):
    federation.rules(quorum=1.0, deadline=60.0)
    settings = federation.settings({"name": "fedot", "rounds": 3, "lr": 1e-3})
    server = psutil.Process(federation.link.child.pid)
    log = federation.kit.folder / "superlink.log"
    run_over_sites(federation.kit, settings, tmp_path / "before")
    memory, logged, most = server.memory_info().rss, log.stat().st_size, 0
    attackers = Attackers(federation)
    assert b" 413 " in attackers.large_message("127.0.0.2")
    for thread in attackers.threads:
        thread.start()
    end, runs = monotonic() + SECONDS, 0
    try:
        while monotonic() < end:
            run = run_over_sites(federation.kit, settings, tmp_path / f"run-{runs}")
            assert [sorted(line["clients"]) for line in run.rounds] == [["art", "photo", "sketch"]] * 3
            runs, most = runs + 1, max(most, server.memory_info().rss)
    finally:
        attackers.stop.set()
    for thread in attackers.threads:
        thread.join(20)
    with warnings.catch_warnings():  # sockets of attacks that were cut off
        warnings.simplefilter("ignore")
        gc.collect()
    grown = (most - memory) >> 20, (log.stat().st_size - logged) >> 10
    summary = f"{runs} runs, {attackers.count} attacks, memory +{grown[0]} MB, log +{grown[1]} kB"
    sys.stderr.write(summary + "\n")
    assert runs >= 2 and attackers.count > 200, summary
    assert grown[0] < 400 and grown[1] < 100, summary
