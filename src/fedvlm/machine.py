"""What this process may use of the machine."""

import os


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # where the system says so: a container may have fewer
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
