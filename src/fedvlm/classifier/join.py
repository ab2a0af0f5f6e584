"""A client that comes after the run: its own classifier, without any other client taking part."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.classifier.personalised import Personalised, of_newcomer
from fedvlm.data.clients import Clients
from fedvlm.data.table import Embedded
from fedvlm.encoders.store import open_store
from fedvlm.engines.client import client
from fedvlm.errors import DataError, SettingsError, unknown
from fedvlm.parts.bodies import adapts
from fedvlm.record import Record
from fedvlm.runner import tune
from fedvlm.runner.calibrate import calibration
from fedvlm.runner.load import Progress, encode, open_data, reach, skipped
from fedvlm.runner.prepare import Prepared, prepare_one, set_aside
from fedvlm.runner.settings import build

HELD = 0.25  # of what a client learns from: validation rows, a third of them set aside


@dataclass(frozen=True)
class Joined:
    """The new client's classifier, and how it does on rows that it has not learnt from."""

    classifier: Personalised
    adapted: bool  # False: the method has no adaptation, so it is what every unseen client gets
    rows: int  # that it learnt from, those included that only calibrate it
    held: int  # rows kept back
    accuracy: float  # on them
    unseen: float  # what a client that does not adapt has on them


def join(
    run: Record | str | Path,
    rows: Embedded,
    client_id: str = "new",
    *,
    training: str | None = None,
    seed: int | None = None,
    share: float = 0.8,
) -> Joined:
    """Adapts the server's statistics to the rows of one more client; nothing is sent back.

    The data's own test rows are kept back, or all but `share` of the rows where it marks none.
    """
    result = run if isinstance(run, Record) else Record(Path(run))
    common = of_newcomer(result, training, seed)
    method = common.method
    if not method.traits.needs <= {"image", "text"}:
        raise SettingsError(
            f"{result.folder} is a run of {method.name}, which needs more than pooled embeddings; "
            "a client can join a run of tofa, or of a method that needs image and text only"
        )
    rows = fitted(rows, common)
    prepared = alone(result, rows, client_id, common, share)
    own = prepared.division.members[client_id]
    labels = torch.from_numpy(rows.labels)
    adapted = adapts(method)
    local = common.local
    sent, world = method.send(common.shared, client_id), prepared.own_world(client_id)
    if adapted:
        local = method.adapt(common.frozen, sent, local, client(world, client_id, method.rounds))
    known = calibration(world, sent, local, client_id)
    personal = replace(common, local=local, client=client_id, calibration=known)
    held = torch.from_numpy(own.test)

    def hits(one: Personalised) -> float:
        return float((one.logits(rows.x[held]).argmax(dim=1) == labels[held]).float().mean())

    learnt = len(rows.labels) - len(held) - prepared.division.dropped
    return Joined(personal, adapted, learnt, len(held), hits(personal), hits(common))


def rows_for(
    run: Record,
    data: str,
    source: Mapping[str, Any],
    encoder: str,
    access: Mapping[str, Any],
    progress: Progress,
) -> tuple[Embedded, list[str]]:
    """A data set as the run's own encoder sees it; `encoder` says where that is, if it moved."""
    known = run.manifest["identity"]
    name = encoder or known["encoder"]
    if name.startswith("store:"):
        return open_store(name.removeprefix("store:"), **source), []
    box, notes = reach(name, access)
    done = encode(open_data(data, source), box, False, known["precision"], progress)
    return done.embedded, [*notes, *skipped(done)]


def fitted(rows: Embedded, common: Personalised) -> Embedded:
    """The rows with labels that are numbers of the run's classes; the encoder must be the same."""
    if rows.encoder != common.encoder:
        raise DataError(
            f"the rows are of {rows.encoder}, the run is of {common.encoder}; encode the images "
            "with the run's encoder"
        )
    classes = common.frozen.classes
    for name in rows.classes:
        if name not in classes:
            raise unknown("class of the run", name, classes)
    number = np.array([classes.index(name) for name in rows.classes])
    return replace(rows, classes=classes, labels=number[rows.labels])


def alone(run: Record, rows: Embedded, id: str, common: Personalised, share: float) -> Prepared:
    """The run as it goes on for one more client: rows to learn from, and rows to test on."""
    if not 0 < share < 1:
        raise SettingsError(f"share = {share} is outside (0, 1); it is what the client learns from")
    checked = share * HELD
    shares = (share - checked, checked, 1 - share)
    clients = set_aside(Clients(partition="own", ratios=shares))
    settings = replace(build(run.manifest["identity"]), clients=clients)
    settings = tune.settled(settings, run.manifest, common.frozen.seed)
    bare = replace(rows, texts={})  # a client that comes later brings no sentences of its own
    return prepare_one(settings, bare, id, common.frozen.seed, common.frozen)
