"""The ClientApp of a site: hands each message to the site's own process and its answer back.

Flower starts a new process for every message. It runs this module of the installed package and
not the code that came with the run: a server can ask, but brings no program. The process imports
no torch; the site's process has it, the rows and the `local` tensors in memory.
"""

import os
import socket
import struct
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from fedvlm.deploy.flower import put
from fedvlm.deploy.flower.gate import carry
from fedvlm.engines.flower import secure as flower_secure
from fedvlm.engines.flower.api import flower
from fedvlm.engines.flower.wire import (
    Parcel,
    from_bytes,
    from_records,
    to_bytes,
    to_records,
)
from fedvlm.errors import FederationError

DESK = "FEDVLM_DESK"  # the variable that names the socket of the site's process
SIZE = struct.Struct(">Q")


def send_all(stream: socket.socket, parcels: Sequence[Parcel]) -> None:
    for parcel in parcels:
        data = to_bytes(parcel)
        stream.sendall(SIZE.pack(len(data)) + data)


def receive(stream: socket.socket) -> Parcel:
    return from_bytes(_exactly(stream, SIZE.unpack(_exactly(stream, SIZE.size))[0]))


def _exactly(stream: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = stream.recv(min(1 << 20, count - len(parts)))
        if not part:
            raise ConnectionError("the site's process closed the connection")
        parts += part
    return bytes(parts)


def ask(request: Parcel, state: Parcel) -> tuple[Parcel, Parcel]:
    """The site's answer and its new state."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(os.environ[DESK])
        send_all(stream, [request, state])
        return receive(stream), receive(stream)


def client_app() -> Any:
    app = flower()
    from flwr.clientapp import ClientApp

    client = ClientApp(mods=[flower_secure.mask])

    def hand_on(message: Any, context: Any) -> Any:
        try:
            return hand(message, context)
        except FederationError:
            raise
        except Exception as error:  # Flower tells the server what an exception says
            raise FederationError("the site did not answer; its own log says why") from error

    def hand(message: Any, context: Any) -> Any:
        held = context.state
        state = from_records(held, "the state of this site") if "about" in held else Parcel({})
        hidden = flower_secure.request(message.content)
        reply, after = ask(hidden or from_records(message.content, "the request"), state)
        context.state = to_records(after)
        return app.Message(flower_secure.records(reply, hidden is not None), reply_to=message)

    client.train()(hand_on)
    client.query()(hand_on)
    return client


def main() -> None:
    """`flwr-clientapp` at a site, as its SuperExec calls it."""
    flower()
    carry()
    # The package of Flower's command would import a whole SuperNode first: half a second a message.
    command = ModuleType("flwr.supernode.cli")
    command.__path__ = [f"{one}/cli" for one in import_module("flwr.supernode").__path__]
    sys.modules.setdefault(command.__name__, command)
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    # What came with the run is neither unpacked nor imported.
    put(
        import_module("flwr.supernode.runtime.run_clientapp"),
        install_from_fab=lambda *words, **options: None,
        get_project_dir=lambda *words: None,
        get_load_client_app_fn=lambda **options: lambda *words: client_app(),
    )
    sys.argv[0] = "flwr-clientapp"
    flwr_clientapp()


if __name__ == "__main__":
    main()
