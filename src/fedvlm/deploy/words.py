"""The words of requests and replies, by type and range, before anybody uses them."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from fedvlm.data.splits import PARTS
from fedvlm.engines.flower.wire import Parcel
from fedvlm.errors import FederationError
from fedvlm.evaluate.metrics import METRICS

Fits = Callable[[Any], bool]
MOST = 10**9  # what is counted here: rounds, rows, classes, dimensions
LARGE = 1e15  # no sound number is larger; sums of such numbers stay finite


def whole(least: int = 0, most: int = MOST) -> Fits:
    return lambda value: type(value) is int and least <= value <= most


def number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGE and isfinite(value)


def text(most: int = 200) -> Fits:
    return lambda value: type(value) is str and len(value) <= most and value.isprintable()


def listed(fits: Fits, most: int = 100_000) -> Fits:
    return lambda value: type(value) is list and len(value) <= most and all(map(fits, value))


def truth(value: Any) -> bool:
    return type(value) is bool


def one_of(*words: str) -> Fits:
    return lambda value: type(value) is str and value in words


def table(known: Mapping[str, Fits], may: Mapping[str, Fits] | None = None) -> Fits:
    """A table of all the known names, and perhaps of those that `may` be there."""
    both = {**known, **(may or {})}

    def fits(value: Any) -> bool:
        if type(value) is not dict or not known.keys() <= value.keys() <= both.keys():
            return False
        return all(both[key](one) for key, one in value.items())

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
    "round": whole(),
    "nonce": text(64),
}
SPEC = {"identity": mapping, "classes": listed(text()), "seed": whole(), "training": text()}
RACE = {"race": key, "trainings": whole(1), "rounds": whole(1)}  # how large a race will be
TASK = {
    "client": text(),
    "trains": truth,
    "version": whole(),
    "held": listed(whole(), 8),
}
SCORES = {f"{part}_{what}": whole() for part in PARTS[1:] for what in ("rows", "hits")}
MORE = {"loss": number, **dict.fromkeys(METRICS[1:], number)}
SPOKEN = {  # every word of every reply; docs/security/security.md has a line for each
    "open": {
        **{"opened": key, "encoder": text(), "classes": listed(text()), "dim": whole(1)},
        **{"scale": number, "local": listed(text()), "rows": table(dict.fromkeys(PARTS, whole()))},
    },
    "round": {
        **{"masked": truth, "version": whole(), "uploads": truth, "releases": whole()},
        **{"scores": table(SCORES, MORE), "described": mapping},
    },
}
SPOKEN["adapt"] = SPOKEN["round"]
PERHAPS = {"open": {"template": text()}}  # what only some methods have a site say


def check(about: Any, known: Mapping[str, Fits], may: Mapping[str, Fits], who: str) -> None:
    """Refuses words that are missing, unknown or unfit; says which, and not what they were."""
    if type(about) is not dict:
        raise FederationError(f"the words of {who} are no table")
    if missing := sorted(known.keys() - about.keys()):
        raise FederationError(f"{who} does not say {missing[0]!r}; it runs another version")
    if about.keys() - known.keys() - may.keys():
        raise FederationError(f"{who} says words that are not known here; it runs another version")
    for name, value in about.items():
        if not {**may, **known}[name](value):
            raise FederationError(f"{name!r} of {who} does not fit; it is not used")


def check_request(about: Any) -> None:
    others = dict.fromkeys(about, anything) if type(about) is dict else {}
    check(about, ABOUT, others, "the request")
    if about["kind"] == "open":
        check(about, {**ABOUT, "spec": table(SPEC, {"race": table(RACE)})}, SEALED, "the request")
    else:
        check(about, {**ABOUT, **TASK}, {"largest": whole(1), **SEALED}, "the request")


def check_reply(reply: Parcel, request: Mapping[str, Any]) -> None:
    """What does not depend on method or site: names, types, ranges, and that parts fit together."""
    about, kind = reply.about, request["kind"]
    may = {**SEALED, **PERHAPS.get(kind, {})}
    check(about, {**ABOUT, "client": text(), **SPOKEN[kind]}, may, "the reply")
    if kind == "open":
        return
    uploads = kind == "round" and request["trains"]
    if about["uploads"] != uploads or (reply.arrays and not uploads):
        raise FederationError("the reply has an upload that was not asked for, or lacks one")
    if about["version"] != (request["round"] + 1 if request["trains"] else request["version"]):
        raise FederationError(
            f"the reply is of version {about['version']} of its local tensors, which cannot be"
        )
    scores = about["scores"]
    if any(scores[f"{part}_hits"] > scores[f"{part}_rows"] for part in PARTS[1:]):
        raise FederationError("the reply has more hits than rows")
    if len(about["described"]) > 32 or not all(map(text(), about["described"])):
        raise FederationError("'described' of the reply does not fit")
    if not all(map(number, about["described"].values())):
        raise FederationError("'described' of the reply holds what is no number")
