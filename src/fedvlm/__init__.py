"""Federated adaptation of frozen vision-language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedvlm.classifier.late_join import join
    from fedvlm.classifier.personalised import Personalised
    from fedvlm.core import make, methods, register
    from fedvlm.errors import DataWarning
    from fedvlm.estimator import FederatedClassifier
    from fedvlm.result import Result, resume, run, sweep
    from fedvlm.result import compare_runs as compare

__version__ = "0.2.0"
__all__ = [
    "DataWarning",
    "FederatedClassifier",
    "Personalised",
    "Result",
    "compare",
    "join",
    "make",
    "methods",
    "register",
    "resume",
    "run",
    "sweep",
]

# Looked up when first used, so that `fedvlm --help` does not wait for torch.
_HOMES = {
    "DataWarning": "errors",
    "FederatedClassifier": "estimator",
    "join": "classifier.late_join",
    "Personalised": "classifier.personalised",
    "Result": "result",
    "compare": "result",
    "resume": "result",
    "run": "result",
    "sweep": "result",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedvlm' has no attribute {name!r}")
    home = import_module(f"fedvlm.{_HOMES.get(name, 'core')}")
    return getattr(home, "compare_runs" if name == "compare" else name)
