"""What a site has of the federation, beside what it would have alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedvlm.core import make
from fedvlm.engines.client import World, client, measure


def gained(world: World, id: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """How many validation rows are right with what came of the run, and by own rows alone."""
    known = {"rows": measured["validation_rows"], "federated": measured["validation_hits"]}
    if tuple(world.x.shape[1:]) != (world.frozen.dim,):
        return {**known, "alone": "?"}  # its rows are patches or pixels, and a probe has none
    probe = replace(world, method=make("alone"))
    nothing, fresh = probe.method.init(probe.frozen)
    own = probe.method.adapt(probe.frozen, nothing, fresh, client(probe, id, 0))
    return {**known, "alone": measure(probe, nothing, own, id)["validation_hits"]}
