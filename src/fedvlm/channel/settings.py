"""What happens to an upload between a client and the aggregate; all of it is off by default."""

from dataclasses import dataclass, replace
from typing import Literal

from fedvlm.core import SUMS, Method, sums
from fedvlm.core.schema import AMOUNT, COUNT, INSIDE, read_fields, within
from fedvlm.errors import FederationError, SettingsError


class ChannelError(FederationError):
    """An upload the channel does not take; who knows the client and the round adds them."""


@dataclass(frozen=True)
class Channel:
    clip: float = within(0.0, AMOUNT)  # largest norm of a client's change; 0: any
    noise_multiplier: float = within(
        0.0, AMOUNT
    )  # deviation of the noise each client adds, as a multiple of clip
    delta: float = within(1e-5, INSIDE)  # δ at which ε is counted
    quantise: bool = False  # 8 bits for each number; what rounding leaves over goes up next time
    secure: bool = False  # the server sees the sum of the uploads and no upload
    # The server refuses a change of a larger norm (0: any that clip allows), or with "median"
    # shortens it to twice the median of the round's.
    bound: float | Literal["median"] = within(0.0, AMOUNT)
    aggregation: Literal["mean", "median", "trimmed", "krum", "geometric-median"] = "mean"
    max_samples: int = within(
        10_000_000, COUNT
    )  # the server refuses a client that says it has more training rows

    def __post_init__(self) -> None:
        read_fields("channel", self)
        if self.noise_multiplier and not self.clip:
            raise SettingsError(
                f"channel.noise_multiplier = {self.noise_multiplier} is a multiple of the clip, "
                "which is off; set channel.clip too"
            )
        if self.quantise and self.secure:
            raise SettingsError(
                "channel.quantise and channel.secure do not go together: a masked number takes 8 "
                "bytes whatever it was before; choose one"
            )

    @property
    def off(self) -> bool:
        """Whether uploads travel as they are; they are checked all the same."""
        return not (self.clip or self.quantise or self.secure)

    @property
    def most(self) -> float:
        """The norm above which a change is refused."""
        return float("inf") if self.bound == "median" else self.bound or float("inf")

    @property
    def compares(self) -> bool:
        """Whether the server holds uploads against each other before they are aggregated."""
        return self.bound == "median" or self.aggregation != "mean"


def deployed(channel: Channel, method: Method) -> Channel:
    """Between machines changes are bound by their median, unless a number is set or none is seen.

    Experiments in one process keep the numbers of their papers.
    """
    if channel.bound or channel.secure or sums(method) is None:
        return channel
    return replace(channel, bound="median")


def fits_secagg(channel: Channel, method: Method) -> None:
    """Refuses what Flower's SecAgg+ cannot sum."""
    if not channel.secure:
        return
    check_channel(channel, method)
    if not channel.clip:
        raise SettingsError(
            "channel.secure through Flower sums numbers of a fixed range, and channel.clip says "
            "how far a change may reach; set channel.clip"
        )
    if sums(method) == "total":
        raise SettingsError(
            f"{method.name} uploads sums that are not within a fixed range, which Flower's SecAgg+ "
            "needs; set channel.secure = false, or run it in one process"
        )


def check_channel(channel: Channel, method: Method) -> None:
    """Refuses, before any work, a channel that a method cannot use."""
    asked = "bound = 'median'" if channel.bound == "median" else ""
    asked = f"aggregation = '{channel.aggregation}'" if channel.aggregation != "mean" else asked
    if asked and channel.secure:
        raise SettingsError(
            f"channel.{asked} compares uploads, and with channel.secure the server sees none, only "
            "their sum; set channel.clip, which bounds every change at its site, or secure = false"
        )
    if asked and sums(method) is None:
        raise SettingsError(
            f"channel.{asked} is for uploads that are averaged or added up, but {method.name} "
            "aggregates single ones in its own way; leave it out, or choose another method"
        )
    if channel.secure and sums(method) is None:
        raise SettingsError(
            f"channel.secure shows the server a sum, but {method.name} aggregates single uploads "
            "(or does not say that a sum will do); set channel.secure = false, or add `sums = "
            f"...` to its traits: {', '.join(f'{key!r} ({what})' for key, what in SUMS.items())}"
        )
