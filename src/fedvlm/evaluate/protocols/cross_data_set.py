"""Train on one data set, test on it and on others by their own class names, as FLiP does."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from fedvlm.core.schema import list_field
from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import Table, mean_accuracy
from fedvlm.evaluate.protocols import contract


@contract.register
@dataclass(frozen=True)
class CrossDataSet:
    test_data: tuple[str, ...] = list_field()  # data sets that are only tested on: names, folders, store:FILE

    name = "cross-data-set"
    summary = "train on one data set, test on it and on those in test_data"
    every_round = False

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[contract.Training]:
        if not self.test_data or len(set(self.test_data)) < len(self.test_data):
            problem = f"cross-data-set tests on test_data = {list(self.test_data)}"
            raise SettingsError(f"{problem}; name one or more data sets, each once")
        return [contract.Training("source", tuple(domains), ())]

    def table(self, domains: Mapping[str, str], done: contract.TrainingResults, generalises: bool) -> Table:
        ((training, scores),) = done.values()
        out: Table = {"source": mean_accuracy(scores, training.train)}
        targets = {name: mean_accuracy(scores, [f"{name} {id}" for id in training.train]) for name in self.test_data}
        values = [value for value in targets.values() if value is not None]
        out["targets"] = fmean(values) if values else None
        return out | {f"on {name}": value for name, value in targets.items()}

    def weights(self, participants: contract.Participants, generalises: bool) -> dict[str, contract.Weights]:
        ((name, (train, _)),) = participants.items()
        return {"source": contract.uniform_weights(name, train)}
