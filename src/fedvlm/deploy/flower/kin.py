"""Processes of Flower that need each other: they end together, and try to reach each other."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import Any

SHUTDOWN_SECONDS = 5.0  # seconds in which all end that were asked to
MAX_RETRY_SECONDS = 3.0  # seconds at most until a server that is away is tried again, where Flower takes 20
SUPEREXEC_ENDED = "Flower's SuperExec, which does the work here, has ended"


class LinkedSubprocess:
    """The module `subprocess`; whoever starts a SuperExec by it does not outlive it."""

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
    """What breaks on the way, also inside TLS, is tried again, and so is a server in `trouble`.

    Flower gives up at once: its SuperNode lives on deaf, and its SuperExec ends. A run that ended
    is answered with 403, so nothing is tried longer than its run.
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
