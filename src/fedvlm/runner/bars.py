"""What a table is read against: zero-shot, each client alone, and all rows in one place.

They are runs like others, of the data, clients, protocol and seeds of the run they stand beside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedvlm.channel.settings import Channel
from fedvlm.core import check_type, make
from fedvlm.evaluate.protocols.base_to_new import BaseToNew
from fedvlm.record import Record
from fedvlm.runner.settings import Settings

BASELINES = ("zero-shot", "alone", "pooled")


def wants_baselines(values: Mapping[str, Any]) -> bool:
    """As `baselines` says; without it, unless an experiment stands beside a paper's own table."""
    if "baselines" in values:
        check_type("baselines", values["baselines"], bool)
        return bool(values["baselines"])
    return not (values.get("reproduces") or values.get("paper"))


def missing_baselines(settings: Sequence[Settings], done: Record) -> list[Settings]:
    """The bars that runs of one data set lack; `done` is one of these runs.

    Nothing of a method's own (channel, descriptions, …) is in them, so that they are the same runs
    whatever they stand beside.
    """
    existing = {run_settings.method.name for run_settings in settings}
    if done.manifest["text"] is None:
        existing.add("zero-shot")
    if settings[0].protocol == BaseToNew.name:
        existing |= {"alone", "pooled"}  # they know no new class
    plain = replace(
        settings[0],
        warm_start=None,
        tune=(),
        descriptions="",
        texts="",
        selection="last",
        fraction=1.0,
        engine="batched",
        allow_small=False,
        channel=Channel(),
        attack="none",
        reproduces=(),
    )
    return [replace(plain, method=make(name)) for name in BASELINES if name not in existing]
