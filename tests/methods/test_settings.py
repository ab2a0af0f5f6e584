"""Every number of a method has a range, and a refusal states the range, the setting and the value."""

from dataclasses import fields
from typing import get_args

import pytest

from fedvlm.core import make, methods
from fedvlm.core.schema import range_of
from fedvlm.errors import SettingsError

NUMBERS = [
    (name, field)
    for name, method in methods().items()
    for field in fields(method)
    if {int, float} & {field.type, *get_args(field.type)}
]


@pytest.mark.parametrize(("name", "field"), NUMBERS, ids=lambda case: getattr(case, "name", case))
def test_a_number_outside_its_range_is_refused_by_range_setting_and_value(name, field):
    if field.name in ("betas", "local_vectors"):  # a pair; its range follows from n_ctx
        return
    span = range_of(field)
    assert span is not None, f"{name}.{field.name} has no range"
    outside = span.low - 1
    for build in (lambda **settings: make(name, **settings), methods()[name]):
        with pytest.raises(SettingsError) as caught:
            build(**{field.name: outside})
        assert str(caught.value) == f"{name}.{field.name} must be {span}, got {outside!r}"
