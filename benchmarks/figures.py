"""How a benchmark hands its figures over: it prints a line, and `make bench` keeps the numbers.

`tools/bench.py` names a file in FEDVLM_FIGURES; every line that a script, or a process it starts,
says is added there as JSON.
"""

import json
import os
import re
from pathlib import Path

PLACE = "FEDVLM_FIGURES"


def report(line: str, subject: str, **figures: float | str) -> None:
    """Prints the line; its numbers go to the file by names, as one row of the script's table."""
    print(line, flush=True)
    if place := os.environ.get(PLACE):
        row = {"what": subject, "figures": figures}
        with Path(place).open("a") as file:
            file.write(json.dumps(row) + "\n")


def peak() -> float:
    """MB that this process has taken at most since the last call; on Linux."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(re.findall(r"VmHWM:\s*(\d+)", status)[0]) / 1e3
