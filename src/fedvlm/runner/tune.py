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

from fedvlm.channel.uploads import SPENT
from fedvlm.core import Method, Noisy, Tensors, tunable
from fedvlm.engines.client import Local, Scores, Terms
from fedvlm.engines.loop import Engine, finish, open_engine, start, train
from fedvlm.engines.state import Plan, State
from fedvlm.errors import SettingsError
from fedvlm.evaluate.protocols import Training
from fedvlm.evaluate.scores import accuracy
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.settings import Settings

FACTORS = (1.0, 10.0, 0.1, 100.0)  # of a setting's value, nearest first: a tie is the first one's
MOST = 3  # runs that a race may cost, in client updates; the run itself is one more
FINALISTS = 2


@dataclass
class Trial:
    """One candidate: its method, where its trainings are, and what validation rows say of it."""

    method: Method
    values: dict[str, float]
    states: dict[str, State] = field(default_factory=dict)
    rounds: int = 0
    updates: int = 0  # of clients, over all trainings
    score: float = -1.0


class Leg(NamedTuple):
    """A part of a race: one candidate on to a round."""

    trial: Trial
    until: int


def check(settings: Settings) -> None:
    """Refuses, before any work, what cannot be raced."""
    method = settings.method
    for name in settings.tune:
        if name not in tunable(method):
            known = ", ".join(tunable(method)) or "nothing"
            raise SettingsError(f"tune = {name!r}: {method.name} has {known} to tune")
    if isinstance(method, Noisy):
        raise SettingsError(
            f"tune: {method.name} counts the ε of its own noise for one run, and a race is "
            f"several; set {settings.tune[0]} yourself"
        )
    if settings.warm_start is not None:
        raise SettingsError("tune and warm_start do not go together; leave one of them out")


def by_default(settings: Settings, said: Collection[str]) -> Settings:
    """With a race for the rate where it costs little: embeddings are cached, no ε is spent."""
    method = settings.method
    costly = (
        bool(settings.channel.noise_multiplier)
        or "image tower" in method.traits.needs
        or settings.smoke
    )
    if "lr" not in tunable(method) or "method.lr" in said or not method.rounds or costly:
        return settings
    raced = replace(settings, tune=("lr",))
    try:
        check(raced)
    except SettingsError:
        return settings
    return raced


def plan(rounds: int, candidates: int) -> tuple[int, int]:
    """How many candidates there may be, and after how many rounds most of them stop."""
    first = max(1, rounds // 4)
    fits = [k for k in range(1, candidates + 1) if cost(rounds, k, first) <= MOST * rounds]
    return max(fits, default=1), first


def cost(rounds: int, candidates: int, first: int) -> int:
    """Rounds of all trials."""
    return candidates * first + min(FINALISTS, candidates) * (rounds - first)


def total(settings: Settings) -> int:
    """Rounds of all trials of a race."""
    trials, first = line_up(settings)
    return cost(settings.method.rounds, len(trials), first)


def heats(settings: Settings) -> Generator[list[Leg], None, dict[str, Any]]:
    """Who goes on to which round, as soon as those before have got there; the record in the end."""
    method = settings.method
    trials, first = line_up(settings)
    yield [Leg(one, first) for one in trials]
    ahead = sorted(trials, key=lambda one: -one.score)[:FINALISTS]  # a stable order
    yield [Leg(one, method.rounds) for one in ahead]
    best = max(ahead, key=lambda one: one.score)
    return {
        "asked": {name: asdict(method)[name] for name in settings.tune},
        "chosen": best.values,
        "trials": [
            {"values": one.values, "rounds": one.rounds, "updates": one.updates, "score": one.score}
            for one in trials
        ],
        "spent": _spent(trials),
    }


def line_up(settings: Settings) -> tuple[list[Trial], int]:
    """The candidates, and the round after which most of them stop."""
    method = settings.method
    asked = {name: asdict(method)[name] for name in settings.tune}
    grid = sorted(product(FACTORS, repeat=len(asked)), key=lambda f: sum(map(FACTORS.index, f)))
    count, first = plan(method.rounds, min(len(grid), len(FACTORS)))
    trials = []
    for factors in grid[:count]:
        values = {name: asked[name] * by for name, by in zip(asked, factors, strict=True)}
        trials.append(Trial(replace(method, **values), values))
    return trials, first


def advance(prepared: Prepared, trial: Trial, until: int) -> None:
    """Trains a candidate on to a round in every training, and asks the validation rows."""
    settings = replace(prepared.settings, method=trial.method)
    here = replace(prepared, settings=settings)
    found = [_train(here, training, trial, until) for training in here.trainings]
    trial.rounds, trial.score = until, fmean(found)


def _train(prepared: Prepared, training: Training, trial: Trial, until: int) -> float:
    settings, world = prepared.settings, prepared.world(training)
    # Where there are none an engine measures training rows instead, which say little of a rate.
    judges = [id for id in training.train if len(world.members[id].validation)]
    if not judges:
        raise SettingsError(
            f"tune = {list(settings.tune)}: no client of training {training.name} has validation "
            "rows; give clients.ratios a share for them, or set --tune none"
        )
    state, fresh = start(world)
    trial.states.setdefault(training.name, state)
    who = Plan(training.train, (), settings.fraction)
    with closing(open_engine(settings.engine, world, settings.workers, until)) as engine:
        scores = go_on(trial, training.name, world, engine, who, fresh, until)
    return accuracy(scores, judges, "validation") or 0.0


def go_on(
    trial: Trial,
    training: str,
    terms: Terms,
    engine: Engine,
    who: Plan,
    fresh: Local,
    until: int,
    keep: Callable[[State], None] = lambda state: None,  # after every round
) -> Mapping[str, Scores]:
    """Takes one training of a trial on from where it is, and measures it there."""

    def count(state: State, line: Mapping[str, Any]) -> None:
        trial.updates += len(line["clients"])
        keep(state)

    state = train(terms, engine, who, trial.states[training], fresh, count, until)
    trial.states[training] = state
    return finish(terms, engine, who, state, fresh).scores


def _spent(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Σ 1/z² of each client's releases in all trials, by training."""
    out: dict[str, dict[str, float]] = {}
    for trial in trials:
        for name, state in trial.states.items():
            for id, kept in state.channel.items():
                if SPENT in kept:
                    mine = out.setdefault(name, {})
                    mine[id] = mine.get(id, 0.0) + float(kept[SPENT])
    return out


def noted(races: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """For the manifest: the race of the only seed, or the races by seed."""
    if len(races) == 1:
        return next(iter(races.values()))
    asked = next(iter(races.values()))["asked"]
    by = {f"{seed}": {k: v for k, v in one.items() if k != "asked"} for seed, one in races.items()}
    return {"asked": asked, "seeds": by}


def of_seed(about: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    """What a manifest has of a seed's race; nothing if there was none."""
    tuned: Mapping[str, Any] = about.get("tuned") or {}
    return tuned["seeds"].get(f"{seed}", {}) if "seeds" in tuned else tuned


def settled(settings: Settings, about: Mapping[str, Any], seed: int) -> Settings:
    """The settings with what the race of this seed chose."""
    chosen = of_seed(about, seed).get("chosen", {}) if settings.tune else {}
    return replace(settings, method=replace(settings.method, **chosen)) if chosen else settings


def begun(about: Mapping[str, Any], training: str, seed: int) -> dict[str, Tensors]:
    """What a training's channel starts with, so that the race counts in its ε."""
    spent = of_seed(about, seed).get("spent", {}).get(training, {})
    return {id: {SPENT: torch.tensor(one, dtype=torch.float64)} for id, one in spent.items()}


def known(settings: Settings, about: Mapping[str, Any]) -> Settings:
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
