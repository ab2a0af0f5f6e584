"""Train on n clients and test on a fixed set of unseen ones; FedOT with 1 to 75 writers."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedvlm import seeds
from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import Table, mean_accuracy
from fedvlm.evaluate.protocols import contract


@contract.register
@dataclass(frozen=True)
class CrossDevice:
    counts: tuple[int, ...] = ()  # numbers of training clients, one training each
    unseen: int = 0  # number of clients that are only tested on

    name = "cross-device"
    summary = "train on n clients, test on a fixed set of unseen ones"
    every_round = False

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[contract.Training]:
        ids, counts, unseen = list(domains), self.counts, self.unseen
        max_count = max(counts, default=0)
        if min(counts, default=0) < 1 or unseen < 1 or max_count + unseen > len(ids):
            raise SettingsError(
                f"cross-device trains on counts = {list(counts)} clients and tests on unseen = "
                f"{unseen} others, but there are {len(ids)} clients; both must be at least 1 "
                "and together at most that"
            )
        # The unseen clients are the same for every seed; the training clients are drawn by seed.
        order = [ids[i] for i in seeds.numbers("unseen", len(ids)).permutation(len(ids))]
        held_out, rest = order[:unseen], sorted(order[unseen:])
        drawn = [rest[i] for i in seeds.numbers("training clients", seed).permutation(len(rest))]
        return [
            contract.Training(f"{count}", tuple(sorted(drawn[:count])), tuple(sorted(held_out))) for count in counts
        ]

    def table(self, domains: Mapping[str, str], done: contract.TrainingResults, generalises: bool) -> Table:
        out: Table = {}
        for training, scores in done.values():
            unseen = mean_accuracy(scores, training.unseen) if generalises else None
            out[f"unseen, n={training.name}"] = unseen
            out[f"own, n={training.name}"] = mean_accuracy(scores, training.train)
        return out

    def weights(self, participants: contract.Participants, generalises: bool) -> dict[str, contract.Weights]:
        out: dict[str, contract.Weights] = {}
        for name, (train, unseen) in participants.items():
            out[f"own, n={name}"] = contract.uniform_weights(name, train)
            if generalises:
                out[f"unseen, n={name}"] = contract.uniform_weights(name, unseen)
        return out
