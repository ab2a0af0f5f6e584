"""Who was far from the rest, of what a channel noted of every round; a record is read by it."""

from collections.abc import Iterable, Mapping
from typing import Any

MIN_OUTLIER_FRACTION = 0.7  # share of a client's rounds above which it is named


def describe_outliers(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Who was far from the rest in most of its rounds of a training, in words."""
    rounds_of_client: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        for id, entry in line["clients"].items():
            if "far" in entry:
                rounds_of_client.setdefault((str(line.get("training", "")), id), []).append(entry)
    out = []
    for (training, id), entries in sorted(rounds_of_client.items()):
        outlying = [entry for entry in entries if entry["far"]]
        if len(outlying) > MIN_OUTLIER_FRACTION * len(entries):
            norm, cosine = (sum(entry[key] for entry in outlying) / len(outlying) for key in ("norm", "cosine"))
            out.append(
                f"client {id} was far from the rest in {len(outlying)} of {len(entries)} rounds of "
                f"{training}: its changes were {norm:.2g} times as long as the median, at a "
                f"cosine of {cosine:.2f} to the others"
            )
    return out
