"""Flower's SuperExec: it starts our ServerApp, or is our ClientApp, and starts no other program."""

import os
import subprocess
import sys
from importlib import import_module
from typing import Any

from fedvlm.deploy.flower import put
from fedvlm.deploy.flower.gate import carry
from fedvlm.deploy.flower.kin import patient
from fedvlm.engines.flower.api import flower


def launch(self: Any, spec: Any) -> Any:
    """The token goes by a pipe: a process's arguments are for all users of a machine to see."""
    from flwr.supercore.superexec.executor import LaunchResult

    command = [
        *(sys.executable, "-m", "fedvlm.deploy.flower.server_app"),
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


def start(kind: str) -> None:
    flower()
    carry()
    from flwr.supercore.constant import TaskType

    loop: Any = import_module("flwr.supercore.superexec.run_superexec")
    put(loop.AutoExecPlugin, supported_task_types=frozenset({TaskType[kind]}))
    again = patient(loop.make_simple_http_retry_invoker)
    put(loop, make_simple_http_retry_invoker=again)
    import_module("flwr.supercore.cli").flower_superexec()


def at_server() -> None:
    replace_executor(launch)
    start("SERVER_APP")


def at_site() -> None:
    """`flower-superexec` at a site, as its SuperNode calls it: it does the tasks itself, one after
    the other, as the SuperNode hands them out."""
    from flwr.supercore.superexec.executor import LaunchResult

    from fedvlm.deploy.flower import client_app

    app = client_app.client_app()

    def here(self: Any, spec: Any) -> Any:
        try:
            client_app.launch(app, spec)
        except Exception as error:  # the next task may fare better
            return LaunchResult.failed(f"{type(error).__name__}: {error}")
        return LaunchResult.accepted()

    replace_executor(here)
    start("CLIENT_APP")


def replace_executor(launch: Any) -> None:
    executor: Any = import_module("flwr.supercore.superexec.executor.subprocess_executor")
    put(executor.SubprocessExecutor, launch=launch)


if __name__ == "__main__":
    at_server()
