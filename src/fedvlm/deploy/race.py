"""A race for settings over sites: trials are trainings like others, whose hits on validation rows
are all that is told. Every upload of every trial counts at its site as any other does.
"""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedvlm.deploy.reasons import ERROR_MESSAGES
from fedvlm.deploy.remote import RemoteEngine
from fedvlm.engines.state import Plan, State, pack_state, unpack_state
from fedvlm.errors import FederationError
from fedvlm.evaluate.metrics import mean_accuracy
from fedvlm.evaluate.protocols import Training
from fedvlm.runner import tune
from fedvlm.runner.prepare import trainings_of
from fedvlm.runner.settings import Settings
from fedvlm.storage.files import read_json, read_tensors, write_json, write_tensors

if TYPE_CHECKING:
    from fedvlm.deploy.server import DeployedRun

BUDGET_EXCEEDED = ERROR_MESSAGES["race"].split("{")[0]


class FederatedTuning:
    """The race of one seed; one that was stopped goes on where it was."""

    def __init__(self, run: "DeployedRun", seed: int) -> None:
        self.run, self.seed, self.settings = run, seed, run.settings
        words = json.dumps([run.settings.identity(), seed], sort_keys=True)
        self.key = sha256(words.encode()).hexdigest()[:24]
        self.folder: Path = run.kit.folder / "races" / self.key
        sites = {name: name for name in run.kit.sites}
        self.trainings = trainings_of(run.settings, sites, seed)
        self.engines: dict[tuple[int, str], RemoteEngine] = {}
        self.scores_by_step: dict[str, float] = {}  # scores of trials by what they had done

    def run_all(self) -> dict[str, Any]:
        """The record of the race; a race that is over is only read."""
        result = self.folder / "result.json"
        if result.exists():
            return dict(read_json(result))
        if (self.folder / "scores.json").exists():
            self.scores_by_step = dict(read_json(self.folder / "scores.json"))
        trials, first = tune.make_candidates(self.settings)
        self._open_trials(trials, first)
        about = self._run_rungs()
        write_json(result, about)
        for path in self.folder.glob("*.checkpoint"):
            path.unlink()
        return about

    def _run_rungs(self) -> dict[str, Any]:
        """One trial after the other: sites do one thing at a time."""
        rungs, done = tune.halving_rungs(self.settings), 0
        while True:
            try:
                advances = next(rungs)
            except StopIteration as over:
                return dict(over.value)
            for trial, until in advances:
                done += until - trial.rounds
                self._advance(trial, until)
                self.run.on_progress("tuning", done, tune.total_rounds(self.settings))

    def _open_trials(self, trials: list[tune.Trial], first: int) -> None:
        """Every trial at every site before any of them begins, so that a race over a site's budget
        is refused while nothing has been spent."""
        rounds = self.settings.method.rounds
        trainings_per_site = max(
            sum(name in planned.train for planned in self.trainings) for name in self.run.kit.sites
        )
        totals = {
            "race": self.key,
            "trainings": (len(trials) + 1) * len(self.trainings),  # the run itself is one more
            "rounds": trainings_per_site * (tune.search_rounds(rounds, len(trials), first) + rounds),
        }
        for place, trial in enumerate(trials):
            plain = _trial_settings(self.settings, trial)
            for training in self.trainings:
                engine = self.run.open_training(plain, training, self.seed, totals)
                over = {name: reason for name, reason in engine.missing.items() if BUDGET_EXCEEDED in reason}
                if over:
                    name, reason = min(over.items())
                    raise FederationError(
                        f"the race for {', '.join(self.settings.tune)} does not begin; {name}: "
                        f"{reason}; leave tune out, or take fewer rounds"
                    )
                self.engines[place, training.name] = engine

    def _advance(self, trial: tune.Trial, until: int) -> None:
        place = [candidate.values for candidate in tune.make_candidates(self.settings)[0]].index(trial.values)
        name = f"{place}-{until}"
        if name in self.scores_by_step:
            trial.score, trial.updates = self.scores_by_step[name], int(self.scores_by_step[f"{name} updates"])
            for training in self.trainings:
                trial.states[training.name] = self._state(place, training, trial)
        else:
            accuracies = [self._train(place, trial, training, until) for training in self.trainings]
            trial.score = fmean(accuracies)
            self.scores_by_step |= {name: trial.score, f"{name} updates": trial.updates}
            write_json(self.folder / "scores.json", self.scores_by_step)
        trial.rounds = until

    def _train(self, place: int, trial: tune.Trial, training: Training, until: int) -> float:
        engine = self.engines[place, training.name]
        terms, initial_local = self.run.make_terms(_trial_settings(self.settings, trial), engine, self.seed)
        judges = [id for id in training.train if engine.counts[id]["validation"]]
        trial.states[training.name] = self._state(place, training, trial)
        path = self._checkpoint_path(place, training)

        def keep(state: State) -> None:
            flat, about = pack_state(state)
            write_tensors(path, flat, {**about, "updates": trial.updates})

        plan = Plan(training.train, (), self.settings.fraction)
        scores = tune.continue_trial(trial, training.name, terms, engine, plan, initial_local, until, keep)
        validation_accuracy = mean_accuracy(scores, judges, "validation")
        if validation_accuracy is None:
            raise FederationError(
                f"tune = {list(self.settings.tune)}: no site tells its hits on validation rows "
                "(its policy's `scores`), so nothing can be chosen by them; leave tune out"
            )
        return validation_accuracy

    def _state(self, place: int, training: Training, trial: tune.Trial) -> State:
        """Where a trial is: here, on disk after a stop, or at its beginning."""
        if training.name in trial.states:
            return trial.states[training.name]
        path = self._checkpoint_path(place, training)
        if path.exists():
            flat, about = read_tensors(path)
            trial.updates = max(trial.updates, int(about["updates"]))
            return unpack_state(flat, about)
        engine = self.engines[place, training.name]
        return State(0, engine.sites[engine.base].first, {})

    def _checkpoint_path(self, place: int, training: Training) -> Path:
        number = [training_item.name for training_item in self.trainings].index(training.name)
        return self.folder / f"{place}-{number}.checkpoint"


def _trial_settings(settings: Settings, trial: tune.Trial) -> Settings:
    """A trial is a training with the values of its candidate, and no race of its own."""
    return replace(settings, method=trial.method, tune=())
