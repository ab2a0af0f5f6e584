"""Flower's SuperExec: it starts our ServerApp, or is our ClientApp, and starts no other program."""

import os
import subprocess
import sys
from importlib import import_module
from typing import Any

from fedvlm.deploy.flower import replace_attributes
from fedvlm.deploy.flower.gate import attach_token
from fedvlm.deploy.flower.kin import make_retrying
from fedvlm.engines.flower.api import import_flower


def launch_server_app(self: Any, spec: Any) -> Any:
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


def start_superexec(kind: str) -> None:
    import_flower()
    attach_token()
    from flwr.supercore.constant import TaskType

    loop: Any = import_module("flwr.supercore.superexec.run_superexec")
    replace_attributes(loop.AutoExecPlugin, supported_task_types=frozenset({TaskType[kind]}))
    again = make_retrying(loop.make_simple_http_retry_invoker)
    replace_attributes(loop, make_simple_http_retry_invoker=again)
    import_module("flwr.supercore.cli").flower_superexec()


def run_at_server() -> None:
    replace_executor(launch_server_app)
    start_superexec("SERVER_APP")


def run_at_site() -> None:
    """`flower-superexec` at a site, as its SuperNode calls it: it does the tasks itself, one after
    the other, as the SuperNode hands them out."""
    from flwr.supercore.superexec.executor import LaunchResult

    from fedvlm.deploy.flower import client_app

    app = client_app.create_client_app()

    def run_in_process(self: Any, spec: Any) -> Any:
        try:
            client_app.run_assigned_task(app, spec)
        except Exception as error:  # the next task may fare better
            return LaunchResult.failed(f"{type(error).__name__}: {error}")
        return LaunchResult.accepted()

    replace_executor(run_in_process)
    start_superexec("CLIENT_APP")


def replace_executor(launch: Any) -> None:
    executor: Any = import_module("flwr.supercore.superexec.executor.subprocess_executor")
    replace_attributes(executor.SubprocessExecutor, launch=launch)


if __name__ == "__main__":
    run_at_server()
