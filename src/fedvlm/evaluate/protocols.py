"""The protocols: who trains, who stays unseen, and what the hits on the test rows add up to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedvlm import seeds
from fedvlm.data.federation import Member
from fedvlm.errors import SettingsError, unknown
from fedvlm.evaluate.metrics import METRICS
from fedvlm.evaluate.scores import Results, Table, accuracy, metric

PROTOCOLS = {
    "leave-one-domain-out": "each domain in turn is unseen; G, P and C as in FedOT",
    "source-target": "train on clients, test also on the unseen domains named in target; FAA-CLIP",
    "own-test": "every client trains and is tested on its own test rows",
    "cross-device": "train on n clients, test on a fixed set of unseen ones",
}


@dataclass(frozen=True)
class Job:
    """One training of a protocol."""

    name: str
    train: tuple[str, ...]
    unseen: tuple[str, ...]


def jobs(
    protocol: str,
    members: Mapping[str, Member],
    *,
    counts: Sequence[int] = (),
    unseen: int = 0,
    target: Sequence[str] = (),
    seed: int = 0,
) -> list[Job]:
    """The trainings a protocol asks for; `counts` and `unseen` are cross-device's numbers.

    `target` names the unseen domains of source-target.
    """
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    ids = list(members)
    if protocol == "own-test":
        return [Job("all", tuple(ids), ())]
    if protocol == "source-target":
        away = [id for id in ids if members[id].domain in target]
        rest = [id for id in ids if id not in away]
        if not away or not rest:
            raise SettingsError(
                f"source-target tests on target = {list(target)}, which leaves {len(rest)} clients "
                f"to train and {len(away)} unseen; name one or more domains, but not all of them"
            )
        return [Job(", ".join(target), tuple(rest), tuple(away))]
    if protocol == "leave-one-domain-out":
        domains = sorted({members[id].domain for id in ids})
        if len(domains) < 2 or "" in domains:
            raise SettingsError(
                f"leave-one-domain-out needs two or more domains; the clients have "
                f"{', '.join(map(repr, domains))}; use protocol = 'own-test', or data with domains"
            )
        return [
            Job(
                domain,
                tuple(id for id in ids if members[id].domain != domain),
                tuple(id for id in ids if members[id].domain == domain),
            )
            for domain in domains
        ]
    most = max(counts, default=0)
    if min(counts, default=0) < 1 or unseen < 1 or most + unseen > len(ids):
        raise SettingsError(
            f"cross-device trains on counts = {list(counts)} clients and tests on unseen = "
            f"{unseen} others, but there are {len(ids)}; both are at least 1 and fit in together"
        )
    # The unseen clients are the same for every seed; who trains is drawn by it.
    order = [ids[i] for i in seeds.numbers("unseen", len(ids)).permutation(len(ids))]
    away, rest = order[:unseen], sorted(order[unseen:])
    drawn = [rest[i] for i in seeds.numbers("training clients", seed).permutation(len(rest))]
    return [Job(f"{count}", tuple(sorted(drawn[:count])), tuple(sorted(away))) for count in counts]


def table(
    protocol: str,
    members: Mapping[str, Member],
    done: Mapping[str, tuple[Job, Results]],
    generalises: bool,
) -> Table:
    """One seed's numbers from all its jobs; a method that shares nothing does not generalise."""
    if protocol == "leave-one-domain-out":
        return _domains(members, done, generalises)
    out: Table = {}
    for job, scores in done.values():
        if protocol == "source-target":
            out |= _target(job, scores, generalises)
        elif protocol == "own-test":
            out["own"] = accuracy(scores, job.train)
            out |= _within(members, job, scores)
            out.update({id: accuracy(scores, [id]) for id in job.train})
        else:
            out[f"unseen, n={job.name}"] = accuracy(scores, job.unseen) if generalises else None
            out[f"own, n={job.name}"] = accuracy(scores, job.train)
    return out


def _within(members: Mapping[str, Member], job: Job, scores: Results) -> Table:
    """Mean and deviation over the clients of each domain that several clients share."""
    out: Table = {}
    for domain in sorted({members[id].domain for id in job.train} - {""}):
        ids = [id for id in job.train if members[id].domain == domain]
        parts = [value for id in ids if (value := accuracy(scores, [id])) is not None]
        if len(parts) > 1:
            out |= {f"mean {domain}": fmean(parts), f"deviation {domain}": stdev(parts)}
    return out


def _target(job: Job, scores: Results, generalises: bool) -> Table:
    """Every metric over the clients and on the target; each client counts the same."""
    out: Table = {}
    for name in METRICS:
        out[f"clients {name}"] = metric(scores, job.train, name)
        out[f"target {name}"] = metric(scores, job.unseen, name) if generalises else None
        if name == "accuracy":  # the last column of the paper's tables
            out["average"] = accuracy(scores, (*job.train, *job.unseen)) if generalises else None
    for id in (*job.train, *job.unseen):
        if id in job.train or generalises:
            out |= {f"{name} {id}": metric(scores, [id], name) for name in METRICS}
    return out


def _domains(
    members: Mapping[str, Member],
    done: Mapping[str, tuple[Job, Results]],
    generalises: bool,
) -> Table:
    a: dict[tuple[str, str], float] = {}
    for held, (_, scores) in done.items():
        for domain in done:
            value = accuracy(scores, [id for id in scores if members[id].domain == domain])
            if value is None:
                raise SettingsError(
                    f"domain {domain} has no test rows; give clients.shares a share for the test"
                )
            a[held, domain] = value
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
