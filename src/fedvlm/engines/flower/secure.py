"""Run a round through Flower's SecAgg+: the server gets the mean of the uploads, and no single upload.

Flower has SecAgg+ only in its older interface, with `FitIns` and `FitRes`. Our messages travel inside them: the request
as bytes among the settings, the reply's header among the metrics, and its masked arrays as parameters. The number of
examples, which Flower sends in the clear, is always 1: the weight is one of the masked numbers.
"""

import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest
from typing import Any

import numpy as np

from fedvlm.engines import flower as api
from fedvlm.engines.flower import import_flower
from fedvlm.engines.flower.messages import Arrays, Message, collect_replies, from_bytes, to_bytes, to_records
from fedvlm.errors import FederationError

STAGE = "secaggplus_configs"  # the record by which Flower knows a message of SecAgg+
STATE = "secaggplus_state"  # the record in which Flower keeps a member's keys between stages
REQUEST = "fitins.config"  # the record that carries our request
TAG_BYTES = 32  # of the proof of the plan that goes with each encrypted share
SECAGG_RANGE = 8.0  # SecAgg+ cuts larger numbers off, silently; `to_secagg` refuses them before
STAGES_BEFORE_UPLOAD = ("setup", "share_keys")  # the stages in which no upload has left any site
MIN_SECURE_SITES = 3  # sites in a sum: of two, either knows the other's
MOST_MEMBERS = 1000  # more could overflow whole numbers of 32 bits


def sum_settings(members: int) -> dict[str, Any]:
    """Return the settings of a secure sum of so many members, the same at server and sites."""
    return {
        "sample_num": members,
        "share_num": members,
        "threshold": -(-2 * members // 3),  # fewer shares than two thirds cannot lift a mask
        "clipping_range": SECAGG_RANGE,
        # As fine as whole numbers of 32 bits allow for the sum of so many members.
        "target_range": 1 << max(22, 30 - (members + 1).bit_length()),
        "mod_range": 1 << 32,
        "max_weight": 1.0,
    }


def plan_digest(header: Mapping[str, Any]) -> str:
    """Return the hash of what all members of a sum must be told alike: plan, round, `largest`."""
    plan = [header.get(name) for name in ("training", "round", "largest")]
    return sha256(json.dumps(plan).encode()).hexdigest()


class SitesLeft(Exception):
    """Sites left before any upload did."""

    def __init__(self, nodes: set[int]) -> None:
        super().__init__()
        self.nodes = nodes


def mask_upload(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
    """Run SecAgg+ for its own messages, as a mod of the ClientApp; pass all others on.

    Flower follows whatever the server says. This mod refuses what would not hide the upload.
    """
    staged = STAGE in message.content.config_records
    if not staged and REQUEST not in message.content:
        return call_next(message, context)
    if not staged or message.metadata.message_type != "train":  # Flower would not mask these
        raise _refusal("the upload was requested outside the stage that masks it")
    app = import_flower()
    config = dict(message.content[STAGE])
    state = dict(context.state.config_records.get(STATE, {}))
    stage = config["stage"]
    if stage == "setup":
        _check_settings(config)
    elif stage == "share_keys":
        _check_keys(config, state)
    elif stage == "collect_masked_vectors":
        config["ctxts"] = _check_shares(config, state, unwrap_request(message.content))
    elif stage == "unmask":
        _check_uploads(config, state)
    # Flower takes its record apart, which is everybody's where a message is just a call.
    copied = {STAGE: app.ConfigRecord(config)}
    message.content = app.RecordDict({**message.content, **copied})
    reply = api.secaggplus_mod(message, context, call_next)
    after = context.state.config_records[STATE]
    if stage == "setup":
        after["plan"] = config["plan"]
    elif stage == "share_keys":
        share_record = reply.content[STAGE]
        pairs = zip(share_record["dsts"], share_record["ctxts"], strict=True)
        share_record["ctxts"] = [text + _tag(after, after["nid"], to) for to, text in pairs]
    return reply


def _refusal(reason: str) -> FederationError:
    return FederationError(f"the secure sum is refused here: {reason}")


def _check_settings(config: Mapping[str, Any]) -> None:
    """Refuse a sum of too few members, too low a threshold, or one that gives members no weight."""
    members, threshold = config["sample_num"], config["threshold"]
    if members < MIN_SECURE_SITES:
        raise _refusal(f"it must have at least {MIN_SECURE_SITES} members, got {members}")
    if members > MOST_MEMBERS:
        raise _refusal(f"it must have at most {MOST_MEMBERS} members, got {members}")
    expected = sum_settings(members)
    min_threshold = expected.pop("threshold")
    if threshold < min_threshold:
        raise _refusal(f"threshold must be at least {min_threshold}, got {threshold}")
    if threshold > members:
        raise _refusal(f"threshold must be at most {members}, got {threshold}")
    for name, value in expected.items():
        if config[name] != value:
            raise _refusal(f"{name} must be {value}, got {config[name]}")


def _check_keys(config: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Refuse keys of more or fewer members than the settings of the sum announced."""
    names = [name for name in config if name != "stage"]
    members = len({int(name) for name in names})
    if not len(names) == members == state.get("sample_num"):
        raise _refusal(f"{state.get('sample_num')} members were announced, got keys of {members}")


def _check_shares(config: Mapping[str, Any], state: Mapping[str, Any], request: Message | None) -> list[bytes]:
    """Return the encrypted shares, if all members sent theirs and were told the same plan."""
    other_members = set(state.get("public_keys_dict:K", ())) - {state.get("nid")}
    sources, texts = config["srcs"], config["ctxts"]
    if (
        len(other_members) < MIN_SECURE_SITES - 1
        or sorted(sources) != sorted(other_members)
        or len(texts) != len(sources)
    ):
        raise _refusal(f"it must bring shares of all {len(other_members)} other members, got {len(set(sources))}")
    same = request is not None and plan_digest(request.header) == state["plan"]
    for source, text in zip(sources, texts, strict=True):
        same &= compare_digest(text[-TAG_BYTES:], _tag(state, source, state["nid"]))
    if not same:
        raise _refusal("a member was told another plan, other members or another `largest`")
    return [text[:-TAG_BYTES] for text in texts]


def _check_uploads(config: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Refuse to lift masks from a sum of too few uploads, or in two ways at once."""
    active, dead = config["active_nids"], config["dead_nids"]
    if sorted([*active, *dead]) != sorted(state.get("public_keys_dict:K", ())):
        raise _refusal("its lists of who stayed and who left must name each member once")
    min_uploads = max(MIN_SECURE_SITES, state["threshold"])
    if len(active) < min_uploads:
        raise _refusal(
            f"it must hold at least {min_uploads} uploads, got {len(active)}; resume the run once the others are back"
        )


def _tag(state: Mapping[str, Any], source: int, target: int) -> bytes:
    """Prove to one member, by the key shared with it, which plan and members the sum is of."""
    peer = target if source == state["nid"] else source
    secrets = dict(zip(state["ss2_dict:K"], state["ss2_dict:V"], strict=True))
    keys = [key.hex() for key in state["public_keys_dict:V"]]
    members = sorted(zip(state["public_keys_dict:K"], keys[::2], keys[1::2], strict=True))
    statement = json.dumps([state["plan"], members, source, target])
    return hmac.digest(secrets[peer], statement.encode(), "sha256")


def unwrap_request(content: Any) -> Message | None:
    """Return the message inside a SecAgg+ message, or None if it is an ordinary one."""
    if REQUEST not in content:
        return None
    return from_bytes(content[REQUEST]["parcel"])


def wrap_reply(reply: Message, hidden: bool) -> Any:
    """Return a reply as it travels: as it is, or (`hidden`) in the form whose arrays SecAgg+ masks."""
    app = import_flower()
    if not hidden:
        if reply.header.get("masked"):  # whatever the server asks: this site's upload goes masked
            raise FederationError("the upload of a secure sum was requested without a mask")
        return to_records(reply)
    if "error" in reply.header:  # raised, because it must not enter the sum
        raise FederationError(json.dumps(reply.header["error"]))
    names = sorted(reply.arrays)
    arrays = [np.asarray(reply.arrays[name], np.float64) for name in names]
    return app.RecordDict(
        {
            "fitres.parameters": app.ArrayRecord(arrays),
            "fitres.num_examples": app.MetricRecord({"num_examples": 1}),
            "fitres.metrics": app.ConfigRecord({"header": json.dumps(reply.header), "names": json.dumps(names)}),
            "fitres.status": app.ConfigRecord({"code": 0, "message": ""}),
        }
    )


@dataclass(frozen=True)
class Node:
    """Stand in for a client's proxy in Flower."""

    node_id: int


@dataclass
class SecureExchange:
    """Stand in for a strategy and a grid in Flower: whom to ask, and the outcome."""

    grid: Any
    parcels: Mapping[int, Message]  # by node
    headers: dict[int, dict[str, Any]] = field(default_factory=dict)  # what each node said
    mean: Arrays = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)  # who answered the last time

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        return [
            (Node(node), api.FitIns(api.Parameters([], ""), {"parcel": to_bytes(message)}))
            for node, message in self.parcels.items()
        ]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        metrics = {node.node_id: fit_result.metrics for node, fit_result in results}
        [names] = {fit_result["names"] for fit_result in metrics.values()}
        self.headers = {node: json.loads(fit_result["header"]) for node, fit_result in metrics.items()}
        arrays = api.parameters_to_ndarrays(results[0][1].parameters)
        self.mean = dict(zip(json.loads(names), arrays, strict=True))
        return None, {}

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
        """Send messages and wait for replies, polling often and keeping each site's error, unlike Flower.

        Flower does not lift the masks either if a site leaves before all have shares of its key: the others fail at the
        very end. So that is raised here, before anything was uploaded.
        """
        messages = list(messages)
        stage = messages[0].content[STAGE]["stage"]
        before_upload = stage in STAGES_BEFORE_UPLOAD
        for reply in messages if stage == "setup" else ():
            reply.content[STAGE]["plan"] = plan_digest(self.parcels[reply.metadata.dst_node_id].header)
        replies = list(collect_replies(self.grid, self.grid.push_messages(messages), timeout))
        for reply in replies:
            if reply.has_error():
                self.failures[reply.metadata.src_node_id] = reply.error.reason
        self.answered = {reply.metadata.src_node_id for reply in replies if not reply.has_error()}
        left_nodes = {reply.metadata.dst_node_id for reply in messages} - self.answered
        if left_nodes and before_upload:
            raise SitesLeft(left_nodes)
        return replies

    def failure_reason(self, node: int) -> str:
        """Return why a site is missing in the sum."""
        if node in self.answered:
            return "it stayed, but too few others did to lift the masks"
        return self.failures.get(node, "it did not stay to the end of the sum")


def exchange_securely(grid: Any, parcels: Mapping[int, Message], number: int, timeout: float | None) -> SecureExchange:
    """Run one round of SecAgg+; without enough sites to the end, the result has no replies.

    If sites leave before any upload, the others start again without them.
    """
    failures: dict[int, str] = {}
    while len(parcels) >= MIN_SECURE_SITES:
        summation = SecureExchange(grid, parcels, failures=failures)
        try:
            _run_workflow(summation, number, timeout)
        except SitesLeft as error:
            parcels = {node: message for node, message in parcels.items() if node not in error.nodes}
        except Exception as error:  # whatever sums that do not fit together make it raise
            raise FederationError(f"round {number}: the secure sum failed: {error}") from error
        else:
            return summation
    return SecureExchange(grid, {}, failures=failures, answered=set(parcels))


def _run_workflow(summation: SecureExchange, number: int, timeout: float | None) -> None:
    app = import_flower()
    strategy: Any = summation
    state = app.RecordDict({"config": app.ConfigRecord({"current_round": number}), "parameters": app.ArrayRecord()})
    context = api.LegacyContext(app.Context(1, 1, {}, state, {}), strategy=strategy)
    settings = sum_settings(len(summation.parcels))
    api.SecAggPlusWorkflow(
        1.0,  # every member holds a share of every other's key
        settings["threshold"],
        max_weight=settings["max_weight"],
        clipping_range=settings["clipping_range"],
        quantization_range=settings["target_range"],
        modulus_range=settings["mod_range"],
        timeout=timeout,
    )(strategy, context)
