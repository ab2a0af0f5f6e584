"""One training of a prepared run, with all that goes before and after its rounds."""

from collections.abc import Callable
from dataclasses import replace

from fedvlm.engines.loop import initial_state, open_engine
from fedvlm.evaluate import metrics
from fedvlm.evaluate.protocols import Training
from fedvlm.record import Record
from fedvlm.runner import calibrate, tune, warm
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.training import file_name, finished_scores, run_training


def train(
    prepared: Prepared, training: Training, record: Record, report_rounds: Callable[[int], None]
) -> metrics.Results:
    """One training in this process, unless it is finished."""
    settings, name = prepared.settings, file_name(training, prepared.seed)
    if (previous_scores := finished_scores(record, name)) is not None:
        calibrate.save_calibrations(record, name, training.name, prepared.seed, prepared.world(training))
        return previous_scores
    world = prepared.world(training)
    state, initial_local = initial_state(world)
    state = replace(state, channel=tune.initial_spend(record.manifest, training.name, prepared.seed))
    if settings.warm_start is not None:
        state = warm.apply_warm_start(settings, training, prepared.warm_world(training), world, state, record)
    engine = open_engine(settings.engine, world, settings.workers, settings.method.rounds)
    taught = prepared.measured_training(training)
    results = run_training(settings, taught, world, engine, state, initial_local, record, report_rounds)
    calibrate.save_calibrations(record, name, training.name, prepared.seed, world)
    return results
