"""Tune settings of a method, such as `lr`, by successive halving on validation samples, before the run itself.

Every candidate trains for a quarter of the rounds; the best two train to the end, and the better one is chosen. With
the run itself this takes at most four times the client updates of one run. Only the accuracy on validation samples is
used, and only of clients that train in the run. If the protocol has unseen clients, a trial leaves a source out and is
judged there. Each seed is tuned by itself: a validation sample of one seed may be a test sample of another.

Few validation samples cannot tell candidates apart. Of candidates within a standard error of the best, the smallest and
the largest train to the end; if these two are also within it, the geometric mean of their values is chosen.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, product
from statistics import fmean
from typing import Any, NamedTuple

import torch

from fedvlm.channel.pipeline import SPENT_KEY
from fedvlm.core import Method, Noisy, Tensors, tunable_settings
from fedvlm.engines.client import Engine, Local, Scores, TrainingTerms
from fedvlm.engines.loop import finish_training, initial_state, open_engine, run_rounds
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

GRID_FACTORS = (1.0, 10.0, 0.1, 100.0)  # of a setting's value, nearest first: the first one wins a tie
MAX_SEARCH_RUNS = 3  # cost of a search in client updates of a run; the run itself is one more
N_FINALISTS = 2
MAX_LEFT_OUT = 0.2  # of the sources: without one, or without so many


@dataclass
class Trial:
    """One candidate: its method, the states of its trainings, and its accuracy on validation samples."""

    method: Method
    values: dict[str, float]
    states: dict[str, State] = field(default_factory=dict)
    rounds: int = 0
    updates: int = 0  # client updates, over all trainings
    score: float = -1.0
    samples: int = 0  # that the score is the accuracy of

    @property
    def standard_error(self) -> float:
        """Return that of the score; an accuracy of 0 or 1 counts as one sample away from it."""
        n_samples = max(self.samples, 1)
        score = min(max(self.score, 1 / (n_samples + 1)), n_samples / (n_samples + 1))
        return math.sqrt(score * (1 - score) / n_samples)


class TrialStep(NamedTuple):
    """Train one candidate up to a round."""

    trial: Trial
    until: int


class TrialTraining(NamedTuple):
    """What one training of a trial runs with."""

    terms: TrainingTerms
    engine: Engine
    plan: Plan
    initial_local: Local


Rungs = Generator[list[TrialStep], None, dict[str, Any]]


def check_tunable(settings: Settings) -> None:
    """Refuse settings that cannot be tuned, before any work."""
    method = settings.method
    for name in settings.tune:
        if name not in tunable_settings(method):
            names = ", ".join(tunable_settings(method)) or "nothing"
            raise SettingsError(f"tune = {name!r}: {method.name} has {names} to tune")
    if isinstance(method, Noisy):
        problem = f"tune: {method.name} counts the ε of its own noise for a single run, and tuning takes several"
        raise SettingsError(f"{problem}; set method.{settings.tune[0]} instead")
    if settings.warm_start is not None:
        raise SettingsError("tune and warm_start cannot be combined; leave one of them out")


def make_candidates(settings: Settings) -> tuple[list[Trial], int]:
    """Return the candidates, and the round after which all but the finalists stop."""
    method = settings.method
    base_values = {name: asdict(method)[name] for name in settings.tune}
    grid = sorted(product(GRID_FACTORS, repeat=len(base_values)), key=lambda f: sum(map(GRID_FACTORS.index, f)))
    count, first = halving_schedule(method.rounds, min(len(grid), len(GRID_FACTORS)))
    trials = []
    for factors in grid[:count]:
        values = {name: base_values[name] * factor for name, factor in zip(base_values, factors, strict=True)}
        trials.append(Trial(replace(method, **values), values))
    return trials, first


def halving_schedule(rounds: int, candidates: int) -> tuple[int, int]:
    """Return how many candidates fit the cost limit, and the rounds of the first rung."""
    first = max(1, rounds // 4)
    fits = [n for n in range(1, candidates + 1) if search_rounds(rounds, n, first) <= MAX_SEARCH_RUNS * rounds]
    return max(fits, default=1), first


def search_rounds(rounds: int, candidates: int, first: int) -> int:
    """Return the rounds of all trials of a search."""
    return candidates * first + min(N_FINALISTS, candidates) * (rounds - first)


def total_rounds(settings: Settings) -> int:
    trials, first = make_candidates(settings)
    return search_rounds(settings.method.rounds, len(trials), first)


def halving_rungs(settings: Settings) -> Rungs:
    """Yield the steps of each rung once those of the rung before are done; return the search for the manifest."""
    method = settings.method
    trials, first = make_candidates(settings)
    yield [TrialStep(trial, first) for trial in trials]
    finalists = choose_finalists(trials)
    yield [TrialStep(trial, method.rounds) for trial in finalists]
    names = ("values", "rounds", "updates", "score", "samples")
    asked = {name: asdict(method)[name] for name in settings.tune}
    recorded = [{name: getattr(trial, name) for name in names} for trial in trials]
    return {"asked": asked, "chosen": choose_values(finalists), "trials": recorded, "spent": _privacy_spend(trials)}


def choose_finalists(trials: Sequence[Trial]) -> list[Trial]:
    """Return the best trials; if more are level with the best, the smallest and the largest values of these."""
    ranked = sorted(trials, key=lambda trial: -trial.score)  # a stable order
    level = [trial for trial in ranked if trial.score >= ranked[0].score - ranked[0].standard_error]
    if len(level) <= N_FINALISTS:
        return ranked[:N_FINALISTS]
    level.sort(key=lambda trial: math.prod(trial.values.values()))
    return [level[0], level[-1]]


def choose_values(finalists: Sequence[Trial]) -> dict[str, float]:
    """Return the values of the best finalist, or the geometric mean if samples cannot tell them apart."""
    best, *others = sorted(finalists, key=lambda trial: -trial.score)
    if not others or others[0].score < best.score - best.standard_error:
        return best.values
    return _mean_values(best, others[0])


def _mean_values(first: Trial, second: Trial) -> dict[str, float]:
    return {name: math.sqrt(value * second.values[name]) for name, value in first.values.items()}


def possible_methods(settings: Settings) -> list[Method]:
    """Return the method and all others that a search may train or choose instead."""
    trials = make_candidates(settings)[0] if settings.tune else []
    means = [replace(settings.method, **_mean_values(*pair)) for pair in combinations(trials, 2)]
    return [settings.method, *(trial.method for trial in trials), *means]


def leave_source_out(training: Training, domains: Mapping[str, str], number: int) -> Training:
    """Return the training of a trial, without a source that it is judged on; `number` says which.

    A source is a domain, or a client where all are of one. If the protocol has no unseen clients, or only one source
    trains, nothing is left out.
    """
    sources = {id: domains[id] for id in training.train}
    if len(set(sources.values())) < 2:
        sources = {id: id for id in training.train}
    names = sorted(set(sources.values()))
    if not any(id in domains for id in training.unseen) or len(names) < 2:
        return replace(training, unseen=())
    left_out = {names[(number + i) % len(names)] for i in range(max(1, int(MAX_LEFT_OUT * len(names))))}
    train = tuple(id for id in training.train if sources[id] not in left_out)
    return replace(training, train=train, unseen=tuple(id for id in training.train if id not in train))


def tune_seeds(seeds: Sequence[Prepared], record: Record, report: Progress) -> dict[int, dict[str, Any]]:
    """Search the settings of every seed, with the trials of all seeds as parallel jobs."""
    tally, results = ProgressTotal(report), {}
    searches: dict[int, Rungs] = {prepared.seed: halving_rungs(prepared.settings) for prepared in seeds}
    callbacks = {prepared.seed: tally.add("tuning", total_rounds(prepared.settings)) for prepared in seeds}
    trials: dict[int, list[Trial]] = {}
    while searches:
        jobs, failed = [], list[Exception]()
        for prepared in seeds:
            seed = prepared.seed
            if seed not in searches:
                continue
            try:
                steps = next(searches[seed])
            except StopIteration as end:
                results[seed] = end.value
                del searches[seed]
                continue
            trials.setdefault(seed, [step.trial for step in steps])
            jobs += [_job(prepared, step, record, trials[seed], callbacks[seed], failed) for step in steps]
        run_jobs(jobs)
        if failed:
            raise failed[0]
    return results


def _job(
    prepared: Prepared,
    step: TrialStep,
    record: Record,
    trials: Sequence[Trial],
    report_rounds: Callable[[int], None],
    failed: list[Exception],
) -> Job:
    settings, is_exclusive = prepared.settings, must_run_alone(prepared.settings)

    def work(record: Record, workers: int, _: Callable[[int], None]) -> Any:
        trial = step.trial
        advance_trial(replace(prepared, settings=replace(settings, workers=workers)), trial, step.until)
        if is_exclusive:
            return None
        # The job may run in another process, which sends its trial back.
        score = trial.score, trial.samples, trial.updates
        return score, {k: encode_tensors(*pack_state(state)) for k, state in trial.states.items()}

    def on_done(outcome: Any) -> None:
        if isinstance(outcome, Exception):
            failed.append(outcome)
            return
        if outcome is not None:
            (step.trial.score, step.trial.samples, step.trial.updates), states = outcome
            step.trial.states = {name: unpack_state(*decode_tensors(state)) for name, state in states.items()}
        step.trial.rounds = step.until
        report_rounds(sum(trial.rounds for trial in trials))

    values = ", ".join(f"{name} = {value:g}" for name, value in step.trial.values.items())
    fraction = (step.until - step.trial.rounds) / max(1, settings.method.rounds)
    return Job(
        name=f"{settings.method.name}, tuning of seed {prepared.seed}, {values}",
        record=record,
        cost=fraction * sum(training_time(prepared, training) for training in prepared.trainings),
        workers=settings.workers,
        is_exclusive=is_exclusive,
        work=work,
        report_rounds=lambda rounds: None,
        on_done=on_done,
    )


def advance_trial(prepared: Prepared, trial: Trial, until: int) -> None:
    """Train a candidate up to a round in every training, and measure it on validation samples."""
    prepared = replace(prepared, settings=replace(prepared.settings, method=trial.method))
    trainings = list(prepared.trainings)
    if prepared.generalises:
        domains = prepared.partition.domains
        trainings = [leave_source_out(training, domains, prepared.seed + i) for i, training in enumerate(trainings)]
    scored = [_train(prepared, training, trial, until) for training in trainings]
    trial.rounds = until
    trial.score, trial.samples = fmean(accuracy for accuracy, _ in scored), sum(samples for _, samples in scored)


def _train(prepared: Prepared, training: Training, trial: Trial, until: int) -> tuple[float, int]:
    """Return the accuracy on the validation samples that judge, and their number."""
    settings, world = prepared.settings, prepared.world(training)
    # Without validation samples an engine measures training samples, which would favour any large lr.
    judges = {id: n for id in training.unseen or training.train if (n := len(world.members[id].validation))}
    if not judges:
        problem = f"tune = {list(settings.tune)}: no client of training {training.name} has validation samples"
        raise SettingsError(f"{problem}; give them a part in clients.ratios, or leave tune out")
    state, initial_local = initial_state(world)
    trial.states.setdefault(training.name, state)
    plan = Plan(training.train, training.unseen, settings.fraction)
    with closing(open_engine(settings.engine, world, settings.workers, until)) as engine:
        scores = continue_trial(trial, training.name, TrialTraining(world, engine, plan, initial_local), until)
    return mean_accuracy(scores, judges, "validation") or 0.0, sum(judges.values())


def continue_trial(
    trial: Trial, name: str, training: TrialTraining, until: int, on_state: Callable[[State], None] = lambda state: None
) -> Mapping[str, Scores]:
    """Continue one training of a trial up to a round and measure it; `on_state` gets the state after each round."""
    terms, engine, plan, initial_local = training

    def on_round(state: State, line: Mapping[str, Any]) -> None:
        trial.updates += len(line["clients"])
        on_state(state)

    state = run_rounds(terms, engine, replace(plan, stop=until), trial.states[name], initial_local, on_round)
    trial.states[name] = state
    return finish_training(terms, engine, plan, state, initial_local).scores


def _privacy_spend(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Return Σ 1/z² of each client's releases in all trials, by training."""
    spent: dict[str, dict[str, float]] = {}
    for trial in trials:
        for name, state in trial.states.items():
            for id, channel_state in state.channel.items():
                if SPENT_KEY in channel_state:
                    by_client = spent.setdefault(name, {})
                    by_client[id] = by_client.get(id, 0.0) + float(channel_state[SPENT_KEY])
    return spent


def to_manifest(searches: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the search of the only seed, or the searches by seed."""
    first = next(iter(searches.values()))
    if len(searches) == 1:
        return first
    by_seed = {f"{seed}": {k: v for k, v in search.items() if k != "asked"} for seed, search in searches.items()}
    return {"asked": first["asked"], "seeds": by_seed}


def seed_search(manifest: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    """Return the search of a seed from a manifest; empty if the run was not tuned."""
    tuned: Mapping[str, Any] = manifest.get("tuned") or {}
    return tuned["seeds"].get(f"{seed}", {}) if "seeds" in tuned else tuned


def with_tuned(settings: Settings, manifest: Mapping[str, Any], seed: int) -> Settings:
    """Return the settings with the values that were chosen for this seed."""
    chosen = seed_search(manifest, seed).get("chosen", {}) if settings.tune else {}
    return replace(settings, method=replace(settings.method, **chosen)) if chosen else settings


def initial_spend(manifest: Mapping[str, Any], training: str, seed: int) -> dict[str, Tensors]:
    """Return the channel state a training starts from, so that tuning counts in its ε."""
    spent = seed_search(manifest, seed).get("spent", {}).get(training, {})
    return {id: {SPENT_KEY: torch.tensor(amount, dtype=torch.float64)} for id, amount in spent.items()}


def reuse_tuned(settings: Settings, manifest: Mapping[str, Any]) -> Settings:
    """Return the settings with the values chosen by an earlier search for them, if the record has one.

    A run of several seeds keeps the untuned values in its identity, since each seed has values of its own.
    """
    tuned = manifest.get("tuned")
    if tuned is None or "seeds" in tuned or set(tuned["asked"]) != set(settings.tune):
        return settings
    for name in settings.tune:
        if asdict(settings.method)[name] not in (tuned["asked"][name], tuned["chosen"][name]):
            return settings
    return replace(settings, method=replace(settings.method, **tuned["chosen"]))
