"""The words of requests and replies, by type and range, before anybody uses them."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from fedvlm.data.splits import SPLITS
from fedvlm.engines.flower.wire import Message
from fedvlm.errors import FederationError
from fedvlm.evaluate.metrics import METRICS

Fits = Callable[[Any], bool]
MAX_COUNT = 10**9  # what is counted here: rounds, rows, classes, dimensions
MAX_NUMBER = 1e15  # no sound number is larger; sums of such numbers stay finite


def integer(low: int = 0, high: int = MAX_COUNT) -> Fits:
    return lambda value: type(value) is int and low <= value <= high


def number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_NUMBER and isfinite(value)


def text(max_chars: int = 200) -> Fits:
    return lambda value: type(value) is str and len(value) <= max_chars and value.isprintable()


def listed(fits: Fits, max_items: int = 100_000) -> Fits:
    return lambda value: type(value) is list and len(value) <= max_items and all(map(fits, value))


def truth(value: Any) -> bool:
    return type(value) is bool


def one_of(*words: str) -> Fits:
    return lambda value: type(value) is str and value in words


def table(required: Mapping[str, Fits], may: Mapping[str, Fits] | None = None) -> Fits:
    """A table of all the known names, and perhaps of those that `may` be there."""
    allowed = {**required, **(may or {})}

    def fits(value: Any) -> bool:
        if type(value) is not dict or not required.keys() <= value.keys() <= allowed.keys():
            return False
        return all(allowed[key](field_value) for key, field_value in value.items())

    return fits


def key(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= 64 and set(value) <= set("0123456789abcdef")


def anything(value: Any) -> bool:
    return True


def mapping(value: Any) -> bool:
    return type(value) is dict


SEALED = {"checksum": text(), "signature": text()}
ABOUT = {
    "kind": one_of("open", "round", "adapt"),
    "training": key,
    "round": integer(),
    "nonce": text(64),
}
SPEC = {"identity": mapping, "classes": listed(text()), "seed": integer(), "training": text()}
TUNING_FIELDS = {"race": key, "trainings": integer(1), "rounds": integer(1)}  # how large a race will be
TASK = {
    "client": text(),
    "trains": truth,
    "version": integer(),
    "held": listed(integer(), 8),
}
SCORES = {f"{part}_{count_name}": integer() for part in SPLITS[1:] for count_name in ("rows", "hits")}
OPTIONAL_SCORES = {"loss": number, **dict.fromkeys(METRICS[1:], number)}
REPLY_FIELDS = {  # every word of every reply; docs/security/security.md has a line for each
    "open": {
        **{"opened": key, "encoder": text(), "classes": listed(text()), "dim": integer(1)},
        **{"scale": number, "local": listed(text()), "rows": table(dict.fromkeys(SPLITS, integer()))},
    },
    "round": {
        **{"masked": truth, "version": integer(), "uploads": truth, "releases": integer()},
        **{"scores": table(SCORES, OPTIONAL_SCORES), "described": mapping},
    },
}
REPLY_FIELDS["adapt"] = REPLY_FIELDS["round"]
PERHAPS = {"open": {"template": text()}}  # what only some methods have a site say


def check(about: Any, required: Mapping[str, Fits], may: Mapping[str, Fits], sender: str) -> None:
    """Refuses words that are missing, unknown or unfit; says which, and not what they were."""
    if type(about) is not dict:
        raise FederationError(f"the words of {sender} are no table")
    if missing := sorted(required.keys() - about.keys()):
        raise FederationError(f"{sender} does not say {missing[0]!r}; it runs another version")
    if about.keys() - required.keys() - may.keys():
        raise FederationError(f"{sender} says words that are not known here; it runs another version")
    for name, value in about.items():
        if not {**may, **required}[name](value):
            raise FederationError(f"{name!r} of {sender} does not fit; it is not used")


def check_request(about: Any) -> None:
    optional = dict.fromkeys(about, anything) if type(about) is dict else {}
    check(about, ABOUT, optional, "the request")
    if about["kind"] == "open":
        check(about, {**ABOUT, "spec": table(SPEC, {"race": table(TUNING_FIELDS)})}, SEALED, "the request")
    else:
        check(about, {**ABOUT, **TASK}, {"largest": integer(1), **SEALED}, "the request")


def check_reply(reply: Message, request: Mapping[str, Any]) -> None:
    """What does not depend on method or site: names, types, ranges, and that parts fit together."""
    about, kind = reply.about, request["kind"]
    may = {**SEALED, **PERHAPS.get(kind, {})}
    check(about, {**ABOUT, "client": text(), **REPLY_FIELDS[kind]}, may, "the reply")
    if kind == "open":
        return
    uploads = kind == "round" and request["trains"]
    if about["uploads"] != uploads or (reply.arrays and not uploads):
        raise FederationError("the reply has an upload that was not asked for, or lacks one")
    if about["version"] != (request["round"] + 1 if request["trains"] else request["version"]):
        raise FederationError(f"the reply is of version {about['version']} of its local tensors, which cannot be")
    scores = about["scores"]
    if any(scores[f"{part}_hits"] > scores[f"{part}_rows"] for part in SPLITS[1:]):
        raise FederationError("the reply has more hits than rows")
    if len(about["described"]) > 32 or not all(map(text(), about["described"])):
        raise FederationError("'described' of the reply does not fit")
    if not all(map(number, about["described"].values())):
        raise FederationError("'described' of the reply holds what is no number")
