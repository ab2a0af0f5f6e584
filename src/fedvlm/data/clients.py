"""Settings: how rows become clients."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

from fedvlm.errors import SettingsError, unknown

HELD = 4  # validation rows of a class at most, where training rows are counted: CoOp's
By = Literal[
    "domain",
    "own",
    "iid",
    "shards",
    "dirichlet",
    "pathological",
    "domain-dirichlet",
    "coarse",
    "coarse-dirichlet",
]


@dataclass(frozen=True)
class Clients:
    by: By = "domain"  # own: the data's own client column (writers, sites)
    count: int = 10  # clients where rows are dealt; of each domain for domain-dirichlet
    alpha: float = 0.3  # Dirichlet concentration
    minimum: int = 10  # training rows a Dirichlet client has at least
    shots: int = 0  # training rows per class and client; 0: all
    validation_shots: int | None = None  # likewise; left out: as many as shots, 4 at most
    shares: tuple[float, float, float] = (0.6, 0.2, 0.2)  # train, validation, test
    calibration: float | None = None  # share of validation rows set aside; own data: a third
    domains: tuple[str, ...] = ()  # whose rows become clients; empty: all
    public: float = 0.0  # share set aside as nobody's rows, for methods that adapt to a reference

    def __post_init__(self) -> None:
        if self.by not in get_args(By):
            raise unknown("way of making clients", str(self.by), get_args(By))
        for key, least in (("count", 1), ("minimum", 1), ("shots", 0), ("validation_shots", 0)):
            value = getattr(self, key)
            if key == "validation_shots" and value is None:
                continue
            if type(value) is not int or value < least:
                raise SettingsError(
                    f"clients.{key} = {value!r} does not fit; it takes a whole number from {least}"
                )
        if not _number(self.alpha) or self.alpha <= 0:
            raise SettingsError(
                f"clients.alpha = {self.alpha!r} does not fit; it takes a number above 0"
            )
        if not _number(self.public) or not 0 <= self.public < 1:
            raise SettingsError(
                f"clients.public = {self.public!r} does not fit; it takes a share from 0 to below 1"
            )
        apart = self.calibration
        if apart is not None and (not _number(apart) or not 0 <= apart < 1):
            raise SettingsError(
                f"clients.calibration = {apart!r} does not fit; it takes a share from 0 to below 1"
            )
        object.__setattr__(self, "domains", words("clients.domains", self.domains))
        shares = self.shares
        if (
            not isinstance(shares, list | tuple)
            or len(shares) != 3
            or not all(map(_number, shares))
        ):
            raise SettingsError(
                f"clients.shares = {shares!r} does not fit; it takes three numbers: the shares of "
                "train, validation and test, as [0.6, 0.2, 0.2]"
            )
        if min(shares) < 0 or shares[0] == 0 or abs(sum(shares) - 1) > 1e-9:
            raise SettingsError(
                f"clients.shares = {list(shares)} do not fit; they are above 0 for train, not "
                f"negative, and sum to 1, not {sum(shares):g}"
            )
        object.__setattr__(self, "shares", tuple(shares))

    @property
    def held(self) -> int:
        """Validation rows per class and client, 0 for all: those who train on few choose on few."""
        return min(self.shots, HELD) if self.validation_shots is None else self.validation_shots


def words(key: str, value: object) -> tuple[str, ...]:
    """One name, or several."""
    many = [value] if isinstance(value, str) else value
    if not isinstance(many, list | tuple) or any(not isinstance(one, str) for one in many):
        raise SettingsError(f"{key} = {value!r} does not fit; it takes a name, or a list of names")
    return tuple(many)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
