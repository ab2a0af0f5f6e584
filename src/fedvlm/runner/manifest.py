"""Build the manifest of a run: its data, its clients, and the code, versions and devices it was made with."""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from json import dumps, loads
from pathlib import Path
from typing import Any

from fedvlm.channel.settings import Channel
from fedvlm.core import Method, make
from fedvlm.data.table import EmbeddedTable, count_classes
from fedvlm.devices import Device, choose_device, describe_device, set_deterministic
from fedvlm.encoders import encoder_options, find_kind
from fedvlm.runner.prepare import Prepared, template_of, text_of
from fedvlm.runner.settings import Settings


def run_manifest(seeds: Sequence[Prepared], in_memory: bool) -> dict[str, Any]:
    """Return the manifest of a prepared run, without its identity."""
    first = seeds[0]
    settings, samples, clients = first.settings, first.rows, first.partition.clients
    splits = ["train", "validation", "test"]
    optional = ("calibration", "unlabelled")
    splits += [split for split in optional if any(len(getattr(client, split)) for client in clients.values())]
    return {
        **build_manifest(
            describe_samples(samples),
            [training.name for training in first.trainings],
            {id: {split: len(getattr(client, split)) for split in splits} for id, client in clients.items()},
            {prepared.seed: prepared.partition.dropped for prepared in seeds},
        ),
        "counts": {  # training samples of each client, per class
            id: count_classes(samples, client.train).tolist() for id, client in clients.items()
        },
        "domains": first.partition.domains,
        "usual": default_values(settings.method),
        "devices": device_info(settings, in_memory),
        "memory": in_memory,
        "reproduces": list(settings.reproduces),
    }


def build_manifest(
    samples: Mapping[str, Any],
    trainings: Sequence[str],
    clients: Mapping[str, Mapping[str, int]],  # samples per split
    dropped: Mapping[int, int],  # duplicates, by seed
) -> dict[str, Any]:
    """Return what every manifest holds, of a simulated or a deployed run."""
    clients, dropped = dict(clients), dict(dropped)
    facts = {"trainings": list(trainings), "clients": clients, "duplicates_dropped": dropped}
    return {**samples, **facts, **provenance()}


def provenance() -> dict[str, Any]:
    """Return the versions of the code and of its libraries, its commit, and the time."""
    names = ("fedvlm", "torch", "numpy", "transformers")
    versions = {"python": platform.python_version(), **{name: version(name) for name in names}}
    return {"versions": versions, "started": datetime.now(UTC).isoformat(timespec="seconds"), **_commit()}


def describe_samples(samples: EmbeddedTable) -> dict[str, Any]:
    return {
        "encoder": samples.encoder,
        "rows": samples.fingerprint,
        "data": samples.name,
        "classes": samples.classes,
        "dim": samples.x.shape[1],
        "scale": samples.scale,
        "text": None if (text := text_of(samples)) is None else text.tolist(),
        **({} if samples.findings is None else {"multi_label": True}),
    } | template_of(samples)


def device_info(settings: Settings, in_memory: bool) -> dict[str, Any]:
    """Describe where a run trains and encodes, and the precision of encoding."""
    info = {"training": _describe(settings.device)}
    if not in_memory and "device" in encoder_options(settings.encoder):
        info["encoding"] = _describe(settings.access.get("device", "cpu"))
        if find_kind(settings.encoder)[0].module.startswith("fedvlm."):  # others choose their own precision
            is_half_precision = info["encoding"]["device"] != "cpu"
            info["encoding"]["precision"] = "float16" if is_half_precision else "float32"
    return info


def _describe(name: Device) -> dict[str, Any]:
    device = choose_device(name)
    if device.type != "cpu":
        set_deterministic()
    return describe_device(device)


def default_values(method: Method) -> dict[str, Any]:
    """Return the defaults that a table compares a run's settings with, so that it needs no code."""
    defaults = {"method": asdict(make(method.name)), "channel": asdict(Channel())}
    traits = {"centralised": method.traits.privacy.centralised, "reference": method.traits.training.reference}
    return {**dict(loads(dumps(defaults))), **traits}  # with lists for tuples, as a manifest has them


def _commit() -> dict[str, Any]:
    """Return the commit of this code and whether it was changed since; None outside of a checkout."""

    def git(*words: str) -> str:
        folder = Path(__file__).parents[1]
        command = ["git", *words]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        if git("ls-files", "--", "__init__.py"):
            return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        pass
    return {"commit": None, "dirty": None}
