"""Settings: how rows become clients."""

from dataclasses import dataclass
from typing import Literal

from fedvlm.core.schema import COUNT, FRACTION, NON_NEGATIVE, POSITIVE, list_field, ranged_field, read_fields
from fedvlm.errors import SettingsError

MAX_VAL_SHOTS = 4  # validation rows of a class at most, where training rows are counted: CoOp's
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
    count: int = ranged_field(10, COUNT)
    alpha: float = ranged_field(0.3, POSITIVE)  # Dirichlet concentration
    min_samples: int = ranged_field(10, COUNT)  # training rows a Dirichlet client has at least
    shots: int = ranged_field(0, NON_NEGATIVE)  # training rows per class and client; 0: all
    # likewise; left out: as many as shots, 4 at most
    val_shots: int | None = ranged_field(None, NON_NEGATIVE)
    ratios: tuple[float, float, float] = (0.6, 0.2, 0.2)  # train, validation, test
    calibration_ratio: float | None = ranged_field(
        None, FRACTION
    )  # share of validation rows set aside; own data: a third
    domains: tuple[str, ...] = list_field()  # whose rows become clients; empty: all
    public_ratio: float = ranged_field(
        0.0, FRACTION
    )  # share set aside as nobody's rows, for methods that adapt to a reference

    def __post_init__(self) -> None:
        read_fields("clients", self)
        ratios = self.ratios
        if min(ratios) < 0 or ratios[0] == 0 or not abs(sum(ratios) - 1) < 1e-9:
            raise SettingsError(
                f"clients.ratios = {list(ratios)} do not fit; they are above 0 for train, not "
                f"negative, and sum to 1, not {sum(ratios):g}"
            )

    @property
    def n_val_shots(self) -> int:
        """Validation rows per class and client, 0 for all: those who train on few choose on few."""
        return min(self.shots, MAX_VAL_SHOTS) if self.val_shots is None else self.val_shots
