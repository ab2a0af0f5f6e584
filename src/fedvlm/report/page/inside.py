"""What a method says of its tensors: numbers of maps, angles, weights of sentences, prompts."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np
import torch

from fedvlm.maths import orthogonal
from fedvlm.maths.tsne import tsne
from fedvlm.methods.fedot import selected_skew
from fedvlm.record import Record
from fedvlm.report.explain import MIN_PROMPTS, local_prompts

N_ANGLE_QUANTILES = 33  # quantiles of the angles by which maps turn
MAX_PROMPTS = 200  # local prompts that are drawn

Details = dict[int, Mapping[str, dict[str, Any]]]  # seed -> training -> what came of it


def diagnostic_ranges(details: Details) -> dict[str, list[float]]:
    """What the method says of its clients' tensors: least, mean and most of each number."""
    values_by_key: dict[str, list[float]] = {}
    for trainings in details.values():
        for about in trainings.values():
            for diagnostics in about["maps"].values():
                for key, value in diagnostics.items():
                    values_by_key.setdefault(key, []).append(value)
    return {key: [min(values), fmean(values), max(values)] for key, values in values_by_key.items()}


def rotation_angles(record: Record) -> list[float]:
    """Quantiles, in degrees, of the angles by which the maps of the first training turn."""
    shared, local = record.outcome(record.manifest["trainings"][0])
    angles_by_client = []
    for local_tensors in local.values():
        tensors = {**shared, **local_tensors}
        if not any(key.startswith("skew") for key in tensors):
            return []
        turn = orthogonal.orthogonal(selected_skew(tensors)).double()
        angles_by_client.append(torch.linalg.eigvals(turn).angle().abs().rad2deg().flatten())
    if not angles_by_client:
        return []
    places = torch.linspace(0, 1, N_ANGLE_QUANTILES, dtype=torch.float64)
    return [round(angle, 3) for angle in torch.cat(angles_by_client).quantile(places).tolist()]


def mean_sentence_weights(record: Record) -> list[float]:
    """TOFA's weights of the sentences of a class, the mean over classes, largest first."""
    shared, _ = record.outcome(record.manifest["trainings"][0])
    sentence_weights = shared.get("weights")
    if sentence_weights is None or sentence_weights.ndim != 2 or sentence_weights.shape[1] < 2:
        return []
    ordered = sentence_weights.sort(dim=1, descending=True).values.mean(0)
    return [round(weight, 4) for weight in ordered.tolist()]


def prompt_positions(record: Record) -> dict[str, Any]:
    """The prompts that clients of the first training keep, on a plane; nothing if they are few."""
    shown_prompts = dict(list(local_prompts(record).items())[:MAX_PROMPTS])
    if len(shown_prompts) < MIN_PROMPTS:
        return {}
    places = tsne(np.stack([prompt.double().numpy() for prompt in shown_prompts.values()]))
    return {"clients": list(shown_prompts), "places": places.round(3).tolist()}
