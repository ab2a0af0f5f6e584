"""Each domain in turn is unseen: G on it, P on the others, C on all, as in FedOT."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from fedvlm.errors import SettingsError
from fedvlm.evaluate.metrics import Table, mean_accuracy
from fedvlm.evaluate.protocols.contract import Participants, Training, TrainingResults, Weights, register


@register
@dataclass(frozen=True)
class LeaveOneDomainOut:
    name = "leave-one-domain-out"
    summary = "each domain in turn is unseen; G, P and C as in FedOT"
    every_round = False

    def trainings(self, domains: Mapping[str, str], seed: int) -> list[Training]:
        domain_names = sorted(set(domains.values()))
        if len(domain_names) < 2 or "" in domain_names:
            found = ", ".join(map(repr, domain_names))
            problem = f"leave-one-domain-out needs two or more domains; the clients have {found}"
            raise SettingsError(f"{problem}; use protocol = 'own-test', or data with domains")
        ids = {target: tuple(id for id, domain in domains.items() if domain == target) for target in domain_names}
        rest = {target: tuple(id for id, domain in domains.items() if domain != target) for target in domain_names}
        return [Training(target, rest[target], ids[target]) for target in domain_names]

    def table(self, domains: Mapping[str, str], done: TrainingResults, generalises: bool) -> Table:
        a = _cells(domains, done)
        n = len(done)
        g = fmean(a[domain, domain] for domain in done)
        p = fmean(a[held, domain] for held in done for domain in done if held != domain)
        c = fmean(a.values())
        assert abs(c - (g + (n - 1) * p) / n) < 1e-9, "C is not (G + (N-1) P) / N"
        out: Table = {"G": g if generalises else None, "P": p, "C": c if generalises else None}
        for domain in done:
            out[f"G {domain}"] = a[domain, domain] if generalises else None
            out[f"P {domain}"] = fmean(a[held, domain] for held in done if held != domain)
        return out

    def weights(self, participants: Participants, generalises: bool) -> dict[str, Weights]:
        domains = {id: name for name, (_, unseen) in participants.items() for id in unseen}
        sizes = {name: len(unseen) for name, (_, unseen) in participants.items()}
        n = len(participants)
        cells = {(name, id): (domains[id] == name, sizes[domains[id]]) for name in participants for id in domains}
        out = {"P": {cell: 1 / (n * (n - 1) * k) for cell, (is_unseen, k) in cells.items() if not is_unseen}}
        if generalises:
            out["G"] = {cell: 1 / (n * k) for cell, (is_unseen, k) in cells.items() if is_unseen}
            out["C"] = {cell: 1 / (n * n * k) for cell, (_, k) in cells.items()}
        return dict(out)


def _cells(domains: Mapping[str, str], done: TrainingResults) -> dict[tuple[str, str], float]:
    """A[held][domain]: compute the accuracy on a domain's test samples when `held` was left out."""
    a: dict[tuple[str, str], float] = {}
    for held, (_, scores) in done.items():
        for domain in done:
            value = mean_accuracy(scores, [id for id in scores if domains[id] == domain])
            if value is None:
                raise SettingsError(f"domain {domain} has no test samples; set a ratio for test in clients.ratios")
            a[held, domain] = value
    return a
