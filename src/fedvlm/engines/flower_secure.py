"""SecAgg+ of Flower around a round: the server gets the mean of what sites upload, and no upload.

Flower has SecAgg+ in its older interface only, where a request is `FitIns` and an answer `FitRes`.
Ours travels in them whole: the request as bytes among the settings, the words of the answer among
the metrics, and its arrays, masked, as the parameters. The number of examples, which Flower sends
in the clear, is always 1: a weight is one of the masked numbers.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedvlm.channel.secure import SECAGG
from fedvlm.engines.flower_wire import Arrays, Parcel, flower, from_bytes, to_bytes

STAGE = "secaggplus_configs"  # the record by which Flower knows a message of SecAgg+
KEEP = 2 / 3  # share of the sites that must stay to the end; fewer cannot lift the masks


def mask(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
    """A mod of the ClientApp: SecAgg+ for its own messages, and nothing for the others."""
    if STAGE not in message.content.config_records:
        return call_next(message, context)
    from flwr.client.mod import secaggplus_mod

    return secaggplus_mod(message, context, call_next)


def request(content: Any) -> Parcel | None:
    """The parcel inside a message of SecAgg+; None if it is an ordinary one."""
    if "fitins.config" not in content:
        return None
    return from_bytes(content["fitins.config"]["parcel"])


def answer(reply: Parcel) -> Any:
    """A reply as SecAgg+ takes it; an error is raised, because it must not enter the sum."""
    app = flower()
    if "error" in reply.about:
        raise RuntimeError(reply.about["error"])
    arrays = [np.asarray(reply.arrays[name], np.float64) for name in sorted(reply.arrays)]
    return app.RecordDict(
        {
            "fitres.parameters": app.ArrayRecord(arrays),
            "fitres.num_examples": app.MetricRecord({"num_examples": 1}),
            "fitres.metrics": app.ConfigRecord(
                {"about": json.dumps({**reply.about, "names": sorted(reply.arrays)})}
            ),
            "fitres.status": app.ConfigRecord({"code": 0, "message": ""}),
        }
    )


@dataclass
class Exchange:
    """What Flower takes for a strategy: whom to ask, and what came of it."""

    parcels: Mapping[int, Parcel]  # by node
    words: dict[int, dict[str, Any]] = field(default_factory=dict)  # what each node said
    mean: Arrays = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        from flwr.common import FitIns, Parameters

        return [
            (Node(node), FitIns(Parameters([], ""), {"parcel": to_bytes(parcel)}))
            for node, parcel in self.parcels.items()
        ]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        from flwr.common import parameters_to_ndarrays

        self.words = {node.node_id: json.loads(one.metrics["about"]) for node, one in results}
        names = {tuple(one["names"]) for one in self.words.values()}
        if len(names) == 1:
            [order] = names
            arrays = parameters_to_ndarrays(results[0][1].parameters)
            self.mean = dict(zip(order, arrays, strict=True))
        self.failures = [str(one) for one in failures]
        return None, {}


@dataclass(frozen=True)
class Node:
    """What Flower takes for a client's proxy."""

    node_id: int


def exchange(
    grid: Any, parcels: Mapping[int, Parcel], number: int, timeout: float | None
) -> Exchange:
    """One round of SecAgg+; without enough sites to the end, nobody's words are in the result."""
    app = flower()
    from flwr.server import LegacyContext
    from flwr.server.workflow import SecAggPlusWorkflow

    asked = Exchange(parcels)
    state = app.RecordDict(
        {"config": app.ConfigRecord({"current_round": number}), "parameters": app.ArrayRecord()}
    )
    strategy: Any = asked
    context = LegacyContext(app.Context(1, 1, {}, state, {}), strategy=strategy)
    # As fine as whole numbers of 32 bits allow for the sum of so many sites.
    levels = 1 << max(22, 30 - (len(parcels) + 1).bit_length())
    work = SecAggPlusWorkflow(
        1.0, KEEP, max_weight=1.0, clipping_range=SECAGG, quantization_range=levels, timeout=timeout
    )
    work(grid, context)
    return asked
