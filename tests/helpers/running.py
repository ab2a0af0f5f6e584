"""A run from built settings, as its Result."""

from typing import Any

from fedvlm.result import Result
from fedvlm.runner import run


def execute(*given: Any, **more: Any) -> Result:
    return Result(run.execute(*given, **more).folder)
