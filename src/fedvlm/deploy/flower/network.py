"""Reach a server through the networks that hospitals have: proxies, address translation, IPv6, wrong clocks."""

import ssl
from base64 import b64encode
from contextlib import closing, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

import httpx
from cryptography import x509

from fedvlm.deploy.identity.keys import ROOT_NAME
from fedvlm.errors import FederationError, SettingsError

CALL_TIMEOUT_SECONDS = 30.0
CHECK_TIMEOUT_SECONDS = 5.0
MAX_CLOCK_SKEW_SECONDS = 60.0  # seconds that two clocks may differ by
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class Unreachable(FederationError):
    """The server does not answer yet."""


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"{address!r} is not an address; write HOST:PORT, or [IPV6]:PORT")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_proxy(address: str) -> str:
    """Return the proxy for calls to an address, by HTTPS_PROXY and NO_PROXY; nothing if there is none."""
    host, _ = split_address(address)
    proxies = getproxies_environment()
    proxy = proxies.get("https") or proxies.get("all", "")
    if not proxy or host in LOOPBACK_NAMES or proxy_bypass(host if ":" not in host else f"[{host}]"):
        return ""
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    try:
        parts = urlsplit(proxy)
        is_valid = parts.scheme == "http" and parts.hostname and (parts.port or 80)
    except ValueError:  # a port that is none
        is_valid = False
    if not is_valid:
        raise SettingsError(
            "HTTPS_PROXY must be http://HOST:PORT, or http://USER:PASSWORD@HOST:PORT with special characters as %XX; "
            "other kinds of proxies are not supported"
        )
    return proxy


def describe_proxy(proxy: str) -> str:
    """Return a proxy's address without its password."""
    parts = urlsplit(proxy)
    return f"the proxy {join_address(parts.hostname or '', parts.port or 80)}"


def tls_context(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:  # also where it is no certificate
        raise SettingsError(f"{ca} is missing or not a certificate ({error}); restore the folder") from error


def make_http_client(address: str, ca: Path) -> Any:
    """Create the client of a site's calls to its server: the one place for certificates, timeouts and proxies.

    Through a proxy it makes a tunnel; headers and bodies are inside its TLS, so a proxy sees the address alone.
    """
    proxy = find_proxy(address) or None  # nothing else of the environment counts, such as a password in .netrc
    return httpx.Client(verify=tls_context(ca), timeout=CALL_TIMEOUT_SECONDS, trust_env=False, proxy=proxy)


def open_connection(address: str, context: ssl.SSLContext, proxy: str = "") -> HTTPSConnection:
    """Prepare a connection, through a proxy if one is named; `connect` or a request opens it."""
    host, port = split_address(address)
    if not proxy:
        return HTTPSConnection(host, port, context=context, timeout=CHECK_TIMEOUT_SECONDS)
    parts = urlsplit(proxy)
    connection = HTTPSConnection(parts.hostname or "", parts.port or 80, context=context, timeout=CHECK_TIMEOUT_SECONDS)
    user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    headers = {"Proxy-Authorization": f"Basic {b64encode(user.encode()).decode()}"} if parts.username else {}
    connection.set_tunnel(host, port, headers)
    return connection


def check_server(address: str, ca: Path, is_local: bool = False) -> None:
    """Return if our server is there, on this machine by any name; raise other errors for another, none, or a proxy."""
    proxy, context = "" if is_local else find_proxy(address), tls_context(ca)
    context.check_hostname = not is_local  # the root signs no other server
    way = f" through {describe_proxy(proxy)}" if proxy else ""
    try:
        with closing(open_connection(address, context, proxy)) as connection:
            connection.connect()
    except ssl.SSLCertVerificationError as error:
        raise FederationError(_describe_certificate_error(address, proxy, error.verify_message)) from error
    except ssl.SSLEOFError as error:  # as a proxy does whose server is down
        raise Unreachable(f"{address} closes the connection before it is established{way}") from error
    except ssl.SSLError as error:
        raise FederationError(
            f"{address} does not answer with TLS ({error.reason}){way}; is another program listening there? plain HTTP "
            "is refused"
        ) from error
    except OSError as error:
        raise _describe_connection_error(address, proxy, error) from error


def _describe_connection_error(address: str, proxy: str, error: OSError) -> FederationError:
    named, text = describe_proxy(proxy) if proxy else "", str(error)
    if not text.startswith("Tunnel connection failed"):
        place = f"{named}, which HTTPS_PROXY names, does not answer" if proxy else f"no server answers at {address}"
        return Unreachable(f"{place} ({error})")
    if " 407" in text:
        return FederationError(
            f"{named} wants a user and a password, or refuses those it got; set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"
        )
    return Unreachable(
        f"{named} does not connect to {address} ({text.removeprefix('Tunnel connection failed: ')}); have its people "
        "allow this address, or name it in NO_PROXY if it is reached without the proxy"
    )


def _describe_certificate_error(address: str, proxy: str, problem: str) -> str:
    remedy = "it was made for another federation: ca.crt here and the server's must be of one `fedvlm deploy init`"
    issuer = find_issuer(address, proxy)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    if "not yet valid" in problem:
        remedy = f"the clock of this machine is wrong ({now}); set it by NTP"
    elif "expired" in problem:
        remedy = f"check the clock of this machine ({now}), or renew it at the server: fedvlm deploy renew FOLDER"
    elif "match" in problem:
        remedy = "name the server in `fedvlm deploy init --host` as the sites reach it"
    elif issuer and issuer != ROOT_NAME:
        on_the_way = describe_proxy(proxy) if proxy else "a proxy or firewall on the way"
        remedy = (
            f"{issuer!r} signed it, and not this federation: {on_the_way} opens the encryption, and would read and "
            f"could change everything. Have its people let {address} pass unopened"
        )
    return f"the certificate of the server at {address} is refused ({problem}); {remedy}"


def find_issuer(address: str, proxy: str) -> str:
    """Return who signed the certificate that is shown there; nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError, ValueError), closing(open_connection(address, context, proxy)) as connection:
        connection.connect()
        shown: Any = connection.sock  # TLS, as connected
        issuer = x509.load_der_x509_certificate(shown.getpeercert(binary_form=True)).issuer
        named = [attribute.value for attribute in issuer if attribute.oid == x509.NameOID.COMMON_NAME]
        return "".join(char for char in str((named or [issuer.rfc4514_string()])[0]) if char.isprintable())[:100]
    return ""


def server_date(address: str, ca: Path) -> str:
    with closing(open_connection(address, tls_context(ca), find_proxy(address))) as connection:
        connection.request("GET", "/")
        return str(connection.getresponse().headers["date"])


def clock_skew(server_time: str | None) -> float:
    """Return how many seconds this machine's clock is ahead of the server's; 0 if the server told no time."""
    with suppress(TypeError, ValueError):
        return (datetime.now(UTC) - parsedate_to_datetime(server_time or "")).total_seconds()
    return 0.0


def describe_skew(seconds: float) -> str:
    """Name the clock if it is wrong; return nothing if it is right."""
    if abs(seconds) <= MAX_CLOCK_SKEW_SECONDS:
        return ""
    relation = "ahead of" if seconds > 0 else "behind"
    return f"the clock of this machine is {abs(seconds):.0f} s {relation} the server's; set both by NTP"
