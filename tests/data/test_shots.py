"""Few training rows go with few validation rows; test rows stay as they are."""

import numpy as np
import pytest
from plain_rows import make_rows

from fedvlm.data.clients import Clients
from fedvlm.data.federation import divide


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
    few, full = divide(table, Clients(**settings), 0), divide(table, Clients(), 0)
    for key, member in few.members.items():
        whole = full.members[key]
        counts = np.bincount(table.labels[whole.validation])
        wanted = counts if held is None else np.minimum(counts, held)
        assert np.bincount(table.labels[member.validation]).tolist() == wanted.tolist()
        assert set(member.validation) <= set(whole.validation)
        assert (member.test == whole.test).all()


def test_validation_shots_leave_the_training_rows_as_they_were():
    table = make_rows(400)
    one, other = (divide(table, Clients(shots=3, val_shots=n), 0) for n in (0, 2))
    for key in one.members:
        assert (one.members[key].train == other.members[key].train).all()
