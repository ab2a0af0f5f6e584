"""Train on clients and test also on the unseen domains named in target; FAA-CLIP."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import METRICS
from fedvlm.evaluate.protocols.contract import Done, Training, Weights, Who, even, register
from fedvlm.evaluate.scores import Results, Table, accuracy, metric


@register
@dataclass(frozen=True)
class SourceTarget:
    target: tuple[str, ...] = ()  # the domains that are only tested on

    name = "source-target"
    what = "train on clients, test also on the unseen domains named in target; FAA-CLIP"
    every_round = True

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[Training]:
        away = [id for id in domains if domains[id] in self.target]
        rest = [id for id in domains if domains[id] not in self.target]
        if not away or not rest:
            raise SettingsError(
                f"source-target tests on target = {list(self.target)}, which leaves {len(rest)} "
                f"clients to train and {len(away)} unseen; name one or more domains, but not all "
                "of them"
            )
        return [Training(", ".join(self.target), tuple(rest), tuple(away))]

    def table(self, domains: Mapping[str, str], done: Done, generalises: bool) -> Table:
        out: Table = {}
        for training, scores in done.values():
            out |= measured(training, scores, generalises)
        return out

    def weights(self, who: Who, generalises: bool) -> dict[str, Weights]:
        out: dict[str, Weights] = {}
        for name, (train, unseen) in who.items():
            out["clients accuracy"] = even(name, train)
            if generalises:
                out["target accuracy"] = even(name, unseen)
                out["average"] = even(name, [*train, *unseen])
        return out


def measured(training: Training, scores: Results, generalises: bool) -> Table:
    """Every metric over the clients and on the target; each client counts the same."""
    out: Table = {}
    everyone = (*training.train, *training.unseen)
    for name in METRICS:
        out[f"clients {name}"] = metric(scores, training.train, name)
        out[f"target {name}"] = metric(scores, training.unseen, name) if generalises else None
        if name == "accuracy":  # the last column of the paper's tables
            out["average"] = accuracy(scores, everyone) if generalises else None
    for id in everyone:
        if id in training.train or generalises:
            out |= {f"{name} {id}": metric(scores, [id], name) for name in METRICS}
    return out
