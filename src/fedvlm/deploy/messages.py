"""Check requests, replies and reported errors that cross between server and sites."""

import json
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from math import isfinite
from string import Formatter
from typing import Any

import torch

from fedvlm.data.splits import SPLITS
from fedvlm.data.table import to_nfc
from fedvlm.engines.flower.client import LostLocalError, to_tensors
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import DataError, EncoderError, FederationError, SettingsError
from fedvlm.evaluate.metrics import METRICS
from fedvlm.evaluate.protocols import Training
from fedvlm.runner.settings import Settings

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


def hex_key(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= 64 and set(value) <= set("0123456789abcdef")


def anything(value: Any) -> bool:
    return True


def mapping(value: Any) -> bool:
    return type(value) is dict


SEALED = {"checksum": text(), "signature": text()}
ABOUT = {
    "kind": one_of("open", "round", "adapt"),
    "training": hex_key,
    "round": integer(),
    "nonce": text(64),
}
SPEC = {"identity": mapping, "classes": listed(text()), "seed": integer(), "training": text()}
TUNING_FIELDS = {"race": hex_key, "trainings": integer(1), "rounds": integer(1)}  # how large a race will be
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
        **{"opened": hex_key, "encoder": text(), "classes": listed(text()), "dim": integer(1)},
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


POLICY_PREFIX = "refused by its policy: "
ERROR_MESSAGES = {
    # the policy
    "method": POLICY_PREFIX + "the method is not allowed here",
    "clip": POLICY_PREFIX + "channel.clip must be above 0, and {most:g} at most",
    "noise": POLICY_PREFIX + "channel.noise_multiplier must be {least:g} or more",
    "secure": POLICY_PREFIX + "uploads leave this site in a secure sum only; set channel.secure",
    "consent": POLICY_PREFIX + "nobody at this site has consented to training",
    "consent refused": POLICY_PREFIX + "a person at this site has refused",
    "consent ended": POLICY_PREFIX + "the consent given at this site has ended",
    "consent method": POLICY_PREFIX + "the consent given at this site is not for this method",
    "consent damaged": POLICY_PREFIX + "the consent given at this site cannot be read",
    "withdrawn": POLICY_PREFIX + "this site has withdrawn from the federation",
    "class": POLICY_PREFIX + "a class has fewer than {least} training rows, and the method sends them all",
    "rows": POLICY_PREFIX + "it has fewer than {least} training rows",
    "division": POLICY_PREFIX + "clients.shots and clients.ratios are the site's to say, not the server's",
    "upload": POLICY_PREFIX + "the answer has {bytes} bytes, but this site sends {most} at most",
    "trainings": POLICY_PREFIX + "{most} trainings have been opened here, and no more may be",
    "rounds": POLICY_PREFIX + "{most} rounds of this training have been answered, and no more may be",
    "all rounds": POLICY_PREFIX + "{most} rounds have been answered in all, and no more may be",
    "measures": POLICY_PREFIX + "{most} measurements without training were answered in this training",
    "epsilon": POLICY_PREFIX + "the round would cost more than what is left of ε = {most:g}",
    "no noise": POLICY_PREFIX + "ε is limited to {most:g} here, and the upload would have no noise",
    "race": POLICY_PREFIX + "a race is over its budget: with its run it takes {trainings} trainings and "
    "{rounds} rounds, which is more than what is left of trainings, rounds or ε",
    "policy": POLICY_PREFIX + "its policy is missing or cannot be read",
    "ledger": POLICY_PREFIX + "its ledger was changed, so nobody knows what has left",
    # what a person at either side can put right
    "words": "the request does not fit; it runs another version of fedvlm",
    "closed": "the training is not open here; the server opens it first",
    "version": "it does not have the local tensors that the server goes on from; bring its folder "
    "of personal state back, or run the experiment again from the start",
    "encoder": "this site began this training with another encoder than it has now",
    "classes": "it has images of {count} classes that are none of this experiment",
    "settings": "the settings do not fit this site; its own log says why",
    "data": "its data cannot be used; its own log says why",
    "access": "its encoder does not answer as it should; its own log says why",
    "federation": "the training failed there; its own log says why",
    "failure": "an error of the program; its own log says which",
}
CODE_BY_EXCEPTION = {
    SettingsError: "settings",
    DataError: "data",
    EncoderError: "access",
    LostLocalError: "version",
    FederationError: "federation",
}


class ReportedError(FederationError):
    """An error with a kind that the server is told; `detail` stays here."""

    def __init__(self, kind: str, detail: str = "", **numbers: float) -> None:
        self.kind, self.numbers = kind, numbers
        super().__init__(detail or ERROR_MESSAGES[kind].format(**numbers))


class RequestRefused(ReportedError):
    """A request that a site does not grant."""


def encode_error(error: Exception) -> dict[str, Any]:
    """What leaves of an error."""
    if isinstance(error, ReportedError):
        return {"kind": error.kind, "numbers": error.numbers}
    kinds = [kind for error_type, kind in CODE_BY_EXCEPTION.items() if isinstance(error, error_type)]
    return {"kind": kinds[0] if kinds else "failure", "numbers": {}}


def render_error(payload: Any) -> str:
    """What the server makes of it; a site cannot put words of its own into the record."""
    kind = payload.get("kind") if type(payload) is dict else None
    numbers = payload.get("numbers") if type(payload) is dict else None
    if type(kind) is not str or kind not in ERROR_MESSAGES or type(numbers) is not dict:
        return "it reports an error of a kind that is not known here"
    expected = {name for _, name, _, _ in Formatter().parse(ERROR_MESSAGES[kind]) if name}
    sound = [type(number) in (int, float) and abs(number) < 1e15 for number in numbers.values()]
    if set(numbers) != expected or not all(sound) or not all(map(isfinite, numbers.values())):
        return "it reports an error whose numbers do not fit"
    return ERROR_MESSAGES[kind].format(**numbers)


PLAIN_NAME = re.compile(r"\w[\w.+-]{0,63}")  # an encoder's name that is no path and no address
ALLOWED_DTYPES = {torch.float32, torch.float64, torch.int64, torch.int32, torch.int8}


def training_key(spec: Mapping[str, Any]) -> str:
    """One training of one experiment, whoever asks for it: its file names at a site."""
    return sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:24]


def encoder_fingerprint(encoder: str) -> str:
    """What counts of an encoder: machines may know the same one by different names."""
    return encoder.rpartition("@")[2]


def public_encoder_name(encoder: str) -> str:
    """An encoder as the server may know it: its fingerprint, and its name if that is a mere word;
    a path or an address may tell of folders, hosts or passwords."""
    name, _, fingerprint = encoder.rpartition("@")
    return encoder if PLAIN_NAME.fullmatch(name) else fingerprint


def check_arrays(message: Message, limit: float = MAX_NUMBER) -> None:
    """Types that our methods have, and numbers that can be added up."""
    for key, value in to_tensors(message.arrays).items():
        if value.dtype not in ALLOWED_DTYPES:
            raise FederationError(f"{key[:80]!r} is of a type that no method uploads")
        if value.numel() and not value.abs().max() <= limit:  # also where it is NaN
            raise FederationError(f"{key[:80]!r} holds numbers that are not finite, or huge")


def normalise_class_name(name: str) -> str:
    """A class name as data sets have it."""
    return to_nfc(name).replace("_", " ")


def training_spec(settings: Settings, training: Training, seed: int) -> dict[str, Any]:
    """A training as its sites are told of it."""
    return {
        "identity": json.loads(json.dumps(settings.identity())),
        "classes": [normalise_class_name(str(class_name)) for class_name in settings.source.get("classes", [])],
        "seed": seed,
        "training": training.name,
    }
