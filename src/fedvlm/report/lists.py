"""List methods, encoders, data sets, metrics, protocols, experiments and papers."""

from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from inspect import getdoc, getmodule, signature
from typing import Any

Row = dict[str, Any]


def list_methods() -> list[Row]:
    from fedvlm.core import methods

    return [
        {
            "method": name,
            "needs": ", ".join(sorted(kind().traits.needs)),
            "what": method_sentence(kind()),
            "settings": ", ".join(f"{field.name}={field.default}" for field in fields(kind)),
        }
        for name, kind in methods().items()
    ]


def method_sentence(method: object) -> str:
    """Return what a method does in one sentence, from its docstring."""
    return _first_sentence(getmodule(type(method))) or _first_sentence(type(method))


def list_encoders() -> list[Row]:
    from fedvlm.encoders import encoders

    kinds = encoders().values()
    return [{"encoder": kind.form, "offers": ", ".join(kind.offers), "what": kind.summary} for kind in kinds]


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


def list_data() -> list[Row]:
    from fedvlm.data import kinds

    options = {word: ", ".join(list(signature(reader).parameters)[1:]) for word, reader in kinds().items()}
    sentences = {word: _first_sentence(reader) for word, reader in kinds().items()}
    return [{"data": f"{word}:PLACE", "options": options[word], "what": sentences[word]} for word in options]


def list_metrics() -> list[Row]:
    from fedvlm.evaluate.metrics import metrics

    return [{"metric": name, "what": _first_sentence(metric)} for name, metric in metrics().items()]


def list_protocols() -> list[Row]:
    from fedvlm.evaluate.protocols import protocols

    settings = {name: ", ".join(field.name for field in fields(rules)) for name, rules in protocols().items()}
    return [{"protocol": k, "settings": settings[k], "what": rules.summary} for k, rules in protocols().items()]


def _first_sentence(documented: object) -> str:
    """The first sentence of what its docstring says."""
    return (getdoc(documented) or "").split("\n\n")[0].replace("\n", " ")


def list_experiments() -> list[Row]:
    from fedvlm.runner.experiment_files import experiments, read_toml

    return [{"experiment": name, "title": read_toml(path).get("title", "")} for name, path in experiments().items()]


LISTS: dict[str, Callable[[], list[Row]]] = {
    "methods": list_methods,
    "encoders": list_encoders,
    "data": list_data,
    "datasets": list_datasets,
    "metrics": list_metrics,
    "protocols": list_protocols,
    "experiments": list_experiments,
    "papers": lambda: import_module("fedvlm.report.papers").coverage(),
}
