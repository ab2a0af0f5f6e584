"""What a method says of its tensors: numbers of maps, angles, weights of sentences, prompts."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np
import torch

from fedvlm.maths import cayley
from fedvlm.maths.tsne import tsne
from fedvlm.methods._blocks import chosen
from fedvlm.record import Record
from fedvlm.report.explain import FEWEST, local_prompts

ANGLES = 33  # quantiles of the angles by which maps turn
SHOWN = 200  # local prompts that are drawn

Details = dict[int, Mapping[str, dict[str, Any]]]  # seed -> training -> what came of it


def maps(details: Details) -> dict[str, list[float]]:
    """What the method says of its clients' tensors: least, mean and most of each number."""
    found: dict[str, list[float]] = {}
    for trainings in details.values():
        for about in trainings.values():
            for one in about["maps"].values():
                for key, value in one.items():
                    found.setdefault(key, []).append(value)
    return {key: [min(each), fmean(each), max(each)] for key, each in found.items()}


def angles(record: Record) -> list[float]:
    """Quantiles, in degrees, of the angles by which the maps of the first training turn."""
    shared, local = record.outcome(record.manifest["trainings"][0])
    found = []
    for own in local.values():
        every = {**shared, **own}
        if not any(key.startswith("skew") for key in every):
            return []
        turn = cayley.orthogonal(chosen(every)).double()
        found.append(torch.linalg.eigvals(turn).angle().abs().rad2deg().flatten())
    if not found:
        return []
    places = torch.linspace(0, 1, ANGLES, dtype=torch.float64)
    return [round(one, 3) for one in torch.cat(found).quantile(places).tolist()]


def weights(record: Record) -> list[float]:
    """TOFA's weights of the sentences of a class, the mean over classes, largest first."""
    shared, _ = record.outcome(record.manifest["trainings"][0])
    found = shared.get("weights")
    if found is None or found.ndim != 2 or found.shape[1] < 2:
        return []
    ordered = found.sort(dim=1, descending=True).values.mean(0)
    return [round(one, 4) for one in ordered.tolist()]


def prompts(record: Record) -> dict[str, Any]:
    """The prompts that clients of the first training keep, on a plane; nothing if they are few."""
    found = dict(list(local_prompts(record).items())[:SHOWN])
    if len(found) < FEWEST:
        return {}
    places = tsne(np.stack([one.double().numpy() for one in found.values()]))
    return {"clients": list(found), "places": places.round(3).tolist()}
