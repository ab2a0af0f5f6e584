"""Flower's SuperLink behind our gate, with a SuperExec that starts our ServerApp and nothing else.

python -m fedvlm.deploy.flower.superlink FOLDER HOST PORT
"""

import os
import sys
from importlib import import_module
from pathlib import Path

from fedvlm.deploy.flower import replace_attributes
from fedvlm.deploy.flower.gate import SECRET_FILE, TOKEN_FOLDER_VARIABLE, AccessMiddleware, Scope, SiteKeys, auth_token
from fedvlm.deploy.flower.kin import LinkedSubprocess
from fedvlm.engines.flower.api import import_flower


def register_node(scope: Scope, key: bytes) -> None:
    """Gives a site's key a node's number, by which Flower knows it."""
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID

    state = scope["app"].state.linkstate_factory.state()
    if state.get_node_id_by_public_key(key) is None:
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL)


def deactivate_node(scope: Scope, key: bytes) -> None:
    """A node whose key has ended is off at once: nobody waits for it, or sends it anything."""
    state = scope["app"].state.linkstate_factory.state()
    if (node := state.get_node_id_by_public_key(key)) is not None:
        state.deactivate_node(node)


def install_middleware(folder: Path) -> None:
    """Whatever app Flower makes from here on is behind the gate of this folder."""
    import_flower()
    from starlette.middleware import Middleware

    keys = SiteKeys(folder, register_node, deactivate_node)
    middleware = Middleware(AccessMiddleware, auth_token(folder), keys)  # type: ignore[arg-type, unused-ignore]
    replace_attributes(import_module("flwr.superlink.extensions"), get_middleware=lambda: (middleware,))


def main() -> None:
    folder, host, port = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    install_middleware(folder)
    secret = ("--superexec-auth-secret-file", str(folder / SECRET_FILE))
    superexec = [
        *(sys.executable, "-m", "fedvlm.deploy.flower.superexec"),
        *("--root-certificates", str(folder / "ca.crt")),
        *("--runtime-api-address", f"127.0.0.1:{port}"),
        *("--parent-pid", str(os.getpid())),
        *secret,
    ]
    LinkedSubprocess.Popen(superexec, env={**os.environ, TOKEN_FOLDER_VARIABLE: str(folder)})
    sys.argv = [
        "flower-superlink",
        *("--ssl-ca-certfile", str(folder / "ca.crt")),
        *("--ssl-certfile", str(folder / "server.pem")),
        *("--ssl-keyfile", str(folder / "server.key")),
        "--enable-supernode-auth",
        *("--isolation", "process"),  # the secret counts in no other
        *secret,
        *("--host", host),
        *("--port", port),
        *("--database", str(folder / "superlink.db")),
    ]
    import_module("flwr.superlink.cli").flower_superlink()


if __name__ == "__main__":
    main()
