"""Train on clients and test also on the unseen ones named in target; FAA-CLIP."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import METRICS
from fedvlm.evaluate.protocols.contract import Done, Training, Weights, Who, even, register
from fedvlm.evaluate.scores import Results, Table, accuracy, metric

EACH = "each"  # in place of a target: every domain in turn


@register
@dataclass(frozen=True)
class SourceTarget:
    target: tuple[str, ...] = ()  # the domains or clients that are only tested on; or EACH

    name = "source-target"
    what = "train on clients, test also on the unseen domains named in target; FAA-CLIP"
    every_round = True

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[Training]:
        if self.target == (EACH,):
            every = sorted(set(domains.values()))
            if len(every) < 2 or "" in every:
                raise SettingsError(
                    f'target = "{EACH}" takes every domain in turn, and the clients have '
                    f"{', '.join(map(repr, every))}; name a target, or take data with domains"
                )
            return [self._training(domains, (one,)) for one in every]
        return [self._training(domains, self.target)]

    def _training(self, domains: Mapping[str, str], target: tuple[str, ...]) -> Training:
        away = [id for id in domains if id in target or domains[id] in target]
        rest = [id for id in domains if id not in away]
        if not away or not rest:
            raise SettingsError(
                f"source-target tests on target = {list(target)}, which leaves {len(rest)} "
                f"clients to train and {len(away)} unseen; name one or more domains, but not all "
                "of them"
            )
        return Training(", ".join(target), tuple(rest), tuple(away))

    def table(self, domains: Mapping[str, str], done: Done, generalises: bool) -> Table:
        each = {name: measured(*one, generalises) for name, one in done.items()}
        if self.target != (EACH,):
            (table,) = each.values()
            return table
        out: Table = {}
        for key in next(iter(each.values())):
            if key.startswith(("clients ", "target ")) or key == "average":
                values = [value for one in each.values() if (value := one[key]) is not None]
                out[key] = fmean(values) if values else None
        for name, one in each.items():
            out |= {f"{key}, target {name}": value for key, value in one.items()}
        return out

    def weights(self, who: Who, generalises: bool) -> dict[str, Weights]:
        out: dict[str, dict[tuple[str, str], float]] = {"clients accuracy": {}}
        if generalises:
            out |= {"target accuracy": {}, "average": {}}
        for name, (train, unseen) in who.items():
            groups = {"clients accuracy": train, "target accuracy": unseen}
            groups["average"] = [*train, *unseen]
            for key, weights in out.items():
                for cell, weight in even(name, groups[key]).items():
                    weights[cell] = weight / len(who)
        return dict(out)


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
