"""The protocols: who trains, who stays unseen, and what the hits on the test rows add up to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvlm import seeds
from fedvlm.data.federation import Member
from fedvlm.errors import SettingsError, unknown

PROTOCOLS = {
    "leave-one-domain-out": "each domain in turn is unseen; G, P and C as in FedOT",
    "own-test": "every client trains and is tested on its own test rows",
    "cross-device": "train on n clients, test on a fixed set of unseen ones",
}
Results = Mapping[str, Mapping[str, float]]  # scores by client
Table = dict[str, float | None]  # column -> share of hits, None where it is not defined


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
    seed: int = 0,
) -> list[Job]:
    """The trainings a protocol asks for; `counts` and `unseen` are cross-device's numbers."""
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    ids = list(members)
    if protocol == "own-test":
        return [Job("all", tuple(ids), ())]
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


def reference(method: Any, members: Mapping[str, Member], job: Job) -> NDArray[np.int64]:
    """The unlabelled rows a method with a `reference` adapts to; none for other methods.

    "public": the unseen clients' rows that nobody is tested on; "target": test rows, which makes
    the method transductive.
    """
    kind = getattr(method, "reference", None)
    if kind is None:
        return np.zeros(0, np.int64)
    if kind == "target":
        rows = [members[id].test for id in job.unseen or job.train]
    else:
        rows = [part for id in job.unseen for part in (members[id].train, members[id].validation)]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *rows]))


def accuracy(scores: Results, ids: Iterable[str], split: str = "test") -> float | None:
    """Mean over clients of each one's share of hits; None where no client has rows."""
    parts = [
        scores[id][f"{split}_hits"] / scores[id][f"{split}_rows"]
        for id in sorted(ids)
        if id in scores and scores[id][f"{split}_rows"]
    ]
    return fmean(parts) if parts else None


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
        if protocol == "own-test":
            out["own"] = accuracy(scores, job.train)
            out.update({id: accuracy(scores, [id]) for id in job.train})
        else:
            out[f"unseen, n={job.name}"] = accuracy(scores, job.unseen) if generalises else None
            out[f"own, n={job.name}"] = accuracy(scores, job.train)
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


def spread(tables: Sequence[Table]) -> dict[str, tuple[float | None, float | None]]:
    """Mean and sample deviation over seeds, column by column; no deviation for one seed."""
    out: dict[str, tuple[float | None, float | None]] = {}
    for key in tables[0]:
        values = [value for one in tables if (value := one.get(key)) is not None]
        mean = fmean(values) if values else None
        out[key] = (mean, stdev(values) if len(values) > 1 else None)
    return out
