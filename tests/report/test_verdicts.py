"""Our numbers beside printed ones: what a verdict says, and when there can be none."""

from dataclasses import replace

import pytest

from fedvlm.report.papers import find_item, incomparable_reason, judge_number, matches_method, numbers, verdict_word
from fedvlm.runner.settings import build


@pytest.mark.parametrize(
    ("measured", "std", "theirs", "word"),
    [
        (90.0, None, None, "met"),
        (90.5, 0.1, 0.1, "met"),
        (95.0, 0.1, 0.1, "suspicious"),  # better by more than twice the noise: a leak, not a success
        (92.0, None, None, "met"),
        (92.1, None, None, "suspicious"),
        (89.0, 0.0, None, "within noise"),  # one point where no deviation is printed
        (88.9, 5.0, None, "differs"),
        (89.0, 0.3, 0.4, "within noise"),  # 2 * 0.5
        (88.99, 0.3, 0.4, "differs"),
        (89.5, None, 0.2, "differs"),
    ],
)
def test_verdicts_are_two_sided(measured, std, theirs, word):
    assert verdict_word(measured, std, 90.0, theirs) == word


def published(**changes):
    """FedOT's number on PACS, 94.68 without a deviation, changed in some fields."""
    number = next(n for n in numbers()["fedot-v1/T1"] if (n.row, n.data, n.column) == ("FedOT", "pacs", "G"))
    return replace(number, **changes)


def test_void_and_not_comparable_say_why_whatever_the_numbers_are():
    void = published(status="void", reason="a slip")
    for measured in (10.0, 90.0, 99.0):
        assert str(judge_number(void, measured, None, run_of(void))) == "void (a slip)"
        smoke = {**run_of(void), "smoke": True}
        assert str(judge_number(void, measured, None, smoke)) == "not comparable (a smoke run)"


def test_a_copied_number_is_judged_and_says_where_it_is_from():
    copied = published(status="copied", reason="there")
    assert str(judge_number(copied, copied.value, None, run_of(copied))) == "met (there)"


def test_less_is_better_where_it_is():
    assert verdict_word(1.2, None, 1.3, None, lower_is_better=True) == "met"
    assert verdict_word(3.0, None, 1.3, None, lower_is_better=True) == "differs"


def run_of(number, **changed):
    """The identity of a run that is what a number is printed for."""
    item = find_item(number.name)
    values = {"data": number.data, "seeds": [50, 77, 98], "method": {"name": number.method}}
    expected = {**item.settings, **number.settings, **changed}
    for key, value in expected.items():
        head, _, name = key.partition(".")
        if name:
            values.setdefault(head, {})[name] = value
        else:
            values[head] = value
    return build(values).identity()


def test_a_run_as_published_is_judged_by_its_number():
    (number,) = (
        number
        for number in numbers()["fedot-v1/T1"]
        if (number.row, number.data, number.column) == ("FedOT", "pacs", "G")
    )
    identity = run_of(number)
    assert matches_method(number, identity)
    assert not matches_method(number, run_of(number, **{"method.head": "random"}))
    assert not incomparable_reason(number, identity)
    assert judge_number(number, 94.7, 0.1, identity).word == "met"
    assert judge_number(number, 93.9, 0.1, identity).word == "within noise"
    assert judge_number(number, 93.0, 0.1, identity).word == "differs"
    copy = run_of(number, encoder="hf:models/clip-vit-base-patch32")
    assert not incomparable_reason(number, copy)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"smoke": True}, "a smoke run"),
        ({"data": "office-home"}, "data is 'office-home', not 'pacs'"),
        ({"encoder": "demo"}, "encoder is 'demo', not 'hf:openai/clip-vit-base-patch32'"),
        ({"method.blocks": 4}, "method.blocks is 4, not 1"),
    ],
)
def test_a_run_of_something_else_is_not_comparable(changed, message):
    number = next(number for number in numbers()["fedot-v1/T1"] if (number.row, number.data) == ("FedOT", "pacs"))
    identity = run_of(number, **changed)
    assert str(judge_number(number, 94.7, None, identity)) == f"not comparable ({message})"


def test_other_shots_are_not_comparable():
    number = next(number for number in numbers()["tofa/T1"] if number.method == "tofa")
    assert not incomparable_reason(number, run_of(number))
    run = run_of(number, **{"clients.shots": 4})
    assert incomparable_reason(number, run) == "clients.shots is 4, not 16"
