"""Proxies for tests: one in this process that records what it can read, and Debian's tinyproxy and haproxy."""

import shutil
import socket
import subprocess
from base64 import b64encode
from contextlib import contextmanager, suppress
from threading import Thread
from time import monotonic, sleep

from fedvlm.deploy.flower.processes import free_port

TINYPROXY = shutil.which("tinyproxy")
HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/bin")


def relay(source, target):
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for stream in (source, target):
        with suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)


class RecordingProxy:
    """A forward proxy that keeps the head of every request it can read; what is inside a tunnel it cannot."""

    def __init__(self, user=""):
        self.heads, self.user = [], user
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://{user + '@' if user else ''}127.0.0.1:{self.port}"
        Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with suppress(OSError):
            while True:
                stream, _ = self.listener.accept()
                Thread(target=self._handle, args=[stream], daemon=True).start()

    def _handle(self, stream):
        with stream, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head and (data := stream.recv(1 << 16)):
                head += data
            self.heads.append(head)
            method, target, *_ = head.split(b" ")
            if self.user and b"Basic " + b64encode(self.user.encode()) not in head:
                stream.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            elif method != b"CONNECT":
                stream.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            else:
                host, _, port = target.decode().rpartition(":")
                with socket.create_connection((host.strip("[]"), int(port)), 10) as other:
                    stream.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    Thread(target=relay, args=[other, stream], daemon=True).start()
                    relay(stream, other)

    def __enter__(self):
        return self

    def __exit__(self, *words):
        self.listener.close()


@contextmanager
def running_program(command, port, host="127.0.0.1"):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = monotonic() + 20
        while not is_open(host, port):
            assert process.poll() is None and monotonic() < end, process.stdout.read()
            sleep(0.05)
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):  # tinyproxy waits for its connections
            process.wait(5)
        process.kill()
        process.wait()
        process.stdout.close()


def is_open(host, port):
    with suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


@contextmanager
def tinyproxy(folder, user="", password="", refuses=""):
    """Run tinyproxy and yield its port; with a user it asks for a password, and it refuses one host."""
    port = free_port()
    lines = [f"Port {port}", "Listen 127.0.0.1", "Timeout 600", "Allow 127.0.0.1", f'LogFile "{folder}/tinyproxy.log"']
    lines += [f"BasicAuth {user} {password}"] if user else []
    if refuses:
        (folder / "filter").write_text(refuses.replace(".", "\\.") + "\n")
        lines += [f'Filter "{folder}/filter"']
    (folder / "tinyproxy.conf").write_text("\n".join(lines) + "\n")
    with running_program([TINYPROXY, "-d", "-c", str(folder / "tinyproxy.conf")], port):
        yield port


@contextmanager
def haproxy(folder, at, to, certificate=None):
    """Run haproxy between two addresses: as a TCP proxy, or with a certificate as one that terminates TLS."""
    host, port = at
    tls = f" ssl crt {certificate}" if certificate else ""
    server = f"server one {to[0]}:{to[1]}" + (" ssl verify none" if certificate else "")
    (folder / "haproxy.cfg").write_text(
        f"defaults\n mode tcp\n timeout connect 5s\n timeout client 600s\n timeout server 600s\n"
        f"frontend front\n bind {host}:{port}{tls}\n default_backend back\nbackend back\n {server}\n"
    )
    with running_program([HAPROXY, "-f", str(folder / "haproxy.cfg"), "-db"], port, host):
        yield
