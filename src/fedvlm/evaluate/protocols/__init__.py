"""Evaluation protocols, one file each: who trains, who stays unseen, and which numbers a table has."""

from fedvlm.evaluate.metrics import Table, mean_accuracy
from fedvlm.evaluate.protocols import (
    base_to_new,  # noqa: F401
    contract,
    cross_data_set,  # noqa: F401
    cross_device,  # noqa: F401
    leave_one_domain_out,  # noqa: F401
    own_test,  # noqa: F401
    source_target,  # noqa: F401
)
from fedvlm.evaluate.protocols.contract import *  # noqa: F403

__all__ = ["Table", "mean_accuracy", *contract.__all__]
