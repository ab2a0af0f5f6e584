"""The cores and the memory that this process may use."""

import ctypes
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # the limits of a container, on Linux


def count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # a container may have fewer than the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int | None:
    """Return the free bytes of memory, within the limit of a container; None if unknown."""
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
        limits.append(limit - used + int(stat.get("inactive_file", 0)))  # caches can be dropped
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        pass
    return min(limits, default=None)


def release_memory() -> None:
    """Return freed memory to the system, if the C library can: gigabytes after training a tower."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
