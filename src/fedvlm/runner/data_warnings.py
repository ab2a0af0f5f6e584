"""Warn about properties of the data that make a federated run unreliable."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np

from fedvlm.core import Method, setting
from fedvlm.data.partition import ClientSplit, Partition
from fedvlm.data.table import EmbeddedTable, count_classes, rank_digests
from fedvlm.errors import join_names

MIN_VALIDATION_SAMPLES = 10  # with as few or fewer, model selection is mostly noise
SIMILAR_NAME_CUTOFF = 0.85  # difflib ratio above which two class names may be a typo of each other


def data_warnings(samples: EmbeddedTable, partition: Partition) -> list[str]:
    """Return a message for each client or class that deserves attention before training."""
    classes_of = {id: _class_ids(samples, client) for id, client in partition.clients.items()}
    single = {id: min(class_ids) for id, class_ids in classes_of.items() if len(class_ids) == 1}
    messages = [f"client {id!r} has only one class: {samples.classes[label]!r}" for id, label in single.items()]
    counts = {id: len(client.validation) for id, client in partition.clients.items()}
    if small := [f"{id} ({count})" for id, count in counts.items() if count <= MIN_VALIDATION_SAMPLES]:
        limit = f"(at most {MIN_VALIDATION_SAMPLES})"
        messages.append(f"too few validation samples for model selection {limit}: {join_names(small)}")
    messages += _contradiction_warnings(samples)
    n_train = sum(len(client.train) for client in partition.clients.values())
    if samples.findings is not None and n_train < len(samples.classes):
        messages.append(f"there are more findings ({len(samples.classes)}) than training samples ({n_train})")
    return [*messages, *_single_client_classes(samples, classes_of)] if len(classes_of) > 1 else messages


def _contradiction_warnings(samples: EmbeddedTable) -> list[str]:
    """Return a message if equal images have labels that exclude each other; unknown ones exclude nothing."""
    content = rank_digests(samples.content)
    columns = samples.labels[None] if samples.findings is None else samples.findings[samples.labels].T
    contradicted: set[int] = set()
    for column in columns:
        pairs = np.unique(np.stack([content, column])[:, column >= 0], axis=1)[0]
        contradicted |= set(pairs[1:][pairs[1:] == pairs[:-1]].tolist())
    if not contradicted:
        return []
    count = len(contradicted)
    one = "an image is in the data twice" if count == 1 else f"{count} images are in the data twice"
    return [f"{one} with labels that contradict each other; one copy of each is used, so correct them"]


def _class_ids(samples: EmbeddedTable, client: ClientSplit) -> set[int]:
    parts = (client.train, client.validation, client.test, client.calibration)
    return set(np.flatnonzero(count_classes(samples, np.concatenate(parts))).tolist())


def _single_client_classes(samples: EmbeddedTable, classes_of: Mapping[str, set[int]]) -> list[str]:
    messages = []
    for class_id, name in enumerate(samples.classes):
        owners = [id for id, class_ids in classes_of.items() if class_id in class_ids]
        if len(owners) != 1:
            continue
        # A similar name that this client lacks may be the same class, spelt in another way.
        other_names = [other for i, other in enumerate(samples.classes) if i not in classes_of[owners[0]]]
        similar = get_close_matches(name, other_names, n=1, cutoff=SIMILAR_NAME_CUTOFF)
        hint = f"; if it is the class {similar[0]!r} of other clients, give both the same name" if similar else ""
        messages.append(f"class {name!r} is only at client {owners[0]!r}{hint}")
    return messages


def unlabelled_warnings(method: Method, partition: Partition) -> list[str]:
    """Return a message if a method ignores samples without a label."""
    count = sum(len(client.unlabelled) for client in partition.clients.values())
    if not count or method.traits.training.unlabelled:
        return []
    return [f'{method.name} ignores the {count} samples without a label; method = "auto" learns from them']


def suppressed_warnings(method: Method | None, clients: Mapping[str, Any], samples: EmbeddedTable) -> list[str]:
    """Return a message if class statistics of small classes will not be uploaded; `clients` have `train`."""
    min_samples = (method.traits.classes.min_class_samples if method else None) or 1
    if method is None or min_samples <= 1:
        return []
    counts = {id: count_classes(samples, client.train) for id, client in clients.items()}
    n_small = {id: int(((count > 0) & (count < min_samples)).sum()) for id, count in counts.items()}
    n_suppressed, n_statistics = sum(n_small.values()), sum(int((count > 0).sum()) for count in counts.values())
    if not n_suppressed:
        return []
    message = (
        f"{method.name}: {n_suppressed} of {n_statistics} class statistics are suppressed, because the client has "
        f"fewer than {min_samples} samples of the class"
    )
    if silent := [id for id, count in counts.items() if n_small[id] and (count < min_samples).all()]:
        message += f"; no class statistics at all come from {join_names(silent, 5)}"
    if 2 * n_suppressed <= n_statistics:
        return [f"{message}; allow_small = true (--allow-small) uploads them"]
    n_samples = sum(int(count.sum()) for count in counts.values())
    lost = sum(int(count[count < min_samples].sum()) for count in counts.values())
    noise = (
        "; with method.noise_multiplier = 1 they are uploaded under noise whose ε is counted"
        if setting(method, "noise_multiplier") is not None
        else ""
    )
    return [
        f"{message}; {lost} of {n_samples} training samples ({lost / n_samples:.0%}) are in no uploaded statistic; "
        f"allow_small = true (--allow-small) uploads them as they are{noise}"
    ]
