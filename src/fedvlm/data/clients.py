"""Settings: how rows become clients."""

from dataclasses import dataclass
from typing import Literal

from fedvlm.core.schema import AMOUNT, COUNT, POSITIVE, SHARE, read_fields, several, within
from fedvlm.errors import SettingsError

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
    partition: By = "domain"  # own: the data's own client column (writers, sites)
    # clients where rows are dealt; of each domain for domain-dirichlet
    count: int = within(10, COUNT)
    alpha: float = within(0.3, POSITIVE)  # Dirichlet concentration
    min_samples: int = within(10, COUNT)  # training rows a Dirichlet client has at least
    shots: int = within(0, AMOUNT)  # training rows per class and client; 0: all
    # likewise; left out: as many as shots, 4 at most
    val_shots: int | None = within(None, AMOUNT)
    ratios: tuple[float, float, float] = (0.6, 0.2, 0.2)  # train, validation, test
    calibration_ratio: float | None = within(
        None, SHARE
    )  # share of validation rows set aside; own data: a third
    domains: tuple[str, ...] = several()  # whose rows become clients; empty: all
    public_ratio: float = within(
        0.0, SHARE
    )  # share set aside as nobody's rows, for methods that adapt to a reference

    def __post_init__(self) -> None:
        read_fields("clients", self)
        shares = self.ratios
        if min(shares) < 0 or shares[0] == 0 or not abs(sum(shares) - 1) < 1e-9:
            raise SettingsError(
                f"clients.ratios = {list(shares)} do not fit; they are above 0 for train, not "
                f"negative, and sum to 1, not {sum(shares):g}"
            )

    @property
    def held(self) -> int:
        """Validation rows per class and client, 0 for all: those who train on few choose on few."""
        return min(self.shots, HELD) if self.val_shots is None else self.val_shots
