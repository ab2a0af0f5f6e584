"""Why a site does not answer: kinds with numbers, which travel, and details, which do not.

A site's words for an error may hold names of its files, classes or people. So the server gets a
kind of this list and its numbers, and makes the sentence itself; the rest is in the site's log.
"""

from math import isfinite
from string import Formatter
from typing import Any

from fedvlm.engines.flower.client import LostLocalError
from fedvlm.errors import DataError, EncoderError, FederationError, SettingsError

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
