"""One training of a prepared run, with all that goes before and after its rounds."""

from collections.abc import Callable
from dataclasses import replace

from fedvlm.engines.loop import open_engine, start
from fedvlm.evaluate import scores
from fedvlm.evaluate.protocols import Training
from fedvlm.record import Record
from fedvlm.runner import calibrate, tune, warm
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.training import carry_out, file_name, finished


def train(
    prepared: Prepared, training: Training, record: Record, tell: Callable[[int], None]
) -> scores.Results:
    """One training in this process, unless it is finished."""
    settings, name = prepared.settings, file_name(training, prepared.seed)
    if (there := finished(record, name)) is not None:
        calibrate.keep(record, name, training.name, prepared.seed, prepared.world(training))
        return there
    world = prepared.world(training)
    state, fresh = start(world)
    state = replace(state, channel=tune.begun(record.manifest, training.name, prepared.seed))
    if settings.warm_start is not None:
        state = warm.begin(settings, training, prepared.warm_world(training), world, state, record)
    engine = open_engine(settings.engine, world, settings.workers, settings.method.rounds)
    taught = prepared.taught(training)
    found = carry_out(settings, taught, world, engine, state, fresh, record, tell)
    calibrate.keep(record, name, training.name, prepared.seed, world)
    return found
