"""Train on the first half of the classes, test on both halves, as papers on prompts do."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedvlm.evaluate.metrics import Table, mean_accuracy
from fedvlm.evaluate.protocols import contract

NEW = "new"  # before a client's id: its test samples of classes without training


@contract.register
@dataclass(frozen=True)
class BaseToNew:
    name = "base-to-new"
    summary = "train on the first half of the classes, test on them and on the others"
    every_round = False

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[contract.Training]:
        return [contract.Training("base", tuple(domains), ())]

    def table(self, domains: Mapping[str, str], done: contract.TrainingResults, generalises: bool) -> Table:
        ((training, scores),) = done.values()
        base = mean_accuracy(scores, training.train)
        new = mean_accuracy(scores, [f"{NEW} {id}" for id in training.train])
        out: Table = {"base": base, "new": new, "harmonic": harmonic(base, new)}
        for id in training.train:
            out |= {f"base {id}": mean_accuracy(scores, [id])}
            out |= {f"new {id}": mean_accuracy(scores, [f"{NEW} {id}"])}
        return out

    def weights(self, participants: contract.Participants, generalises: bool) -> dict[str, contract.Weights]:
        ((name, (train, _)),) = participants.items()
        return {"base": contract.uniform_weights(name, train)}


def harmonic(a: float | None, b: float | None) -> float | None:
    """Return the harmonic mean; 0 if one is 0, None if one is unknown."""
    if a is None or b is None:
        return None
    return 2 * a * b / (a + b) if a and b else 0.0
