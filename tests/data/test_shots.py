"""Few training rows go with few validation rows; test rows stay as they are."""

import numpy as np
import pytest

from fedvlm.data.clients import Clients
from fedvlm.data.partition import make_partition
from tests.helpers.plain_rows import make_rows


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({"shots": 2}, 2),
        ({"shots": 9}, 4),
        ({"shots": 2, "val_shots": 7}, 7),
        ({"val_shots": 3}, 3),
        ({"shots": 2, "val_shots": 0}, None),
        ({}, None),
    ],
)
def test_validation_rows_are_as_few_as_training_rows_and_four_at_most_unless_said(settings, held):
    table = make_rows(400)
    limited, full = make_partition(table, Clients(**settings), 0), make_partition(table, Clients(), 0)
    for key, member in limited.clients.items():
        unlimited = full.clients[key]
        counts = np.bincount(table.labels[unlimited.validation])
        expected = counts if held is None else np.minimum(counts, held)
        assert np.bincount(table.labels[member.validation]).tolist() == expected.tolist()
        assert set(member.validation) <= set(unlimited.validation)
        assert (member.test == unlimited.test).all()


def test_validation_shots_leave_the_training_rows_as_they_were():
    table = make_rows(400)
    without_val, with_val = (make_partition(table, Clients(shots=3, val_shots=n), 0) for n in (0, 2))
    for key in without_val.clients:
        assert (without_val.clients[key].train == with_val.clients[key].train).all()
