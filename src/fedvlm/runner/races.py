"""The races of a run: trials of every seed side by side, as trainings are."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedvlm.engines.state import pack_state, unpack_state
from fedvlm.record import Record
from fedvlm.runner import tune
from fedvlm.runner.forecast import training_time
from fedvlm.runner.load import Progress
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.schedule import Job, ProgressTotal, must_run_alone, run_jobs
from fedvlm.storage.files import decode_tensors, encode_tensors

Rungs = Generator[list[tune.TrialStep], None, dict[str, Any]]


def tune_seeds(seeds: Sequence[Prepared], record: Record, report: Progress) -> dict[int, dict[str, Any]]:
    """What each seed's race chose, and the record of it."""
    tally, results = ProgressTotal(report), {}
    open_searches: dict[int, Rungs] = {prepared.seed: tune.halving_rungs(prepared.settings) for prepared in seeds}
    callbacks = {prepared.seed: tally.add("tuning", tune.total_rounds(prepared.settings)) for prepared in seeds}
    trials_by_seed: dict[int, list[tune.Trial]] = {prepared.seed: [] for prepared in seeds}
    while open_searches:
        jobs, failed = [], list[Exception]()
        for prepared in (prepared for prepared in seeds if prepared.seed in open_searches):
            try:
                steps = next(open_searches[prepared.seed])
            except StopIteration as over:
                results[prepared.seed] = over.value
                del open_searches[prepared.seed]
                continue
            trials = trials_by_seed[prepared.seed] = trials_by_seed[prepared.seed] or [step.trial for step in steps]
            for step in steps:
                on_done = _done_callback(step, trials, callbacks[prepared.seed], failed)
                jobs.append(_job(prepared, step, record, on_done))
        run_jobs(jobs)
        if failed:
            raise failed[0]
    return results


def _done_callback(
    step: tune.TrialStep,
    trials: Sequence[tune.Trial],
    report_rounds: Callable[[int], None],
    failed: list[Exception],
) -> Callable[[Any], None]:
    def done(outcome: Any) -> None:
        if isinstance(outcome, Exception):
            failed.append(outcome)
            return
        if outcome is not None:
            _unpack_trial(step.trial, *outcome)
        step.trial.rounds = step.until
        report_rounds(sum(trial.rounds for trial in trials))

    return done


def _job(prepared: Prepared, step: tune.TrialStep, record: Record, done: Callable[[Any], None]) -> Job:
    settings, alone = prepared.settings, must_run_alone(prepared.settings)
    fraction = (step.until - step.trial.rounds) / max(1, settings.method.rounds)

    def work(record: Record, workers: int, report_rounds: Callable[[int], None]) -> Any:
        worker_prepared = replace(prepared, settings=replace(settings, workers=workers))
        tune.advance_trial(worker_prepared, step.trial, step.until)
        return None if alone else _pack_trial(step.trial)  # it may be another process's trial

    values_text = ", ".join(f"{name} = {value:g}" for name, value in step.trial.values.items())
    return Job(
        name=f"{settings.method.name}, tuning of seed {prepared.seed}, {values_text}",
        record=record,
        cost=fraction * sum(training_time(prepared, training) for training in prepared.trainings),
        workers=settings.workers,
        is_exclusive=alone,
        work=work,
        report_rounds=lambda rounds: None,
        on_done=done,
    )


def _pack_trial(trial: tune.Trial) -> tuple[float, int, dict[str, bytes]]:
    """A trial as it goes from one process to another."""
    states = {name: encode_tensors(*pack_state(state)) for name, state in trial.states.items()}
    return trial.score, trial.updates, states


def _unpack_trial(trial: tune.Trial, score: float, updates: int, states: Mapping[str, bytes]) -> None:
    trial.score, trial.updates = score, updates
    trial.states = {name: unpack_state(*decode_tensors(payload)) for name, payload in states.items()}
