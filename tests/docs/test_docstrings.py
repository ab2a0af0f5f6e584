"""Every public name of fedvlm and fedvlm.testing has a full docstring, and its example runs."""

import doctest
import inspect
from importlib import import_module

import pytest

import fedvlm
from fedvlm import core

NAMES = [(module, name) for module in ("fedvlm", "fedvlm.testing") for name in import_module(module).__all__]


def section(text, title):
    """The lines below a title of a docstring."""
    _, found, rest = text.partition(f"\n{title}:\n")
    return rest.split("\n\n")[0] if found else ""


def public(module, name):
    value = getattr(import_module(module), name)
    return core.methods if inspect.ismodule(value) else value  # the package hides the function once it is imported


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_explains_parameters_and_result(module, name):
    value = public(module, name)
    text = inspect.getdoc(value) or ""
    documented = {line.split(":")[0].strip() for line in section(text, "Args").splitlines() if line[4:5].strip()}
    if not inspect.isfunction(value):
        members = [
            member for key, member in vars(value).items() if not key.startswith("_") and inspect.isfunction(member)
        ]
        assert all(inspect.getdoc(member) for member in members), f"a method of {name} has no docstring"
        return
    signature = inspect.signature(value)
    assert documented == set(signature.parameters)
    assert bool(section(text, "Returns")) != (signature.return_annotation in (None, "None"))


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_example_of_a_public_name_runs(module, name):
    found = doctest.DocTestParser().get_doctest(inspect.getdoc(public(module, name)), {"fedvlm": fedvlm}, name, None, 0)
    assert found.examples, f"{name} has no example"
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(found)
    assert runner.failures == 0


def test_methods_can_be_called_however_often():
    assert fedvlm.methods() == fedvlm.methods() == core.methods()
