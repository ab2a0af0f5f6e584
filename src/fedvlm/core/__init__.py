"""The contract of a method, the list of methods, and the reader of settings."""

from fedvlm.core import contract
from fedvlm.core.contract import *  # noqa: F403
from fedvlm.core.registry import METHODS, check_class_weights, is_method, make, methods, register
from fedvlm.core.schema import check_range, check_type
from fedvlm.tensors import Tensors

__all__ = ["METHODS", "Tensors", "check_class_weights", "check_range", "check_type"]
__all__ += ["is_method", "make", "methods", "register", *contract.__all__]
