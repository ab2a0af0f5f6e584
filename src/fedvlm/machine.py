"""What this process may use of the machine."""

import ctypes
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # what a container may use, on Linux


def count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # where the system says so: a container may have fewer
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int | None:
    """Bytes that can still be taken, within the limit of a container; None where nobody says."""
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    except OSError:
        if {"SC_AVPHYS_PAGES", "SC_PAGE_SIZE"} <= set(os.sysconf_names):
            limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        limit, used = (int((CGROUP / f"memory.{word}").read_text()) for word in ("max", "current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        limits.append(limit - used + int(stat.get("inactive_file", 0)))  # caches can go
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        pass
    return min(limits, default=None)


def release_memory() -> None:
    """Returns freed memory to the system, where the C library can: gigabytes after a tower."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
