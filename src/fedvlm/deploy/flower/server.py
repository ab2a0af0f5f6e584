"""Run Flower's processes at the server: a guarded SuperLink, a SuperExec that starts our ServerApp only, and the CLI.

python -m fedvlm.deploy.flower.server superlink FOLDER HOST PORT (or superexec, serverapp, flwr with Flower's options)
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from math import inf
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

from fedvlm.deploy.flower import LinkedSubprocess, make_retrying, replace_attributes, start_superexec
from fedvlm.deploy.flower.access import (
    SECRET_FILE,
    TOKEN_FOLDER_VARIABLE,
    AccessMiddleware,
    Scope,
    SiteKeys,
    attach_token,
    auth_token,
)
from fedvlm.deploy.operations.security_log import RefusalLog
from fedvlm.engines.flower import import_flower

PULL_INTERVAL_SECONDS = 0.2  # seconds between looks for the rest of a reply, which is on this machine if it came


def register_node(scope: Scope, key: bytes) -> None:
    """Register a node for a site's key, as Flower knows it."""
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID

    state = scope["app"].state.linkstate_factory.state()
    if state.get_node_id_by_public_key(key) is None:
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL)


def deactivate_node(scope: Scope, key: bytes) -> None:
    """Deactivate the node of a revoked key at once: nobody waits for it, or sends it anything."""
    state = scope["app"].state.linkstate_factory.state()
    if (node := state.get_node_id_by_public_key(key)) is not None:
        state.deactivate_node(node)


def install_middleware(folder: Path) -> None:
    """Put every app that Flower creates from now on behind the access control of this folder."""
    import_flower()
    from starlette.middleware import Middleware

    keys = SiteKeys(folder, register_node, deactivate_node)
    arguments: Any = (auth_token(folder), keys, RefusalLog(folder))
    middleware = Middleware(AccessMiddleware, *arguments)
    replace_attributes(import_module("flwr.superlink.extensions"), get_middleware=lambda: (middleware,))


def run_superlink() -> None:
    """Start the SuperLink of a server's folder, and its SuperExec beside it."""
    folder, host, port = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    install_middleware(folder)
    secret = ("--superexec-auth-secret-file", str(folder / SECRET_FILE))
    superexec = [
        *(sys.executable, "-m", "fedvlm.deploy.flower.server", "superexec"),
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
    from fedvlm.deploy.flower.port import serve

    replace_attributes(import_module("flwr.superlink.cli.flower_superlink"), uvicorn=SimpleNamespace(run=serve))
    import_module("flwr.superlink.cli").flower_superlink()


def launch_server_app(self: Any, spec: Any) -> Any:
    """Start our ServerApp; the token goes through a pipe, because all users of a machine see a process's arguments."""
    from flwr.supercore.superexec.executor import LaunchResult

    command = [
        *(sys.executable, "-m", "fedvlm.deploy.flower.server", "serverapp"),
        *("--root-certificates", spec.root_certificates_path),
        *("--runtime-api-address", spec.runtime_api_address),
        *("--parent-pid", str(os.getpid())),
    ]
    null = subprocess.DEVNULL  # what it logs goes to the SuperLink by itself
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null)
    assert child.stdin is not None
    with child.stdin as pipe:
        pipe.write(spec.token.encode())
    return LaunchResult.accepted()


def run_superexec() -> None:
    import_flower()
    attach_token()
    start_superexec("SERVER_APP", launch_server_app)


def limit_pull_time(pull: Callable[..., Any], grid: Any) -> Callable[..., Any]:
    """Wait for the rest of a reply only until the reply's own deadline.

    Flower waits minutes after its site was killed, and hours if the site sends a little now and then.
    """

    def pulled(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> Any:
        return pull(
            object_ids,
            pull_object_fn,
            max_time=max(getattr(grid, "until", inf) - monotonic(), 0.0),
            max_tries_per_object=None,
            initial_backoff=PULL_INTERVAL_SECONDS,
            backoff_cap=PULL_INTERVAL_SECONDS,
        )

    return pulled


def run_server_app() -> None:
    """Run `flwr-serverapp` as our SuperExec calls it; the task's token comes through a pipe."""
    import_flower()
    attach_token()
    folder = Path(os.environ[TOKEN_FOLDER_VARIABLE])
    over_http: Any = import_module("flwr.superlink.grid.http_grid")
    again = make_retrying(over_http.make_simple_http_retry_invoker, retry_server_errors=False)
    replace_attributes(over_http, make_simple_http_retry_invoker=again)

    def run(grid: Any, context: Any, **words: Any) -> Any:
        from fedvlm.deploy.server.run import run_request

        replace_attributes(over_http, pull_objects=limit_pull_time(over_http.pull_objects, grid))
        run_request(grid, folder, str(context.run_config.get("request", "")))
        return context

    app = {"tool": {"flwr": {"app": {"components": {"serverapp": "fedvlm"}}}}}
    replace_attributes(
        import_module("flwr.superlink.runtime.run_serverapp"),
        install_from_fab=lambda *words, **options: None,
        get_fab_metadata=lambda *words: ("fedvlm/fedvlm-app", "1.0.0"),
        get_project_dir=lambda *words: folder,
        get_project_config=lambda *words: app,
        get_fused_config_from_dir=lambda place, config: config,
        run_=run,
    )
    sys.argv += ["--token", sys.stdin.read()]
    import_module("flwr.superlink.cli").flwr_serverapp()


def run_cli() -> None:
    """Run Flower's command line with the token that lets it in."""
    import_flower()
    attach_token()
    import_module("flwr.cli.app").app()


COMMANDS = {"superlink": run_superlink, "superexec": run_superexec, "serverapp": run_server_app, "flwr": run_cli}

if __name__ == "__main__":
    COMMANDS[sys.argv.pop(1)]()
