"""The races of a run: trials of every seed side by side, as trainings are."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedvlm.engines.state import pack, unpack
from fedvlm.record import Record
from fedvlm.runner import tune
from fedvlm.runner.forecast import training_time
from fedvlm.runner.load import Progress
from fedvlm.runner.prepare import Prepared
from fedvlm.runner.schedule import Piece, Tally, carry, stays
from fedvlm.storage.sealed import seal, unseal

Heats = Generator[list[tune.Leg], None, dict[str, Any]]


def races(seeds: Sequence[Prepared], record: Record, report: Progress) -> dict[int, dict[str, Any]]:
    """What each seed's race chose, and the record of it."""
    tally, found = Tally(report), {}
    open_: dict[int, Heats] = {one.seed: tune.heats(one.settings) for one in seeds}
    tells = {one.seed: tally.place("tuning", tune.total(one.settings)) for one in seeds}
    run: dict[int, list[tune.Trial]] = {one.seed: [] for one in seeds}
    while open_:
        pieces, failed = [], list[Exception]()
        for prepared in (one for one in seeds if one.seed in open_):
            try:
                legs = next(open_[prepared.seed])
            except StopIteration as over:
                found[prepared.seed] = over.value
                del open_[prepared.seed]
                continue
            mine = run[prepared.seed] = run[prepared.seed] or [leg.trial for leg in legs]
            for leg in legs:
                heard = _heard(leg, mine, tells[prepared.seed], failed)
                pieces.append(_piece(prepared, leg, record, heard))
        carry(pieces)
        if failed:
            raise failed[0]
    return found


def _heard(
    leg: tune.Leg,
    trials: Sequence[tune.Trial],
    tell: Callable[[int], None],
    failed: list[Exception],
) -> Callable[[Any], None]:
    def done(came: Any) -> None:
        if isinstance(came, Exception):
            failed.append(came)
            return
        if came is not None:
            _take(leg.trial, *came)
        leg.trial.rounds = leg.until
        tell(sum(one.rounds for one in trials))

    return done


def _piece(prepared: Prepared, leg: tune.Leg, record: Record, done: Callable[[Any], None]) -> Piece:
    settings, alone = prepared.settings, stays(prepared.settings)
    share = (leg.until - leg.trial.rounds) / max(1, settings.method.rounds)

    def work(record: Record, workers: int, tell: Callable[[int], None]) -> Any:
        here = replace(prepared, settings=replace(settings, workers=workers))
        tune.advance(here, leg.trial, leg.until)
        return None if alone else _given(leg.trial)  # it may be another process's trial

    said = ", ".join(f"{name} = {value:g}" for name, value in leg.trial.values.items())
    return Piece(
        name=f"{settings.method.name}, tuning of seed {prepared.seed}, {said}",
        record=record,
        cost=share * sum(training_time(prepared, one) for one in prepared.trainings),
        workers=settings.workers,
        alone=alone,
        work=work,
        tell=lambda rounds: None,
        done=done,
    )


def _given(trial: tune.Trial) -> tuple[float, int, dict[str, bytes]]:
    """A trial as it goes from one process to another."""
    states = {name: seal(*pack(state)) for name, state in trial.states.items()}
    return trial.score, trial.updates, states


def _take(trial: tune.Trial, score: float, updates: int, states: Mapping[str, bytes]) -> None:
    trial.score, trial.updates = score, updates
    trial.states = {name: unpack(*unseal(one)) for name, one in states.items()}
