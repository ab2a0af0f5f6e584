"""Give a client that joins after the run its own classifier, without any other client taking part."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedvlm.classifier.personalised import Personalised, unseen_classifier
from fedvlm.data.clients import Clients
from fedvlm.data.table import EmbeddedTable, align_labels, check_same_kind
from fedvlm.encoders.store import open_store
from fedvlm.engines.client import make_client
from fedvlm.errors import DataError, SettingsError, unknown_name
from fedvlm.evaluate.findings import correct_labels
from fedvlm.parts.bodies import adapts
from fedvlm.record import Record
from fedvlm.runner import tune
from fedvlm.runner.load import Progress, encode, open_data, open_encoder_with_notes, skipped_messages
from fedvlm.runner.prepare import Prepared, label_tensor, prepare_client, with_calibration
from fedvlm.runner.settings import build
from fedvlm.runner.training import fit_calibration, fit_client_novelty

VALIDATION_FRACTION = 0.25  # of what a client learns from: validation rows, a third of them set aside


@dataclass(frozen=True)
class JoinResult:
    """The new client's classifier, and its accuracy on held-out samples."""

    classifier: Personalised
    is_adapted: bool  # False: the method has no adaptation, so it is what every unseen client gets
    n_train_samples: int  # that it learnt from, those included that only calibrate it
    n_test_samples: int  # rows kept back
    accuracy: float  # on them
    unseen_accuracy: float  # what a client that does not adapt has on them


def join(
    run: Record | str | Path,
    rows: EmbeddedTable,
    client_id: str = "new",
    *,
    training: str | None = None,
    seed: int | None = None,
    train_fraction: float = 0.8,
) -> JoinResult:
    """Adapt the shared tensors of a run to the samples of one more client; nothing is sent back.

    The test split of the data is held out, or all but `train_fraction` of the samples where it has none.

    Args:
        run: a result, or the folder of a finished run.
        rows: the client's embedded samples, as `fedvlm.data.tabulate` makes them.
        client_id: name of the client.
        training: name of the training to join, the first if it is left out.
        seed: seed of that training, the first if it is left out.
        train_fraction: fraction of the samples to learn from, where the data have no test split.

    Returns:
        The client's classifier, and its accuracy on held-out samples before and after adapting.

    Example:
        >>> joined = fedvlm.join("runs/tofa-demo", samples)  # doctest: +SKIP
        >>> joined.classifier.save_pretrained("classifiers/new")  # doctest: +SKIP
    """
    result = run if isinstance(run, Record) else Record(Path(run))
    common = unseen_classifier(result, training, seed)
    method = common.method
    if not method.traits.needs <= {"image", "text"}:
        problem = f"{result.folder} is a run of {method.name}, which needs more than pooled embeddings"
        raise SettingsError(f"{problem}; join a run of tofa, or of a method that needs image and text only")
    rows = align_classes(rows, common)
    prepared = prepare_joiner(result, rows, client_id, common, train_fraction)
    client_split = prepared.partition.clients[client_id]
    labels = label_tensor(rows)
    adapted = adapts(method)
    local = common.local
    sent, world = method.send(common.shared, client_id), prepared.own_world(client_id)
    if adapted:
        local = method.adapt(common.frozen, sent, local, make_client(world, client_id, method.rounds))
    fitted_calibration = fit_calibration(world, sent, local, client_id)
    novelty = fit_client_novelty(world, client_id)
    personal = replace(common, local=local, client=client_id, calibration=fitted_calibration, novelty=novelty)
    test_rows = torch.from_numpy(client_split.test)

    def accuracy_of(classifier: Personalised) -> float:
        logits, truth = classifier.logits(rows.x[test_rows]), labels[test_rows]
        if rows.findings is not None:
            known, correct, _ = correct_labels(logits, truth)
            return correct / max(1, known)
        return float((logits.argmax(dim=1) == truth).float().mean())

    n_train = sum(len(part) for part in (client_split.train, client_split.validation, client_split.calibration))
    return JoinResult(personal, adapted, n_train, len(test_rows), accuracy_of(personal), accuracy_of(common))


def embed_for_run(
    run: Record, data: str, source: Mapping[str, Any], encoder: str, access: Mapping[str, Any], progress: Progress
) -> tuple[EmbeddedTable, list[str]]:
    """Embed a data set by the run's own encoder; `encoder` says where that is, if it moved."""
    identity = run.manifest["identity"]
    name = encoder or identity["encoder"]
    if name.startswith("store:"):
        return open_store(name.removeprefix("store:"), **source), []
    box, notes = open_encoder_with_notes(name, access)
    done = encode(open_data(data, source), box, False, identity["precision"], progress)
    return done.embedded, [*notes, *skipped_messages(done)]


def align_classes(rows: EmbeddedTable, common: Personalised) -> EmbeddedTable:
    """Return the samples with labels in the run's classes; the encoder must be the same."""
    if rows.encoder != common.encoder:
        remedy = "encode the images with the run's encoder"
        raise DataError(f"the samples were embedded by {rows.encoder}, the run by {common.encoder}; {remedy}")
    classes = common.frozen.classes
    for name in rows.classes:
        if name not in classes:
            raise unknown_name("class of the run", name, classes)
    check_same_kind(rows.name, rows.findings, common.frozen.multi_label)
    number = [classes.index(name) for name in rows.classes]
    return replace(rows, classes=classes, **align_labels(rows, number, len(classes)))


def prepare_joiner(run: Record, rows: EmbeddedTable, id: str, common: Personalised, train_fraction: float) -> Prepared:
    """Prepare the run for one more client: its training, validation and test samples."""
    if not 0 < train_fraction < 1:
        raise SettingsError(f"train_fraction must be above 0 and below 1, got {train_fraction}")
    validation_fraction = train_fraction * VALIDATION_FRACTION
    ratios = (train_fraction - validation_fraction, validation_fraction, 1 - train_fraction)
    clients = with_calibration(Clients(partition="own", ratios=ratios))
    settings = replace(build(run.manifest["identity"]), clients=clients)
    settings = tune.with_tuned(settings, run.manifest, common.frozen.seed)
    without_texts = replace(rows, texts={})  # a client that comes later brings no sentences of its own
    return prepare_client(settings, without_texts, id, common.frozen.seed, common.frozen)
