"""Processes of Flower that end together: one without the other looks alive, and does nothing."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from threading import Thread

LEAVE = 5.0  # seconds in which all end that were asked to
ENDED = "Flower's SuperExec, which does the work here, has ended"


class Kin:
    """The module `subprocess`; whoever starts a SuperExec by it does not outlive it."""

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None):
            super().__init__(command, env=env)
            self.watch = Thread(target=self._end_with_it, daemon=True)
            self.watch.start()

        def _end_with_it(self) -> None:
            code = self.wait()
            time.sleep(LEAVE)  # where all were asked to stop, this process ends by itself
            sys.stderr.write(f"{ENDED} (exit code {code})\n")
            sys.stderr.flush()
            os._exit(1)
