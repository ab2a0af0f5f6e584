"""Train on clients and test also on the unseen ones named in target; FAA-CLIP."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import METRICS, Results, Table, mean_accuracy, mean_metric
from fedvlm.evaluate.protocols import contract

EVERY_DOMAIN = "each"  # instead of a target: every domain in turn


@contract.register
@dataclass(frozen=True)
class SourceTarget:
    target: tuple[str, ...] = ()  # domains or clients that are only tested on; or "each"

    name = "source-target"
    summary = "train on clients, test also on the unseen domains named in target; FAA-CLIP"
    every_round = True

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[contract.Training]:
        if self.target == (EVERY_DOMAIN,):
            domain_names = sorted(set(domains.values()))
            if len(domain_names) < 2 or "" in domain_names:
                found = ", ".join(map(repr, domain_names))
                problem = f'target = "{EVERY_DOMAIN}" takes every domain in turn, and the clients have {found}'
                raise SettingsError(f"{problem}; name a target, or use data with domains")
            return [self._training(domains, (domain,)) for domain in domain_names]
        return [self._training(domains, self.target)]

    def _training(self, domains: Mapping[str, str], target: tuple[str, ...]) -> contract.Training:
        held_out = [id for id in domains if id in target or domains[id] in target]
        rest = [id for id in domains if id not in held_out]
        if not held_out or not rest:
            left = f"leaves {len(rest)} clients to train and {len(held_out)} unseen"
            problem = f"source-target tests on target = {list(target)}, which {left}"
            raise SettingsError(f"{problem}; name one or more domains, but not all of them")
        return contract.Training(", ".join(target), tuple(rest), tuple(held_out))

    def table(self, domains: Mapping[str, str], done: contract.TrainingResults, generalises: bool) -> Table:
        tables = {name: metric_table(*entry, generalises) for name, entry in done.items()}
        if self.target != (EVERY_DOMAIN,):
            (table,) = tables.values()
            return table
        out: Table = {}
        for key in next(iter(tables.values())):
            if key.startswith(("clients ", "target ")) or key == "average":
                values = [value for entry in tables.values() if (value := entry[key]) is not None]
                out[key] = fmean(values) if values else None
        for name, entry in tables.items():
            out |= {f"{key}, target {name}": value for key, value in entry.items()}
        return out

    def weights(self, participants: contract.Participants, generalises: bool) -> dict[str, contract.Weights]:
        out: dict[str, dict[tuple[str, str], float]] = {"clients accuracy": {}}
        if generalises:
            out |= {"target accuracy": {}, "average": {}}
        for name, (train, unseen) in participants.items():
            groups = {"clients accuracy": train, "target accuracy": unseen}
            groups["average"] = [*train, *unseen]
            for key, weights in out.items():
                for cell, weight in contract.uniform_weights(name, groups[key]).items():
                    weights[cell] = weight / len(participants)
        return dict(out)


def metric_table(training: contract.Training, scores: Results, generalises: bool) -> Table:
    """Return every metric averaged over the clients and on the target, with equal weights."""
    out: Table = {}
    everyone = (*training.train, *training.unseen)
    for name in METRICS:
        out[f"clients {name}"] = mean_metric(scores, training.train, name)
        out[f"target {name}"] = mean_metric(scores, training.unseen, name) if generalises else None
        if name == "accuracy":  # the last column of the paper's tables
            out["average"] = mean_accuracy(scores, everyone) if generalises else None
    for id in everyone:
        if id in training.train or generalises:
            out |= {f"{name} {id}": mean_metric(scores, [id], name) for name in METRICS}
    return out
