"""A protocol of one's own: each client in turn is unseen; the worst of them is what counts.

Run it: python examples/new_protocol.py
"""

from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import fedvlm
from fedvlm.evaluate.protocols import (
    Participants,
    Table,
    Training,
    TrainingResults,
    Weights,
    mean_accuracy,
    register,
)


@register
@dataclass(frozen=True)
class WorstUnseen:
    name = "worst-unseen"
    summary = "each client in turn is unseen; the worst and the mean of them"
    every_round = False  # metrics are measured at the end

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[Training]:
        train_ids = {client_id: tuple(id for id in domains if id != client_id) for client_id in domains}
        return [Training(client_id, rest, (client_id,)) for client_id, rest in train_ids.items()]

    def table(self, domains: Mapping[str, str], done: TrainingResults, generalises: bool) -> Table:
        accuracies = [mean_accuracy(scores, training.unseen) for training, scores in done.values()]
        defined = [value for value in accuracies if value is not None] if generalises else []
        worst, mean = (min(defined), sum(defined) / len(defined)) if defined else (None, None)
        return {"unseen, worst": worst, "unseen, mean": mean}

    def weights(self, participants: Participants, generalises: bool) -> dict[str, Weights]:
        cells = [(name, id) for name, (_, unseen) in participants.items() for id in unseen]
        even = dict.fromkeys(cells, 1 / len(cells))
        return {"unseen, mean": even} if generalises else {}  # the worst is no mean of hits


def main() -> None:
    method = {"name": "fedavg", "rounds": 3}
    with TemporaryDirectory() as folder:
        out = f"{folder}/run"
        print(fedvlm.run(method, protocol="worst-unseen", out=out, smoke=True).table())


if __name__ == "__main__":
    main()
