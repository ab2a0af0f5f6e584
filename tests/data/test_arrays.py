"""Arrays in memory that are refused, each with the value and the remedy."""

import numpy as np
import pytest

from fedvlm.data.arrays import from_arrays
from fedvlm.errors import DataError

X = np.random.default_rng(0).normal(size=(3, 4))


@pytest.mark.parametrize("labels", [[0, "cat", 1], np.array([0, "cat", 1], dtype=object), ["cat", 1.0, "dog"]])
def test_labels_of_mixed_types_are_refused(labels):
    with pytest.raises(DataError, match=r"client 'a': the labels mix numbers and names \((0|1\.0) and 'cat'\)"):
        from_arrays({"a": (X, labels)})


def test_numbers_at_one_client_and_names_at_another_are_refused():
    with pytest.raises(DataError, match="client 'a' has numbers as labels and client 'b' has names"):
        from_arrays({"a": (X, [0, 1, 2]), "b": (X, ["cat", "dog", "owl"])})


@pytest.mark.parametrize(("labels", "classes"), [([0, 1, 0], ["cat", " "]), (["cat", "", "dog"], None)])
def test_an_empty_class_name_is_refused(labels, classes):
    with pytest.raises(DataError, match="a class has an empty name"):
        from_arrays({"a": (X, labels)}, classes)


def test_a_number_beyond_float32_is_named():
    with pytest.raises(DataError, match=r"client 'a': row 1 holds 1e\+300, beyond the range of float32"):
        from_arrays({"a": (np.array([[1.0, 2.0], [1e300, 0.0], [3.0, 4.0]]), [0, 1, 0])})
    with pytest.raises(DataError, match=r"client 'a': row 0 holds NaN or infinity"):
        from_arrays({"a": (np.array([[np.inf, 2.0]]), [0])})


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused(scale):
    with pytest.raises(DataError, match="scale must be a number above 0, got"):
        from_arrays({"a": (X, [0, 1, 0])}, scale=scale)
