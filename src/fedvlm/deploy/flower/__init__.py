"""Change what Flower's processes do: they end together, retry longer, and start no program but ours."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from threading import Thread
from typing import Any

from fedvlm.errors import SettingsError


def replace_attributes(module: Any, **replacements: Any) -> None:
    """Replace attributes of a Flower module; a version of Flower that was not tested may not have them."""
    for name, value in replacements.items():
        if not hasattr(module, name):
            raise SettingsError(
                f"{module.__name__} of this version of Flower has no {name}; pip install 'fedvlm[flower]' again"
            )
        setattr(module, name, value)


SHUTDOWN_SECONDS = 5.0  # seconds in which all end that were asked to
MAX_RETRY_SECONDS = 3.0  # seconds at most until a server that is away is tried again, where Flower takes 20
SUPEREXEC_ENDED = "Flower's SuperExec, which does the work here, has ended"


class LinkedSubprocess:
    """Stand in for the module `subprocess`: a process that starts a SuperExec through it ends with it."""

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None):
            super().__init__(command, env=env)
            self.watch = Thread(target=self._end_with_it, daemon=True)
            self.watch.start()

        def _end_with_it(self) -> None:
            code = self.wait()
            time.sleep(SHUTDOWN_SECONDS)  # where all were asked to stop, this process ends by itself
            sys.stderr.write(f"{SUPEREXEC_ENDED} (exit code {code})\n")
            sys.stderr.flush()
            os._exit(1)


def make_retrying(make: Callable[[], Any], retry_server_errors: bool = True) -> Callable[[], Any]:
    """Return a factory of retry invokers that also retry broken connections and, by default, server errors.

    Flower gives up at once: its SuperNode stays alive but deaf, and its SuperExec ends. A run that has ended is
    answered with 403, so nothing is retried longer than its run.
    """
    import httpx
    from flwr.supercore.retry import exponential

    def made() -> Any:
        again = make()
        again.wait_gen_factory = lambda: exponential(max_delay=MAX_RETRY_SECONDS)
        again.recoverable_exceptions = (httpx.TransportError, httpx.HTTPStatusError)
        flowers = again.should_giveup

        def gives_up(error: Exception) -> bool:
            if isinstance(error, httpx.TransportError):
                return "certificate verify failed" in str(error)
            answer = getattr(error, "response", None)
            if retry_server_errors and answer is not None and answer.status_code >= 500:
                return False
            return bool(flowers(error))

        again.should_giveup = gives_up
        return again

    return made


def start_superexec(kind: str, launch: Any) -> None:
    """Run Flower's SuperExec for tasks of one kind, each handled by `launch` instead of any other program."""
    from flwr.supercore.constant import TaskType

    executor: Any = import_module("flwr.supercore.superexec.executor.subprocess_executor")
    replace_attributes(executor.SubprocessExecutor, launch=launch)
    loop: Any = import_module("flwr.supercore.superexec.run_superexec")
    replace_attributes(loop.AutoExecPlugin, supported_task_types=frozenset({TaskType[kind]}))
    replace_attributes(loop, make_simple_http_retry_invoker=make_retrying(loop.make_simple_http_retry_invoker))
    import_module("flwr.supercore.cli").flower_superexec()
