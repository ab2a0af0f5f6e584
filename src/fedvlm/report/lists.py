"""What there is to choose from, as rows a person or a program can read."""

from collections.abc import Callable
from dataclasses import fields
from inspect import getdoc, getmodule
from typing import Any

Row = dict[str, Any]


def list_methods() -> list[Row]:
    from fedvlm.core import methods

    return [
        {
            "method": name,
            "needs": ", ".join(sorted(kind().traits.needs)),
            "what": (getdoc(getmodule(kind)) or "").split("\n\n")[0].replace("\n", " "),
            "settings": ", ".join(f"{one.name}={one.default}" for one in fields(kind)),
        }
        for name, kind in methods().items()
    ]


def list_encoders() -> list[Row]:
    from fedvlm.encoders import ENCODERS

    return [
        {"encoder": kind.form, "offers": ", ".join(kind.offers), "what": kind.what}
        for kind in ENCODERS.values()
    ]


def list_datasets() -> list[Row]:
    from fedvlm.data.catalogue import catalogue

    return [
        {
            "dataset": name,
            "classes": len(entry.classes) or "from the folders",
            "domains": ", ".join(entry.domains),
            "layout": entry.layout,
            "hub": entry.hub,
            "template": " | ".join(entry.templates),
            "protocol": entry.protocol,
            "names": list(entry.classes),
        }
        for name, entry in catalogue().items()
    ]


def list_experiments() -> list[Row]:
    from fedvlm.runner.experiments import experiments
    from fedvlm.runner.settings import read_toml

    return [
        {"experiment": name, "title": read_toml(path).get("title", "")}
        for name, path in experiments().items()
    ]


def list_papers() -> list[Row]:
    from fedvlm.report.coverage import coverage

    return coverage()


LISTS: dict[str, Callable[[], list[Row]]] = {
    "methods": list_methods,
    "encoders": list_encoders,
    "datasets": list_datasets,
    "experiments": list_experiments,
    "papers": list_papers,
}
