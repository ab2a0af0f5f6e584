"""A run from built settings, as its Result."""

from typing import Any

from fedvlm.result import Result
from fedvlm.runner import run


def execute(*args: Any, **kwargs: Any) -> Result:
    return Result(run.execute(*args, **kwargs).folder)
