"""Who was far from the rest, of what a channel noted of every round; a record is read by it."""

from collections.abc import Iterable, Mapping
from typing import Any

OFTEN = 0.7  # share of a client's rounds above which it is named


def named(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Who was far from the rest in most of its rounds of a training, in words."""
    seen: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        for id, one in line["clients"].items():
            if "far" in one:
                seen.setdefault((str(line.get("training", "")), id), []).append(one)
    out = []
    for (training, id), many in sorted(seen.items()):
        far = [one for one in many if one["far"]]
        if len(far) > OFTEN * len(many):
            norm, cosine = (sum(one[key] for one in far) / len(far) for key in ("norm", "cosine"))
            out.append(
                f"client {id} was far from the rest in {len(far)} of {len(many)} rounds of "
                f"{training}: its changes were {norm:.2g} times as long as the median, at a "
                f"cosine of {cosine:.2f} to the others"
            )
    return out
