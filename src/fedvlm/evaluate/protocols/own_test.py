"""Every client trains and is tested on its own test samples, over all classes; FedOTP and TOFA."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from fedvlm.evaluate.metrics import Results, Table, mean_accuracy
from fedvlm.evaluate.protocols import contract

OWN_CLASS_HITS = "own_class_hits"  # correct ones if a client may name only classes that it has training samples of
EVERYONE = "everyone"  # the virtual client that has the test samples of all


@contract.register
@dataclass(frozen=True)
class OwnTest:
    global_test: bool = False  # also test the shared model on the test samples of all clients

    name = "own-test"
    summary = "every client trains and is tested on its own test samples"
    every_round = False

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[contract.Training]:
        return [contract.Training("all", tuple(domains), (EVERYONE,) if self.global_test else ())]

    def table(self, domains: Mapping[str, str], done: contract.TrainingResults, generalises: bool) -> Table:
        out: Table = {}
        for training, scores in done.values():
            out["own"] = mean_accuracy(scores, training.train)
            if any(OWN_CLASS_HITS in score for score in scores.values()):
                masked = {id: {**s, "test_hits": s.get(OWN_CLASS_HITS, s["test_hits"])} for id, s in scores.items()}
                out["own classes only"] = mean_accuracy(masked, training.train)
            if self.global_test:
                out["global"] = mean_accuracy(scores, training.unseen) if generalises else None
            out |= domain_statistics(domains, training, scores)
            # A client with the name of one of these columns has no column of its own.
            out |= {id: mean_accuracy(scores, [id]) for id in training.train if id not in out}
        return out

    def weights(self, participants: contract.Participants, generalises: bool) -> dict[str, contract.Weights]:
        ((name, (train, unseen)),) = participants.items()
        global_column = {"global": contract.uniform_weights(name, unseen)} if unseen and generalises else {}
        return {"own": contract.uniform_weights(name, train), **global_column}


def domain_statistics(domains: Mapping[str, str], training: contract.Training, scores: Results) -> Table:
    """Return mean and standard deviation over the clients of each domain that several clients share."""
    out: Table = {}
    for domain in sorted({domains[id] for id in training.train} - {""}):
        ids = [id for id in training.train if domains[id] == domain]
        parts = [value for id in ids if (value := mean_accuracy(scores, [id])) is not None]
        if len(parts) > 1:
            out |= {f"mean {domain}": fmean(parts), f"deviation {domain}": stdev(parts)}
    return out
