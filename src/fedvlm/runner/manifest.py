"""Which code a run was made by, and when."""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from json import dumps, loads
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.channel.settings import Channel
from fedvlm.core import Method, make
from fedvlm.data.partition import Partition
from fedvlm.data.table import EmbeddedTable
from fedvlm.devices import Device, choose_device, describe_device, set_deterministic
from fedvlm.runner.prepare import template_of
from fedvlm.runner.settings import Settings

ON_DEVICE = ("demo", "hf", "openai")  # encoders that have access.device


def provenance() -> dict[str, Any]:
    """When a run was started, and by which versions of this code and of what it stands on."""
    return {
        "versions": {
            "fedvlm": version("fedvlm"),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", "transformers")},
        },
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **commit(),
    }


def device_info(settings: Settings, memory: bool) -> dict[str, Any]:
    """Where a run computes and by which flags, and in which precision its images are encoded."""
    out = {"training": device_of(settings.device)}
    if not memory and settings.encoder.partition(":")[0] in ON_DEVICE:
        description = device_of(settings.access.get("device", "cpu"))
        is_half_precision = description["device"] != "cpu"
        out["encoding"] = description | {"precision": "float16" if is_half_precision else "float32"}
    return out


def device_of(name: Device) -> dict[str, Any]:
    device = choose_device(name)
    if device.type != "cpu":
        set_deterministic()
    return describe_device(device)


def default_values(method: Method) -> dict[str, Any]:
    """What a table says of a run only where it is otherwise, so that it can do without the code."""
    plain = {"method": asdict(make(method.name)), "channel": asdict(Channel())}
    traits = {"centralised": method.traits.privacy.centralised, "reference": method.traits.training.reference}
    return {**dict(loads(dumps(plain))), **traits}  # as a manifest has it


def commit() -> dict[str, Any]:
    """The commit of this code and whether it was changed since; nothing if it is not a checkout."""

    def git(*words: str) -> str:
        package_folder = Path(__file__).parents[1]
        return subprocess.run(
            ["git", *words], cwd=package_folder, capture_output=True, text=True, check=True, timeout=5
        ).stdout.strip()

    try:
        if not git("ls-files", "--", "__init__.py"):
            return {"commit": None, "dirty": None}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def class_counts(rows: EmbeddedTable, partition: Partition) -> dict[str, list[int]]:
    """Training rows per class of each client."""
    return {
        id: np.bincount(rows.labels[member.train], minlength=len(rows.classes)).tolist()
        for id, member in partition.clients.items()
    }


def describe_samples(rows: EmbeddedTable) -> dict[str, Any]:
    """What the manifest tells of rows and encoder."""
    return {
        "encoder": rows.encoder,
        "rows": rows.fingerprint,
        "data": rows.name,
        "classes": rows.classes,
        "dim": rows.x.shape[1],
        "scale": rows.scale,
        "text": None if rows.text is None else rows.text.tolist(),
    } | template_of(rows)


def build_manifest(
    about: Mapping[str, Any],
    trainings: Sequence[str],
    clients: Mapping[str, Mapping[str, int]],  # rows of each part
    dropped: Mapping[int, int],  # rows, by seed
) -> dict[str, Any]:
    """Everything a reader needs to know where the numbers come from."""
    return {
        **about,
        "trainings": list(trainings),
        "clients": dict(clients),
        "duplicates_dropped": dict(dropped),
        **provenance(),
    }
