"""Flower's SuperExec: it starts our ServerApp or our ClientApp, and no other program."""

import os
import subprocess
import sys
from importlib import import_module
from typing import Any

from fedvlm.deploy.flower import put
from fedvlm.deploy.flower.gate import carry
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
    import_module("flwr.supercore.cli").flower_superexec()


def at_server() -> None:
    executor: Any = import_module("flwr.supercore.superexec.executor.subprocess_executor")
    put(executor.SubprocessExecutor, launch=launch)
    start("SERVER_APP")


def at_site() -> None:
    """`flower-superexec` at a site, as its SuperNode calls it."""
    start("CLIENT_APP")


if __name__ == "__main__":
    at_server()
