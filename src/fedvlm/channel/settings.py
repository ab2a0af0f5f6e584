"""The settings of the channel between clients and the aggregate; everything is off by default."""

from dataclasses import dataclass, replace
from typing import Literal

from fedvlm.core import UPLOAD_SUM_MEANINGS, Method, setting, upload_sum
from fedvlm.core.schema import COUNT, NON_NEGATIVE, OPEN_FRACTION, ranged_field, read_fields
from fedvlm.errors import FederationError, SettingsError
from fedvlm.maths.privacy import find_noise_multiplier


class ChannelError(FederationError):
    """An upload that the channel refuses; the caller adds client and round."""


@dataclass(frozen=True)
class Channel:
    clip: float = ranged_field(0.0, NON_NEGATIVE)  # largest norm of a client's change; 0: any
    # standard deviation of the noise each client adds, as a multiple of clip
    noise_multiplier: float = ranged_field(0.0, NON_NEGATIVE)
    epsilon: float = ranged_field(0.0, NON_NEGATIVE)  # ε of all uploads, for which the noise is found; 0: as set
    delta: float = ranged_field(1e-5, OPEN_FRACTION)  # δ at which ε is counted
    # members of a verified sum that a client trusts to add noise, itself included: each adds 1/√honest of it
    honest: int = ranged_field(1, COUNT)
    quantise: bool = False  # 8 bits per value; rounding errors are added to the next upload
    verified: bool = False  # members add up masked uploads and check the sum; nobody sees an upload
    # the server refuses a change of a larger norm; 0: any; "median": shorten it to twice the round's median
    bound: float | Literal["median"] = ranged_field(0.0, NON_NEGATIVE)
    aggregation: Literal["mean", "median", "trimmed", "krum", "geometric-median"] = "mean"  # robust means
    max_samples: int = ranged_field(10_000_000, COUNT)  # the server refuses a client that reports more training samples

    def __post_init__(self) -> None:
        read_fields("channel", self)
        if self.noise_multiplier and not self.clip:
            raise SettingsError(
                f"channel.noise_multiplier = {self.noise_multiplier} is a multiple of the clip, "
                "which is off; set channel.clip too"
            )
        if self.honest > 1 and not self.verified:
            raise SettingsError(
                f"channel.honest = {self.honest} is for noise inside a verified sum; set channel.verified = true, or "
                "leave it out"
            )
        if self.quantise and self.verified:
            raise SettingsError(
                "channel.quantise and channel.verified do not go together: a masked number takes 8 "
                "bytes whatever it was before; choose one"
            )

    @property
    def is_off(self) -> bool:
        """Tell whether uploads travel unchanged; they are validated in any case."""
        return not (self.clip or self.quantise or self.verified)

    @property
    def max_norm(self) -> float:
        """Return the norm above which a change is refused."""
        return float("inf") if self.bound == "median" else self.bound or float("inf")

    @property
    def compares_uploads(self) -> bool:
        """Tell whether the server compares uploads before they are aggregated."""
        return self.bound == "median" or self.aggregation != "mean"


def with_deployment_bound(channel: Channel, method: Method) -> Channel:
    """Bound changes by their median between machines, unless a bound is set or no upload is visible."""
    if channel.bound or channel.verified or upload_sum(method) is None:
        return channel
    return replace(channel, bound="median")


def has_sample_noise(method: Method) -> bool:
    """Tell whether a method's uploads are sums over samples to which it adds noise."""
    return upload_sum(method) == "total" and setting(method, "noise_multiplier") is not None


def with_found_noise(channel: Channel, method: Method) -> tuple[Channel, Method]:
    """Return channel and method with the noise that `epsilon` asks for: of samples, or of clients by clipping."""
    if channel.honest > 1 and not has_sample_noise(method):
        raise SettingsError(
            f"channel.honest = {channel.honest} shares noise on sums over samples, and {method.name} has none; choose "
            "tofa, or set channel.honest = 1"
        )
    if not channel.epsilon:
        return channel, method
    found = find_noise_multiplier(channel.epsilon, max(method.rounds, 1), channel.delta)
    if has_sample_noise(method):
        noisy: Method = replace(method, noise_multiplier=found, delta=channel.delta)
        return channel, noisy
    if channel.clip:
        return replace(channel, noise_multiplier=found), method
    raise SettingsError(
        f"channel.epsilon = {channel.epsilon:g} finds no noise for {method.name}: its uploads are no sums over "
        "samples; choose tofa, or set channel.clip for noise that protects all samples of a client together"
    )


def check_channel(channel: Channel, method: Method) -> None:
    """Refuse, before any work, a channel that a method cannot use."""
    conflict = "bound = 'median'" if channel.bound == "median" else ""
    conflict = f"aggregation = '{channel.aggregation}'" if channel.aggregation != "mean" else conflict
    if conflict and channel.verified:
        raise SettingsError(
            f"channel.{conflict} compares uploads, and with channel.verified nobody sees one, only "
            "their sum; set channel.clip, which bounds every change at its site, or verified = false"
        )
    if conflict and upload_sum(method) is None:
        raise SettingsError(
            f"channel.{conflict} is for uploads that are averaged or added up, but {method.name} "
            "aggregates single ones in its own way; leave it out, or choose another method"
        )
    if channel.verified and upload_sum(method) is None:
        raise SettingsError(
            f"channel.verified releases a sum, but {method.name} aggregates single uploads "
            "(or does not declare that a sum is enough); set channel.verified = false, or add "
            "`privacy=PrivacyTraits(upload_sum=...)` to its traits, with one of "
            f"{', '.join(f'{key!r} ({meaning})' for key, meaning in UPLOAD_SUM_MEANINGS.items())}"
        )
