"""A race for settings such as the rate, on validation rows, before the run itself.

Every candidate trains for a quarter of the rounds; the best two go on to the end, and the better
one is taken. With the run itself that is at most four times the client updates of one run. Only
hits on validation rows are looked at; clients that a training leaves out have no say in it.

Every seed has a race of its own: what is a validation row by one seed is a test row by another.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import torch

from fedvlm.channel.pipeline import SPENT_KEY
from fedvlm.core import Method, Noisy, Tensors, tunable_settings
from fedvlm.engines.client import Local, Scores, TrainingTerms
from fedvlm.engines.loop import Engine, finish_training, initial_state, open_engine, run_rounds
from fedvlm.engines.state import Plan, State, pack_state, unpack_state
from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import mean_accuracy
from fedvlm.evaluate.protocols import Training
from fedvlm.record import Record
from fedvlm.runner.forecast import training_time
from fedvlm.runner.jobs import Job, ProgressTotal, must_run_alone, run_jobs
from fedvlm.runner.load import Progress
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.settings import Settings
from fedvlm.storage.files import decode_tensors, encode_tensors

GRID_FACTORS = (1.0, 10.0, 0.1, 100.0)  # of a setting's value, nearest first: a tie is the first one's
MAX_SEARCH_RUNS = 3  # runs that a race may cost, in client updates; the run itself is one more
N_FINALISTS = 2


@dataclass
class Trial:
    """One candidate: its method, where its trainings are, and what validation rows say of it."""

    method: Method
    values: dict[str, float]
    states: dict[str, State] = field(default_factory=dict)
    rounds: int = 0
    updates: int = 0  # of clients, over all trainings
    score: float = -1.0


class TrialStep(NamedTuple):
    """A part of a race: one candidate on to a round."""

    trial: Trial
    until: int


def check_tunable(settings: Settings) -> None:
    """Refuses, before any work, what cannot be raced."""
    method = settings.method
    for name in settings.tune:
        if name not in tunable_settings(method):
            names = ", ".join(tunable_settings(method)) or "nothing"
            raise SettingsError(f"tune = {name!r}: {method.name} has {names} to tune")
    if isinstance(method, Noisy):
        raise SettingsError(
            f"tune: {method.name} counts the ε of its own noise for one run, and a race is "
            f"several; set {settings.tune[0]} yourself"
        )
    if settings.warm_start is not None:
        raise SettingsError("tune and warm_start do not go together; leave one of them out")


def with_default_tuning(settings: Settings, assigned_keys: Collection[str]) -> Settings:
    """With a race for the rate where it costs little: embeddings are cached, no ε is spent."""
    method = settings.method
    costly = bool(settings.channel.noise_multiplier) or "image tower" in method.traits.needs or settings.smoke
    if "lr" not in tunable_settings(method) or "method.lr" in assigned_keys or not method.rounds or costly:
        return settings
    raced = replace(settings, tune=("lr",))
    try:
        check_tunable(raced)
    except SettingsError:
        return settings
    return raced


def halving_schedule(rounds: int, candidates: int) -> tuple[int, int]:
    """How many candidates there may be, and after how many rounds most of them stop."""
    first = max(1, rounds // 4)
    fits = [k for k in range(1, candidates + 1) if search_rounds(rounds, k, first) <= MAX_SEARCH_RUNS * rounds]
    return max(fits, default=1), first


def search_rounds(rounds: int, candidates: int, first: int) -> int:
    """Rounds of all trials."""
    return candidates * first + min(N_FINALISTS, candidates) * (rounds - first)


def total_rounds(settings: Settings) -> int:
    """Rounds of all trials of a race."""
    trials, first = make_candidates(settings)
    return search_rounds(settings.method.rounds, len(trials), first)


def halving_rungs(settings: Settings) -> Generator[list[TrialStep], None, dict[str, Any]]:
    """Who goes on to which round, as soon as those before have got there; the record in the end."""
    method = settings.method
    trials, first = make_candidates(settings)
    yield [TrialStep(trial, first) for trial in trials]
    finalists = sorted(trials, key=lambda trial: -trial.score)[:N_FINALISTS]  # a stable order
    yield [TrialStep(trial, method.rounds) for trial in finalists]
    best = max(finalists, key=lambda trial: trial.score)
    return {
        "asked": {name: asdict(method)[name] for name in settings.tune},
        "chosen": best.values,
        "trials": [
            {"values": trial.values, "rounds": trial.rounds, "updates": trial.updates, "score": trial.score}
            for trial in trials
        ],
        "spent": _privacy_spend(trials),
    }


def make_candidates(settings: Settings) -> tuple[list[Trial], int]:
    """The candidates, and the round after which most of them stop."""
    method = settings.method
    base_values = {name: asdict(method)[name] for name in settings.tune}
    grid = sorted(product(GRID_FACTORS, repeat=len(base_values)), key=lambda f: sum(map(GRID_FACTORS.index, f)))
    count, first = halving_schedule(method.rounds, min(len(grid), len(GRID_FACTORS)))
    trials = []
    for factors in grid[:count]:
        values = {name: base_values[name] * by for name, by in zip(base_values, factors, strict=True)}
        trials.append(Trial(replace(method, **values), values))
    return trials, first


def advance_trial(prepared: Prepared, trial: Trial, until: int) -> None:
    """Trains a candidate on to a round in every training, and asks the validation rows."""
    settings = replace(prepared.settings, method=trial.method)
    trial_prepared = replace(prepared, settings=settings)
    accuracies = [_train(trial_prepared, training, trial, until) for training in trial_prepared.trainings]
    trial.rounds, trial.score = until, fmean(accuracies)


def _train(prepared: Prepared, training: Training, trial: Trial, until: int) -> float:
    settings, world = prepared.settings, prepared.world(training)
    # Where there are none an engine measures training rows instead, which say little of a rate.
    validation_clients = [id for id in training.train if len(world.members[id].validation)]
    if not validation_clients:
        raise SettingsError(
            f"tune = {list(settings.tune)}: no client of training {training.name} has validation "
            "rows; give clients.ratios a share for them, or set --tune none"
        )
    state, initial_local = initial_state(world)
    trial.states.setdefault(training.name, state)
    client_plan = Plan(training.train, (), settings.fraction)
    with closing(open_engine(settings.engine, world, settings.workers, until)) as engine:
        scores = continue_trial(trial, training.name, world, engine, client_plan, initial_local, until)
    return mean_accuracy(scores, validation_clients, "validation") or 0.0


def continue_trial(
    trial: Trial,
    training: str,
    terms: TrainingTerms,
    engine: Engine,
    client_plan: Plan,
    initial_local: Local,
    until: int,
    keep: Callable[[State], None] = lambda state: None,  # after every round
) -> Mapping[str, Scores]:
    """Takes one training of a trial on from where it is, and measures it there."""

    def count(state: State, line: Mapping[str, Any]) -> None:
        trial.updates += len(line["clients"])
        keep(state)

    state = run_rounds(terms, engine, replace(client_plan, stop=until), trial.states[training], initial_local, count)
    trial.states[training] = state
    return finish_training(terms, engine, client_plan, state, initial_local).scores


def _privacy_spend(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Σ 1/z² of each client's releases in all trials, by training."""
    out: dict[str, dict[str, float]] = {}
    for trial in trials:
        for name, state in trial.states.items():
            for id, channel_state in state.channel.items():
                if SPENT_KEY in channel_state:
                    client_spend = out.setdefault(name, {})
                    client_spend[id] = client_spend.get(id, 0.0) + float(channel_state[SPENT_KEY])
    return out


def to_manifest(searches: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """For the manifest: the race of the only seed, or the races by seed."""
    if len(searches) == 1:
        return next(iter(searches.values()))
    base_values = next(iter(searches.values()))["asked"]
    by = {f"{seed}": {k: v for k, v in search.items() if k != "asked"} for seed, search in searches.items()}
    return {"asked": base_values, "seeds": by}


def seed_search(about: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    """What a manifest has of a seed's race; nothing if there was none."""
    tuned: Mapping[str, Any] = about.get("tuned") or {}
    return tuned["seeds"].get(f"{seed}", {}) if "seeds" in tuned else tuned


def with_tuned(settings: Settings, about: Mapping[str, Any], seed: int) -> Settings:
    """The settings with what the race of this seed chose."""
    chosen = seed_search(about, seed).get("chosen", {}) if settings.tune else {}
    return replace(settings, method=replace(settings.method, **chosen)) if chosen else settings


def initial_spend(about: Mapping[str, Any], training: str, seed: int) -> dict[str, Tensors]:
    """What a training's channel starts with, so that the race counts in its ε."""
    spent = seed_search(about, seed).get("spent", {}).get(training, {})
    return {id: {SPENT_KEY: torch.tensor(amount, dtype=torch.float64)} for id, amount in spent.items()}


def reuse_tuned(settings: Settings, about: Mapping[str, Any]) -> Settings:
    """The settings with what an earlier race for them chose, if the record has one.

    A run of several seeds is known by what was asked, since each of them chose for itself.
    """
    tuned = about.get("tuned")
    if tuned is None or "seeds" in tuned or set(tuned["asked"]) != set(settings.tune):
        return settings
    for name in settings.tune:
        if asdict(settings.method)[name] not in (tuned["asked"][name], tuned["chosen"][name]):
            return settings
    method = replace(settings.method, **tuned["chosen"])
    return replace(settings, method=method)


Rungs = Generator[list[TrialStep], None, dict[str, Any]]


def tune_seeds(seeds: Sequence[Prepared], record: Record, report: Progress) -> dict[int, dict[str, Any]]:
    """What each seed's race chose, and the record of it."""
    tally, results = ProgressTotal(report), {}
    open_searches: dict[int, Rungs] = {prepared.seed: halving_rungs(prepared.settings) for prepared in seeds}
    callbacks = {prepared.seed: tally.add("tuning", total_rounds(prepared.settings)) for prepared in seeds}
    trials_by_seed: dict[int, list[Trial]] = {prepared.seed: [] for prepared in seeds}
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
    step: TrialStep,
    trials: Sequence[Trial],
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


def _job(prepared: Prepared, step: TrialStep, record: Record, done: Callable[[Any], None]) -> Job:
    settings, alone = prepared.settings, must_run_alone(prepared.settings)
    fraction = (step.until - step.trial.rounds) / max(1, settings.method.rounds)

    def work(record: Record, workers: int, report_rounds: Callable[[int], None]) -> Any:
        worker_prepared = replace(prepared, settings=replace(settings, workers=workers))
        advance_trial(worker_prepared, step.trial, step.until)
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


def _pack_trial(trial: Trial) -> tuple[float, int, dict[str, bytes]]:
    """A trial as it goes from one process to another."""
    states = {name: encode_tensors(*pack_state(state)) for name, state in trial.states.items()}
    return trial.score, trial.updates, states


def _unpack_trial(trial: Trial, score: float, updates: int, states: Mapping[str, bytes]) -> None:
    trial.score, trial.updates = score, updates
    trial.states = {name: unpack_state(*decode_tensors(payload)) for name, payload in states.items()}
