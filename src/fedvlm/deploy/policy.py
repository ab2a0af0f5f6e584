"""What a site allows, in a file the site owns; it is enforced there, whatever the server asks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedvlm.core import Method, Telling, setting
from fedvlm.core.schema import AMOUNT, INSIDE, read_table, within
from fedvlm.data.clients import Clients
from fedvlm.deploy.consent import check_consent
from fedvlm.deploy.reasons import Refused
from fedvlm.errors import FedVLMError
from fedvlm.evaluate.metrics import METRICS
from fedvlm.runner.settings import read_toml

NAME = "policy.toml"
ANY = "*"
USUAL = ("auto", "faa-clip", "fedavg", "fedot", "fedotp", "fedprox", "promptfl", "tofa")
STEPS = 20  # coarse scores are multiples of 1/20


class Protection(Protocol):
    """What a policy asks of a channel: how it clips, how much noise it adds, what it hides."""

    @property
    def clip(self) -> float: ...
    @property
    def noise_multiplier(self) -> float: ...
    @property
    def secure(self) -> bool: ...


@dataclass(frozen=True)
class Policy:
    methods: tuple[str, ...] = ()  # the methods that may run here; none unless they are named
    # statistics of a class of fewer training rows stay here
    min_class_samples: int = within(16, AMOUNT)
    min_samples: int = within(16, AMOUNT)  # with fewer training rows nothing is trained
    # training rows that are used at most, drawn by the site; 0: all
    max_samples: int = within(0, AMOUNT)
    server_divides: bool = False  # the server may say shots, ratios and the seed of the division
    max_upload_bytes: int = within(50_000_000, AMOUNT)  # bytes of one message to the server; 0: any
    # the channel must clip to this norm or a smaller one; 0: it need not clip
    clip: float = within(0.0, AMOUNT)
    noise_multiplier: float = within(
        0.0, AMOUNT
    )  # the channel's noise multiplier must be this or more
    epsilon: float = within(0.0, AMOUNT)  # ε of all that leaves, in total; 0: not limited
    delta: float = within(1e-5, INSIDE)  # δ at which ε is counted
    secure: bool = False  # uploads leave in a secure sum only
    scores: Literal["exact", "coarse", "none"] = "exact"  # of the site's own rows, to the server
    trainings: int = within(100, AMOUNT)  # that may be opened, in total
    rounds: int = within(500, AMOUNT)  # that are answered, per training
    all_rounds: int = within(10_000, AMOUNT)  # likewise in total
    measures: int = within(600, AMOUNT)  # answers of scores alone, per training
    consent: bool = False  # no round starts without a person's consent (`fedvlm deploy consent`)

    def admit(
        self, folder: str | Path, method: Method, channel: Protection, labels: NDArray[np.int64]
    ) -> None:
        """Refuses a round before anything is computed. `labels` are those of the training rows."""
        if not {ANY, method.name} & set(self.methods):
            raise Refused(
                "method",
                f"the method {method.name} is not allowed here, only "
                f"{', '.join(self.methods) or 'none'}; see methods in {NAME}",
            )
        if self.clip and not 0 < channel.clip <= self.clip:
            raise Refused(
                "clip",
                f"channel.clip = {channel.clip:g}, but this site wants its change clipped to "
                f"{self.clip:g} or less",
                most=self.clip,
            )
        if channel.noise_multiplier < self.noise_multiplier:
            raise Refused(
                "noise",
                f"channel.noise_multiplier = {channel.noise_multiplier:g}, but this site wants "
                f"{self.noise_multiplier:g} or more",
                least=self.noise_multiplier,
            )
        if self.secure and not channel.secure:
            raise Refused("secure")
        if len(labels) < self.min_samples:
            raise Refused("rows", least=self.min_samples)
        cannot = isinstance(method, Telling) and setting(method, "min_class_samples") is None
        if cannot and len(self.small(labels)):
            raise Refused("class", least=self.min_class_samples)
        if self.consent:
            check_consent(Path(folder), method.name)

    def small(self, labels: NDArray[np.int64]) -> list[int]:
        """The classes whose statistics stay here."""
        counts = np.bincount(labels, minlength=1)
        few: list[int] = np.flatnonzero((counts > 0) & (counts < self.min_class_samples)).tolist()
        return few

    def floored(self, method: Method) -> Method:
        """The method, made to leave out classes of few rows, whatever the experiment says."""
        least = setting(method, "min_class_samples")
        if least is None or least >= self.min_class_samples:
            return method
        made: Method = replace(method, min_class_samples=self.min_class_samples)
        return made

    def divide(self, clients: Clients) -> None:
        """Refuses a division that singles rows out: two that differ by a row tell it."""
        own = replace(
            Clients(), partition=clients.partition, count=clients.count, domains=clients.domains
        )
        own = replace(own, alpha=clients.alpha, min_samples=clients.min_samples)
        if not self.server_divides and clients != own:
            raise Refused("division")

    @property
    def how(self) -> str:
        """Scores are told so; beside noise, exact ones would undo it."""
        return (
            "none"
            if self.scores == "exact" and (self.noise_multiplier or self.epsilon)
            else self.scores
        )

    def allowed_scores(self, scores: Mapping[str, Any]) -> dict[str, Any]:
        """The scores that may leave."""
        counts = {
            f"{part}_{what}": int(scores[f"{part}_{what}"])
            for part in ("validation", "test")
            for what in ("rows", "hits")
        }
        if self.how == "none":
            return dict.fromkeys(counts, 0)
        rest = {key: scores[key] for key in ("loss", *METRICS[1:]) if key in scores}
        if self.how == "exact":
            return {**counts, **rest}
        for part in ("validation", "test"):
            rows = counts[f"{part}_rows"]
            share = round(STEPS * counts[f"{part}_hits"] / max(rows, 1)) / STEPS
            counts[f"{part}_hits"] = round(share * rows)
        return {**counts, **{key: round(one * STEPS) / STEPS for key, one in rest.items()}}

    def release(self, size: int) -> None:
        """Refuses to let a message of this many bytes leave."""
        if self.max_upload_bytes and size > self.max_upload_bytes:
            raise Refused("upload", bytes=size, most=self.max_upload_bytes)


def read_policy(folder: str | Path) -> Policy:
    """The policy of a site's folder; without the file nothing is allowed."""
    path = Path(folder) / NAME
    return read_table(Policy, str(path), read_toml(path), ": ")


def policy_now(folder: str | Path) -> Policy:
    """The policy for one message; one that cannot be read refuses it."""
    try:
        return read_policy(folder)
    except (FedVLMError, OSError) as error:
        raise Refused("policy", str(error)) from error
