"""Define requests, replies and reported errors between server and sites, and check them before anybody uses them.

A site's own words for an error may hold names of its files, classes or people. So the server gets a code of
`ERROR_MESSAGES` with its numbers, and renders the sentence itself; the rest stays in the site's log.
"""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from math import isfinite
from string import Formatter
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from fedvlm.data.splits import SPLITS
from fedvlm.data.table import to_nfc
from fedvlm.engines.flower.client import LostLocalError, to_tensors
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import DataError, EncoderError, FederationError, SettingsError
from fedvlm.evaluate import findings
from fedvlm.evaluate.metrics import METRICS
from fedvlm.evaluate.protocols import Training
from fedvlm.runner.settings import MAX_STATEMENT_CHARS, Settings

PROTOCOL = 1  # raised when a change of the messages makes two versions of fedvlm unable to talk
MAX_COUNT = 10**9  # rounds, samples, classes, dimensions
MAX_NUMBER = 1e15  # no valid number is larger; sums of such numbers stay finite
MAX_DESCRIBED = 10_000  # numbers of a site's description: a count for each class
MAX_CLASSIFIERS = 16  # that one evaluation measures
SCORE_COUNTS = tuple(f"{split}_{count}" for split in SPLITS[1:] for count in ("rows", "hits"))
OPTIONAL_SCORES = tuple(dict.fromkeys(("loss", *METRICS[1:], *findings.METRICS)))


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("control characters are not allowed")
    return text


def _check_scores(scores: dict[str, int | float]) -> dict[str, int | float]:
    if not set(SCORE_COUNTS) <= scores.keys() <= {*SCORE_COUNTS, *OPTIONAL_SCORES}:
        raise ValueError("counts are missing, or scores are unknown")
    if not all(type(scores[name]) is int and scores[name] >= 0 for name in SCORE_COUNTS):
        raise ValueError("counts must be integers of at least 0")
    if any(scores[f"{split}_hits"] > scores[f"{split}_rows"] for split in SPLITS[1:]):
        raise ValueError("more samples are correct than there are")
    return scores


Text = Annotated[str, StringConstraints(max_length=200), AfterValidator(_check_printable)]
Statement = Annotated[str, StringConstraints(max_length=MAX_STATEMENT_CHARS), AfterValidator(_check_printable)]
Texts = Annotated[list[Text], Field(max_length=100_000)]
# What a site sends of these enters the record, so a sentence is no such name.
EncoderName = Annotated[str, StringConstraints(pattern=r"^(\w[\w.+-]{0,63}@)?[\w.+-]{1,80}$")]
TensorNames = Annotated[list[Annotated[str, StringConstraints(pattern=r"^[\w./ -]{1,40}$")]], Field(max_length=10_000)]
DescribedName = Annotated[str, StringConstraints(pattern=r"^[\w ]{1,40}$")]
Key = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{1,64}$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Scores = Annotated[dict[str, Count | Number], AfterValidator(_check_scores)]


class Fields(BaseModel):
    """Accept exactly the declared fields with their exact types; nothing is converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Header(Fields):
    """Hold what every request and reply carries; a reply repeats the first four fields of its request."""

    kind: Literal["open", "round", "adapt", "plan", "counts", "sum", "end", "join", "describe", "evaluate"]
    training: Key
    round: Count
    nonce: Annotated[Text, StringConstraints(max_length=64)]
    checksum: Text = ""
    signature: Text = ""


class TuningSize(Fields):
    """Hold how large a tuning search will be, its final run included."""

    key: Key
    trainings: PositiveCount
    rounds: PositiveCount


class RunPlan(Fields):
    """Hold the whole run that a training is part of; a person at a site consents to it."""

    identity: dict[str, Any]  # its settings before tuning
    purpose: Statement
    contact: Statement
    trainings: PositiveCount  # a site opens, those of a tuning search included
    rounds: Count  # a site answers


class TrainingSpec(Fields):
    """Hold one training of an experiment: its settings, classes, seed and name."""

    identity: dict[str, Any]
    classes: Texts
    seed: Count
    training: Text
    run: RunPlan
    tuning: TuningSize | None = None


class OpenRequest(Header):
    spec: TrainingSpec
    opening: Text = ""  # the same for a run and when it is resumed, another for each new run
    software: Text = ""  # version of the server's fedvlm
    protocol: Count = PROTOCOL


class TestedClassifier(Fields):
    """Describe a classifier whose tensors travel as arrays, by their hash."""

    name: Text
    tensors: Key
    method: dict[str, Any]
    encoder: Text = ""  # name and fingerprint; empty: any, as for zero-shot
    client: Text = ""  # whose it is; empty: the shared one


class EvaluationSpec(Fields):
    """Hold what a person consents to; `run.identity` has the settings and the classifiers."""

    run: RunPlan
    classes: Texts


class EvaluationRequest(Header):
    """Ask a site to measure classifiers on its test samples, without training."""

    spec: EvaluationSpec
    proofs: Annotated[list[dict[str, Any]], Field(max_length=MAX_CLASSIFIERS)]  # of verified sums; {} where none is


class EvaluationReply(Header):
    """Hold the scores of each classifier, as far as the site's policy allows."""

    client: Text
    encoder: EncoderName
    units: Count  # patients, or else images, of the test samples; 0 if no scores are reported
    scores: Annotated[list[Scores], Field(max_length=MAX_CLASSIFIERS)]


class RoundRequest(Header):
    """Ask a site for a communication round, or for the adaptation after the last one."""

    client: Text
    trains: bool
    version: Count
    held: Annotated[list[Count], Field(max_length=8)]


class SumRequest(Header):
    """Ask a member of a verified sum for its next step; statements of all members come with it.

    The steps are to agree to a plan, to sum class counts, to sum uploads of a round, and to end. Later a site may join,
    and members may describe their data.
    """

    client: Text
    plan: Annotated[str, StringConstraints(max_length=4_000_000)] = ""  # canonical bytes, where a session begins
    statements: Annotated[list[dict[str, Any]], Field(max_length=1000)] = []  # of all members, to the step before


class SumReply(Header):
    """Hold a member's statement beside its masked upload, which travels as an array."""

    client: Text
    statement: dict[str, Any]
    scores: Scores | None = None  # only at the end
    described: Annotated[dict[Text, Number], Field(max_length=MAX_DESCRIBED)] = {}


class SampleCounts(Fields):
    train: Count
    validation: Count
    test: Count


class OpenReply(Header):
    """Hold what the server must know of a site to start a training."""

    client: Text
    opened: Key
    encoder: EncoderName
    classes: Texts
    dim: PositiveCount
    scale: Number
    local: TensorNames
    samples: SampleCounts
    template: Text = ""  # of methods that learn prompts
    multi_label: bool = False  # an image may have several findings
    protocol: Count = PROTOCOL
    data: Literal["first", "unchanged", "changed", "kept"] = "first"  # compared with the last run of this experiment
    removed_classes: Count = 0  # classes without samples now, which had some
    software: Text = ""  # version of fedvlm at the site


class RoundReply(Header):
    """Hold the scores of a round beside its upload, which travels as arrays."""

    client: Text
    version: Count
    uploads: bool
    releases: Count
    scores: Scores
    described: Annotated[dict[DescribedName, Number], Field(max_length=32)]


class PastUpload(Fields):
    training: Key
    round: Count


class Withdrawal(Fields):
    """Hold what a site that withdraws signs; its past uploads travel as arrays."""

    kind: Literal["withdrawal"]
    client: Text
    federation: Key
    uploads: Annotated[list[PastUpload], Field(max_length=100_000)]
    checksum: Text
    signature: Text


SUM_KINDS = ("plan", "counts", "sum", "end", "join", "describe")  # steps of a verified sum
ECHOED_FIELDS = ("kind", "training", "round", "nonce")
F = TypeVar("F", bound=Fields)


def parse(model: type[F], header: Any, sender: str) -> F:
    """Return the typed fields of a header; an error names a declared field, and never repeats a value."""
    try:
        return model.model_validate(header)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_context=False, include_url=False)[0]
    field = next(iter(problem["loc"]), "")
    if field not in model.model_fields:
        raise FederationError(f"{sender} has unknown fields; it comes from another version of fedvlm")
    if problem["type"] == "missing":
        raise FederationError(f"{sender} lacks the field {field!r}; it comes from another version of fedvlm")
    raise FederationError(f"the field {field!r} of {sender} is invalid")


def parse_request(header: Any) -> OpenRequest | RoundRequest | SumRequest | EvaluationRequest:
    kind = header.get("kind") if isinstance(header, dict) else None
    if kind == "open":
        if (theirs := header.get("protocol", PROTOCOL)) != PROTOCOL:
            raise ReportedError("protocol", ours=PROTOCOL, theirs=theirs if type(theirs) is int else -1)
        return parse(OpenRequest, header, "the request")
    if kind in SUM_KINDS:
        return parse(SumRequest, header, "the request")
    if kind == "evaluate":
        return parse(EvaluationRequest, header, "the request")
    return parse(RoundRequest, header, "the request")


def check_reply(reply: Message, request: Mapping[str, Any]) -> None:
    """Refuse a reply that no site can give to this request, whatever its method and data are."""
    if request["kind"] == "open":
        parse(OpenReply, reply.header, "the reply")
        return
    if request["kind"] == "evaluate":
        scores = parse(EvaluationReply, reply.header, "the reply").scores
        if reply.arrays or len(scores) != len(request["proofs"]):
            raise FederationError("the reply does not have one list of scores for each classifier")
        return
    if request["kind"] in SUM_KINDS:
        parse(SumReply, reply.header, "the reply")
        if (list(reply.arrays) == ["masked"]) != (request["kind"] in ("counts", "sum")):
            raise FederationError("the reply has an upload that was not requested, or lacks one")
        return
    fields = parse(RoundReply, reply.header, "the reply")
    uploads = request["kind"] == "round" and request["trains"]
    if fields.uploads != uploads or (reply.arrays and not uploads):
        raise FederationError("the reply has an upload that was not requested, or lacks one")
    expected = request["round"] + 1 if request["trains"] else request["version"]
    if fields.version != expected:
        raise FederationError(f"the version of its local tensors must be {expected}, got {fields.version}")


POLICY_REFUSALS = {
    "method": "the method is not allowed here",
    "clip": "channel.clip must be above 0 and at most {most:g}",
    "noise": "channel.noise_multiplier must be at least {least:g}",
    "honest": "channel.honest must be at most {most:g}",
    "plain": "uploads leave this site in a verified sum only, or with the noise that its policy asks for; set "
    "channel.verified",
    "consent": "nobody at this site has consented to training",
    "consent refused": "a person at this site has refused",
    "consent ended": "the consent given at this site has ended",
    "consent limit": "the person at this site consented to {most} of these, and they are done",
    "purpose": "a person here has to consent, and the request names no purpose or no contact; set both in the "
    "experiment",
    "withdrawn": "this site has withdrawn from the federation",
    "class": "a class has fewer than {least} training samples, and the method uploads every class",
    "samples": "it has fewer than {least} training samples",
    "test only": "its data are for tests only (test_only in its site.toml), so nothing is trained there",
    "classifier": "people there have not approved this classifier, and no verified sum that their peers signed leads "
    "to it; an approver accepts the request by its plan: fedvlm deploy consent",
    "partition": "clients.shots and clients.ratios are chosen by the site, not by the server",
    "upload": "the reply has {bytes} bytes, but this site sends at most {most}; raise max_upload_bytes in its policy, "
    "or choose a method with smaller uploads or an encoder with fewer dimensions",
    "trainings": "all {most} trainings that this site allows have been opened",
    "rounds": "all {most} rounds that this site allows per training have been answered",
    "all rounds": "all {most} rounds that this site allows in total have been answered",
    "measurements": "all {most} measurements that this site allows per training have been answered",
    "epsilon": "the round would exceed the limit ε = {most:g}",
    "no noise": "ε is limited to {most:g} here, and the upload would have no noise",
    "tuning": "the tuning search exceeds its budget: with the final run it takes {trainings} trainings and {rounds} "
    "rounds, more than what is left of trainings, rounds or ε",
    "members": "the members of the verified sum are not those that people there have compared; see the site's log",
    "sum of": "a verified sum must have at least {least} members",
    "member change": "the members differ from those of an earlier sum over the same samples, which would show the "
    "upload of one; ask the site to raise member_changes, or add noise",
    "data change": "{count} samples of a class have changed since the last sum, too few to hide; it waits for "
    "{least}, or for noise",
    "server key": "its key was made on the server, so it is for rehearsals on one machine; enrol the site anew",
    "policy": "its policy is missing or cannot be read",
    "ledger": "its ledger was changed, so nobody knows what has left",
}
ERROR_MESSAGES = {code: f"refused by its policy: {text}" for code, text in POLICY_REFUSALS.items()} | {
    "request": "the request is invalid; the server runs another version of fedvlm",
    "protocol": "it speaks protocol {ours} of fedvlm and the server {theirs}; install the same fedvlm at both",
    "closed": "the training is not open here; the server must open it first",
    "version": "it does not have the local tensors that the server continues from; restore its folder `state`, or run "
    "the experiment again from the start",
    "test samples": "it has no test samples that none of its trainings has used",
    "findings": "its images have several findings each, which only `fedvlm data-report` describes, at the site",
    "texts": "its encoder or its class texts are not those of the classifier",
    "encoder": "this site began this training with another encoder than it has now",
    "classes": "it has images of {count} classes that are not in this experiment",
    "settings": "the settings do not fit this site; see the site's log",
    "data": "its data cannot be used; see the site's log",
    "access": "its encoder does not respond as it should; see the site's log",
    "sum": "it refuses to go on with the verified sum, because something does not fit; see the site's log",
    "session": "the session of the verified sum has ended there, or its key is gone; run the experiment again",
    "federation": "the training failed there; see the site's log",
    "failure": "an internal error; see the site's log",
}
CODE_BY_EXCEPTION = {
    SettingsError: "settings",
    DataError: "data",
    EncoderError: "access",
    LostLocalError: "version",
    FederationError: "federation",
}


class ReportedError(FederationError):
    """An error whose code and numbers the server gets; the detail stays at the site."""

    def __init__(self, code: str, detail: str = "", **numbers: float) -> None:
        self.code, self.numbers = code, numbers
        super().__init__(detail or ERROR_MESSAGES[code].format(**numbers))


class RequestRefused(ReportedError):
    """A request that a site's policy does not allow."""


def encode_error(error: Exception) -> dict[str, Any]:
    """Return what the server may know of an error."""
    if isinstance(error, ReportedError):
        return {"code": error.code, "numbers": error.numbers}
    codes = [code for error_type, code in CODE_BY_EXCEPTION.items() if isinstance(error, error_type)]
    return {"code": codes[0] if codes else "failure", "numbers": {}}


def render_error(payload: Any) -> str:
    """Return the server's own sentence; a site cannot put words of its own into the record."""
    code, numbers = (payload.get(name) if type(payload) is dict else None for name in ("code", "numbers"))
    if type(code) is not str or code not in ERROR_MESSAGES or type(numbers) is not dict:
        return "it reports an error of an unknown code"
    expected = {name for _, name, _, _ in Formatter().parse(ERROR_MESSAGES[code]) if name}
    is_valid = [type(number) in (int, float) and abs(number) < MAX_NUMBER for number in numbers.values()]
    if set(numbers) != expected or not all(is_valid) or not all(map(isfinite, numbers.values())):
        return "it reports an error with invalid numbers"
    return ERROR_MESSAGES[code].format(**numbers)


PLAIN_NAME = re.compile(r"\w[\w.+-]{0,63}")  # an encoder's name that is neither a path nor an address
ALLOWED_DTYPES = {torch.float32, torch.float64, torch.int64, torch.int32, torch.int8}


def training_spec(settings: Settings, training: Training, seed: int) -> dict[str, Any]:
    """Return a training as its sites are told of it."""
    return {
        "identity": json.loads(json.dumps(settings.identity())),
        "classes": [normalise_class_name(str(name)) for name in settings.source.get("classes", [])],
        "seed": seed,
        "training": training.name,
    }


def training_key(spec: Mapping[str, Any]) -> str:
    """Identify one training of one experiment, whatever run it is part of; sites name their files by it."""
    own = {key: value for key, value in spec.items() if key != "run"}
    return sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:24]


def normalise_class_name(name: str) -> str:
    return to_nfc(name).replace("_", " ")


def encoder_fingerprint(encoder: str) -> str:
    """Return what identifies an encoder; machines may know the same one by different names."""
    return encoder.rpartition("@")[2]


def public_encoder_name(encoder: str) -> str:
    """Return the name and fingerprint for the server; a path or address may reveal folders, hosts or passwords."""
    name, _, fingerprint = encoder.rpartition("@")
    return encoder if PLAIN_NAME.fullmatch(name) else fingerprint


def check_arrays(message: Message, limit: float = MAX_NUMBER) -> None:
    """Refuse types that no method uploads, and numbers that cannot be summed."""
    for key, value in to_tensors(message.arrays).items():
        if value.dtype not in ALLOWED_DTYPES:
            raise FederationError(f"{key[:80]!r} has a type that no method uploads")
        if value.numel() and not value.abs().max() <= limit:  # also where it is NaN
            raise FederationError(f"{key[:80]!r} holds numbers that are not finite, or huge")
