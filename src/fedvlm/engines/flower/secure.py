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

from fedvlm.engines.flower import api
from fedvlm.engines.flower.api import flower
from fedvlm.engines.flower.wire import (
    Arrays,
    Parcel,
    collect,
    from_bytes,
    to_bytes,
    to_records,
)
from fedvlm.errors import FederationError

STAGE = "secaggplus_configs"  # the record by which Flower knows a message of SecAgg+
RANGE = 8.0  # SecAgg+ cuts larger numbers off, silently; `to_secagg` refuses them before
KEEP = 2 / 3  # share of the sites that must stay to the end; fewer cannot lift the masks


def mask(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
    """A mod of the ClientApp: SecAgg+ for its own messages, and nothing for the others."""
    if STAGE not in message.content.config_records:
        return call_next(message, context)
    app = flower()
    # It takes its record apart, which is everybody's where a message is just a call.
    own = {STAGE: app.ConfigRecord(dict(message.content[STAGE]))}
    message.content = app.RecordDict({**message.content, **own})
    return api.secaggplus_mod(message, context, call_next)


def request(content: Any) -> Parcel | None:
    """The parcel inside a message of SecAgg+; None if it is an ordinary one."""
    if "fitins.config" not in content:
        return None
    return from_bytes(content["fitins.config"]["parcel"])


def records(reply: Parcel, hidden: bool) -> Any:
    """A reply as it travels: as it is, or (`hidden`) as SecAgg+ takes it and masks its arrays."""
    app = flower()
    if not hidden:
        if reply.about.get("masked"):  # whatever the server asks: this site's upload goes masked
            raise FederationError("the upload of a secure sum was asked for without a mask")
        return to_records(reply)
    if "error" in reply.about:  # raised, because it must not enter the sum
        raise FederationError(json.dumps(reply.about["error"]))
    names = sorted(reply.arrays)
    arrays = [np.asarray(reply.arrays[name], np.float64) for name in names]
    return app.RecordDict(
        {
            "fitres.parameters": app.ArrayRecord(arrays),
            "fitres.num_examples": app.MetricRecord({"num_examples": 1}),
            "fitres.metrics": app.ConfigRecord(
                {"about": json.dumps(reply.about), "names": json.dumps(names)}
            ),
            "fitres.status": app.ConfigRecord({"code": 0, "message": ""}),
        }
    )


@dataclass(frozen=True)
class Node:
    """What Flower takes for a client's proxy."""

    node_id: int


@dataclass
class Exchange:
    """What Flower takes for a strategy and a grid: whom to ask, and what came of it."""

    grid: Any
    parcels: Mapping[int, Parcel]  # by node
    words: dict[int, dict[str, Any]] = field(default_factory=dict)  # what each node said
    mean: Arrays = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        return [
            (Node(node), api.FitIns(api.Parameters([], ""), {"parcel": to_bytes(parcel)}))
            for node, parcel in self.parcels.items()
        ]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        said = {node.node_id: one.metrics for node, one in results}
        [names] = {one["names"] for one in said.values()}
        self.words = {node: json.loads(one["about"]) for node, one in said.items()}
        arrays = api.parameters_to_ndarrays(results[0][1].parameters)
        self.mean = dict(zip(json.loads(names), arrays, strict=True))
        return None, {}

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
        """Flower looks every three seconds, and forgets why a site did not answer; we do not."""
        replies = list(collect(self.grid, self.grid.push_messages(messages), timeout))
        for one in replies:
            if one.has_error():
                self.failures[one.metadata.src_node_id] = one.error.reason
        return replies


def exchange(
    grid: Any, parcels: Mapping[int, Parcel], number: int, timeout: float | None
) -> Exchange:
    """One round of SecAgg+; without enough sites to the end, nobody's words are in the result."""
    app = flower()
    asked = Exchange(grid, parcels)
    both: Any = asked
    state = app.RecordDict(
        {"config": app.ConfigRecord({"current_round": number}), "parameters": app.ArrayRecord()}
    )
    context = api.LegacyContext(app.Context(1, 1, {}, state, {}), strategy=both)
    # As fine as whole numbers of 32 bits allow for the sum of so many sites.
    levels = 1 << max(22, 30 - (len(parcels) + 1).bit_length())
    work = api.SecAggPlusWorkflow(
        1.0, KEEP, max_weight=1.0, clipping_range=RANGE, quantization_range=levels, timeout=timeout
    )
    try:
        work(both, context)
    except Exception as error:  # whatever sums that do not fit together make it raise
        raise FederationError(f"round {number}: the secure sum failed: {error}") from error
    return asked
