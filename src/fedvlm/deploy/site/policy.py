"""Hold what a site allows in a file that the site owns; enforced whatever the server asks."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from json import dumps
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedvlm.channel import Channel
from fedvlm.core import ClassStatistics, Method, setting
from fedvlm.core.schema import COUNT, NON_NEGATIVE, OPEN_FRACTION, Range, ranged_field, read_table
from fedvlm.data.clients import Clients
from fedvlm.deploy.messages import OPTIONAL_SCORES, SCORE_COUNTS, RequestRefused
from fedvlm.errors import FedVLMError
from fedvlm.runner.experiment_files import read_toml
from fedvlm.storage.files import read_json

WITHDRAWN_FILE = "withdrawn.json"  # in a site's folder: who withdrew, when, and with which key
POLICY_FILE = "policy.toml"
ALL_METHODS = "*"
DEFAULT_METHODS = ("auto", "faa-clip", "fedavg", "fedot", "fedotp", "fedprox", "promptfl", "ridge", "tofa")
SCORE_STEPS = 20  # coarse scores are multiples of 1/20


@dataclass(frozen=True)
class Policy:
    """Hold the rules of a site's policy.toml; `RULE_TEXTS` says what each means."""

    methods: tuple[str, ...] = ()  # the methods that may run here; none unless they are named
    min_class_samples: int = ranged_field(16, NON_NEGATIVE)
    min_samples: int = ranged_field(16, NON_NEGATIVE)  # with fewer training rows nothing is trained
    max_samples: int = ranged_field(0, NON_NEGATIVE)
    server_divides: bool = False  # the server may choose shots, ratios and the seed of the partition
    max_upload_bytes: int = ranged_field(50_000_000, NON_NEGATIVE)  # maximum bytes of one message to the server; 0: any
    clip: float = ranged_field(0.0, NON_NEGATIVE)
    noise_multiplier: float = ranged_field(0.0, NON_NEGATIVE)  # the channel's noise multiplier must be at least this
    epsilon: float = ranged_field(0.0, NON_NEGATIVE)  # total ε of all uploads; 0: not limited
    delta: float = ranged_field(1e-5, OPEN_FRACTION)  # δ at which ε is counted
    honest: int = ranged_field(1, COUNT)  # members trusted to add their noise to a sum, this site included
    plain: bool = False  # uploads may leave one by one and without noise, not only in a verified sum
    sum_of: int = ranged_field(3, Range(3))  # members that a verified sum must have, this site included
    member_changes: int = ranged_field(0, NON_NEGATIVE)  # other sets of members, in sums over the same samples
    scores: Literal["exact", "coarse", "none"] = "exact"  # of the site's own rows, to the server
    trainings: int = ranged_field(100, NON_NEGATIVE)  # that may be opened, in total
    rounds: int = ranged_field(500, NON_NEGATIVE)  # that are answered, per training
    all_rounds: int = ranged_field(10_000, NON_NEGATIVE)  # likewise in total
    measures: int = ranged_field(600, NON_NEGATIVE)  # maximum of replies with scores alone, per training
    consent: bool = False  # no round starts without a person's consent (`fedvlm deploy consent`)
    approvers: int = ranged_field(1, COUNT)  # who have to consent to the same plan

    def admit(
        self,
        method: Method,
        channel: Channel,
        labels: NDArray[np.int64],
        groups: NDArray[np.int64] | None = None,
    ) -> None:
        """Refuse a round before anything is computed.

        `labels` (samples,) or (samples, findings) are those of the training samples, and `groups` number their
        patients, each of whom counts once.
        """
        if not {ALL_METHODS, method.name} & set(self.methods):
            allowed = ", ".join(self.methods) or "none"
            detail = f"the method {method.name} is not allowed here, only {allowed}; see methods in {POLICY_FILE}"
            raise RequestRefused("method", detail)
        if self.clip and not 0 < channel.clip <= self.clip:
            detail = f"channel.clip must be above 0 and at most {self.clip:g}, got {channel.clip:g}"
            raise RequestRefused("clip", detail, most=self.clip)
        if channel.noise_multiplier < self.noise_multiplier:
            least, noise = self.noise_multiplier, channel.noise_multiplier
            detail = f"channel.noise_multiplier must be at least {least:g}, got {noise:g}"
            raise RequestRefused("noise", detail, least=least)
        if channel.honest > self.honest:
            raise RequestRefused("honest", most=self.honest)
        if not (self.plain or channel.verified or self.noise_multiplier or self.epsilon):
            raise RequestRefused("plain")
        if len(labels if groups is None else np.unique(groups)) < self.min_samples:
            raise RequestRefused("samples", least=self.min_samples)
        cannot = isinstance(method, ClassStatistics) and setting(method, "min_class_samples") is None
        if cannot and self.small_classes(labels, groups):
            raise RequestRefused("class", least=self.min_class_samples)

    def small_classes(self, labels: NDArray[np.int64], groups: NDArray[np.int64] | None = None) -> list[int]:
        """Return the classes whose statistics stay here, or findings that too few images have or lack."""
        columns = [labels == label for label in range(labels.max(initial=-1) + 1)]
        if labels.ndim == 2:
            columns = [np.stack([finding == 1, finding == 0], axis=1) for finding in labels.T]
        units = np.arange(len(labels)) if groups is None else groups
        counts = [[len(np.unique(units[has])) for has in column.reshape(len(labels), -1).T] for column in columns]
        return [i for i, of in enumerate(counts) if any(0 < count < self.min_class_samples for count in of)]

    def with_min_class_samples(self, method: Method) -> Method:
        """Return the method with this site's minimum of samples per class, whatever the experiment says."""
        current_minimum = setting(method, "min_class_samples")
        is_noise_shared = self.honest > 1 and setting(method, "noise_multiplier")  # it protects samples of any class
        if current_minimum is None or current_minimum >= self.min_class_samples or is_noise_shared:
            return method
        made: Method = replace(method, min_class_samples=self.min_class_samples)
        return made

    def check_partition(self, clients: Clients) -> None:
        """Refuse a partition that singles samples out: two trainings that differ by one sample reveal it."""
        allowed = replace(Clients(), partition=clients.partition, count=clients.count, domains=clients.domains)
        allowed = replace(allowed, alpha=clients.alpha, min_samples=clients.min_samples)
        if not self.server_divides and clients != allowed:
            raise RequestRefused("partition")

    @property
    def score_detail(self) -> str:
        """Return how exact scores may be; beside noise, exact scores would undo it."""
        return "none" if self.scores == "exact" and (self.noise_multiplier or self.epsilon) else self.scores

    def allowed_scores(self, scores: Mapping[str, Any]) -> dict[str, Any]:
        counts = {name: int(scores[name]) for name in SCORE_COUNTS}
        if self.score_detail == "none":
            return dict.fromkeys(counts, 0)
        rest = {key: scores[key] for key in OPTIONAL_SCORES if key in scores}
        if self.score_detail == "exact":
            return {**counts, **rest}
        for part in ("validation", "test"):
            rows = counts[f"{part}_rows"]
            accuracy = round(SCORE_STEPS * counts[f"{part}_hits"] / max(rows, 1)) / SCORE_STEPS
            counts[f"{part}_hits"] = round(accuracy * rows)
        return {**counts, **{key: round(score * SCORE_STEPS) / SCORE_STEPS for key, score in rest.items()}}

    def check_upload_size(self, size: int) -> None:
        if self.max_upload_bytes and size > self.max_upload_bytes:
            raise RequestRefused("upload", bytes=size, most=self.max_upload_bytes)


def read_policy(folder: str | Path) -> Policy:
    """Read the policy of a site's folder; without the file nothing is allowed."""
    path = Path(folder) / POLICY_FILE
    return read_table(Policy, str(path), read_toml(path), ": ")


def current_policy(folder: str | Path) -> Policy:
    """Read the policy for one message; refuse the message if the policy cannot be read."""
    try:
        return read_policy(folder)
    except (FedVLMError, OSError) as error:
        raise RequestRefused("policy", str(error)) from error


PLAIN_RISK = "from single uploads without noise a server that deviates can recover most of a site's training embeddings"

# By rule: what it is, and what it is good for. Written into policy.toml and told by the command.
RULE_TEXTS = {
    "methods": (
        "methods that may run here",
        'each method uploads something else; list those you know. ["*"] allows all',
    ),
    "min_class_samples": (
        "statistics of a class with fewer training samples stay here",
        "the mean of few images is nearly the images themselves",
    ),
    "min_samples": (
        "with fewer training samples (patients, where the data name them) nothing is trained",
        "a model of a handful of samples reveals them",
    ),
    "max_samples": ("maximum of training samples that are used, drawn here; 0: all", "what is not used cannot leave"),
    "server_divides": (
        "the server may choose shots, ratios and the seed of the partition",
        "two trainings that differ by one sample reveal it",
    ),
    "max_upload_bytes": (
        "maximum bytes of one message to the server; 0: any",
        "a large message can hold the data; heads, prompts and statistics are small",
    ),
    "clip": (
        "the channel must clip to this norm or less; 0: it need not",
        "clipping bounds one site's change, so that noise can hide it",
    ),
    "noise_multiplier": (
        "the channel's noise multiplier must be at least this",
        "with noise nobody can be sure whether a sample was used",
    ),
    "epsilon": (
        "total ε of all uploads; 0: not limited",
        "repeated requests use the noise up; above the limit no upload leaves",
    ),
    "delta": ("δ at which ε is counted", "the probability that the bound ε does not hold"),
    "honest": (
        "members trusted to add their noise to a verified sum, this site included",
        "each then adds less noise; if one of them does not, ε is larger than counted",
    ),
    "plain": ("uploads may leave one by one without noise, and not only in a verified sum", PLAIN_RISK),
    "sum_of": (
        "members that a verified sum must have, this site included",
        "a sum of two shows each of them the upload of the other",
    ),
    "member_changes": (
        "how often the members of sums over the same samples may change",
        "two sums that differ by one member show the upload of that member",
    ),
    "scores": (
        'how exactly scores are reported: "exact", "coarse" or "none"',
        "exact losses of heads that a server makes up reveal samples; with noise they are not reported",
    ),
    "trainings": ("maximum of trainings, in total", "each reveals a little more"),
    "rounds": ("maximum of rounds, per training", "each reveals a little more"),
    "all_rounds": ("maximum of rounds, in total", "each reveals a little more"),
    "measures": (
        "maximum of replies with scores alone, per training",
        "a server could request the loss of any head, as often as it likes",
    ),
    "consent": (
        "no round starts without a person's consent (fedvlm deploy consent)",
        "somebody at the site knows of each run, and has agreed to exactly this one",
    ),
    "approvers": ("how many approvers have to consent to the same plan", "four eyes see more than two"),
}


def example_policy(methods: tuple[str, ...] = DEFAULT_METHODS, plain: bool = False) -> str:
    """Return the policy that `fedvlm deploy init` writes."""
    lines = ["# What this site allows; the server cannot change it. `fedvlm deploy policy` explains."]
    for rule in fields(Policy):
        value = {"methods": list(methods), "plain": plain}.get(rule.name, rule.default)
        lines.append(f"{rule.name} = {dumps(value)}  # {RULE_TEXTS[rule.name][0]}")
    return "\n".join(lines) + "\n"


def explain_policy(policy: Policy) -> list[str]:
    """Explain each rule in a line or two."""
    out = []
    for name, (meaning, benefit) in RULE_TEXTS.items():
        value = getattr(policy, name)
        if name == "methods":
            value = "all" if ALL_METHODS in value else ", ".join(value) or "none: nothing is answered"
        usual = "" if name == "methods" or value == getattr(Policy(), name) else " (not the usual)"
        value = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        out.append(f"{name} = {value}{usual}: {meaning}.\n    Why: {benefit}.")
    detail = policy.score_detail
    return [*out, "No scores of this site are reported." if detail == "none" else f"Scores are reported: {detail}."]


def check_not_withdrawn(folder: Path, key: bytes) -> None:
    """Refuse everything once this site has withdrawn, until it has another key."""
    if not (folder / WITHDRAWN_FILE).exists():
        return
    try:
        record: Any = read_json(folder / WITHDRAWN_FILE)
        same = record["key"] == key.decode()
    except (FedVLMError, KeyError, TypeError):  # somebody has written it, whatever it says now
        same = True
    if same:
        raise RequestRefused("withdrawn")
