"""What a site has of the federation, beside what it would have alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedvlm.core import make
from fedvlm.engines.client import World, make_client, measure


def compare_with_alone(world: World, id: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """How many validation rows are right with what came of the run, and by own rows alone."""
    scores = {"rows": measured["validation_rows"], "federated": measured["validation_hits"]}
    if tuple(world.x.shape[1:]) != (world.frozen.dim,):
        return {**scores, "alone": "?"}  # its rows are patches or pixels, and a probe has none
    probe = replace(world, method=make("alone"))
    nothing, initial_local = probe.method.init(probe.frozen)
    adapted = probe.method.adapt(probe.frozen, nothing, initial_local, make_client(probe, id, 0))
    return {**scores, "alone": measure(probe, nothing, adapted, id)["validation_hits"]}
