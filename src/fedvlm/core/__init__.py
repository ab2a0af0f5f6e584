"""The contract of a method, the list of methods, and the reader of settings."""

from fedvlm.core.contract import (
    FEWEST,
    NEEDS,
    SMALLEST,
    VERBS,
    Batch,
    Client,
    Frozen,
    ImageTower,
    Method,
    Rows,
    TextTower,
)
from fedvlm.core.registry import METHODS, make, methods, register
from fedvlm.core.schema import check_type
from fedvlm.tensors import Tensors

__all__ = [
    "FEWEST",
    "METHODS",
    "NEEDS",
    "SMALLEST",
    "VERBS",
    "Batch",
    "Client",
    "Frozen",
    "ImageTower",
    "Method",
    "Rows",
    "Tensors",
    "TextTower",
    "check_type",
    "make",
    "methods",
    "register",
]
