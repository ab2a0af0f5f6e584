"""Which attack a simulation has, and who attacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fedvlm import seeds
from fedvlm.errors import SettingsError

Kind = Literal["none", "sign-flip", "scale", "label-flip", "noise", "collude"]
DEFAULT_STRENGTH = {"sign-flip": 10.0, "scale": 10.0, "noise": 10.0, "collude": 1.5, "label-flip": 1.0}


@dataclass(frozen=True)
class Attack:
    kind: Kind
    fraction: float  # of the training clients
    strength: float = 0.0  # 0: the usual one

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise SettingsError(f"attacker_fraction = {self.fraction} is outside (0, 1); 0.1 is one of ten")
        if not 0 <= self.strength < float("inf"):
            raise SettingsError(f"attack_strength = {self.strength}; it takes 0 (the usual) or more")
        if self.kind == "label-flip" and self.strength > 1:
            raise SettingsError(
                f"attack_strength = {self.strength} of label-flip is the share of rows; it is at most 1"
            )

    @property
    def effective_strength(self) -> float:
        return self.strength or DEFAULT_STRENGTH[self.kind]


def choose_attackers(attack: Attack, ids: Sequence[str], seed: int) -> set[str]:
    """Who attacks, drawn by seed; at least one client."""
    ordered = sorted(ids)
    count = max(1, round(attack.fraction * len(ordered)))
    drawn = torch.randperm(len(ordered), generator=seeds.generator("attackers", seed))
    return {ordered[i] for i in drawn[:count].tolist()}
