"""The protocols: who trains, who stays unseen, and what the hits on the test rows add up to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedvlm import seeds
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
class Training:
    """One training of a protocol."""

    name: str
    train: tuple[str, ...]
    unseen: tuple[str, ...]


def trainings(
    protocol: str,
    domains: Mapping[str, str],
    *,
    counts: Sequence[int] = (),
    unseen: int = 0,
    target: Sequence[str] = (),
    seed: int = 0,
) -> list[Training]:
    """The trainings a protocol asks for, of clients by id with the domain of each.

    `counts` and `unseen` are cross-device's numbers, `target` names the unseen domains of
    source-target.
    """
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    if protocol == "own-test":
        return [Training("all", tuple(domains), ())]
    if protocol == "source-target":
        return [_source_target(domains, target)]
    if protocol == "leave-one-domain-out":
        return _one_out(domains)
    return _cross_device(list(domains), counts, unseen, seed)


def _source_target(domains: Mapping[str, str], target: Sequence[str]) -> Training:
    away = [id for id in domains if domains[id] in target]
    rest = [id for id in domains if domains[id] not in target]
    if not away or not rest:
        raise SettingsError(
            f"source-target tests on target = {list(target)}, which leaves {len(rest)} clients "
            f"to train and {len(away)} unseen; name one or more domains, but not all of them"
        )
    return Training(", ".join(target), tuple(rest), tuple(away))


def _one_out(domains: Mapping[str, str]) -> list[Training]:
    every = sorted(set(domains.values()))
    if len(every) < 2 or "" in every:
        raise SettingsError(
            f"leave-one-domain-out needs two or more domains; the clients have "
            f"{', '.join(map(repr, every))}; use protocol = 'own-test', or data with domains"
        )
    return [
        Training(
            one,
            tuple(id for id, domain in domains.items() if domain != one),
            tuple(id for id, domain in domains.items() if domain == one),
        )
        for one in every
    ]


def _cross_device(
    ids: Sequence[str], counts: Sequence[int], unseen: int, seed: int
) -> list[Training]:
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
    return [
        Training(f"{count}", tuple(sorted(drawn[:count])), tuple(sorted(away))) for count in counts
    ]


def table(
    protocol: str,
    domains: Mapping[str, str],
    done: Mapping[str, tuple[Training, Results]],
    generalises: bool,
) -> Table:
    """One seed's numbers; a method that trains and shares nothing does not generalise."""
    if protocol == "leave-one-domain-out":
        return _left_out(domains, done, generalises)
    out: Table = {}
    for training, scores in done.values():
        if protocol == "source-target":
            out |= _target(training, scores, generalises)
        elif protocol == "own-test":
            out["own"] = accuracy(scores, training.train)
            out |= _within(domains, training, scores)
            out.update({id: accuracy(scores, [id]) for id in training.train})
        else:
            out[f"unseen, n={training.name}"] = (
                accuracy(scores, training.unseen) if generalises else None
            )
            out[f"own, n={training.name}"] = accuracy(scores, training.train)
    return out


def _within(domains: Mapping[str, str], training: Training, scores: Results) -> Table:
    """Mean and deviation over the clients of each domain that several clients share."""
    out: Table = {}
    for domain in sorted({domains[id] for id in training.train} - {""}):
        ids = [id for id in training.train if domains[id] == domain]
        parts = [value for id in ids if (value := accuracy(scores, [id])) is not None]
        if len(parts) > 1:
            out |= {f"mean {domain}": fmean(parts), f"deviation {domain}": stdev(parts)}
    return out


def _target(training: Training, scores: Results, generalises: bool) -> Table:
    """Every metric over the clients and on the target; each client counts the same."""
    out: Table = {}
    for name in METRICS:
        out[f"clients {name}"] = metric(scores, training.train, name)
        out[f"target {name}"] = metric(scores, training.unseen, name) if generalises else None
        if name == "accuracy":  # the last column of the paper's tables
            out["average"] = (
                accuracy(scores, (*training.train, *training.unseen)) if generalises else None
            )
    for id in (*training.train, *training.unseen):
        if id in training.train or generalises:
            out |= {f"{name} {id}": metric(scores, [id], name) for name in METRICS}
    return out


def _left_out(
    domains: Mapping[str, str],
    done: Mapping[str, tuple[Training, Results]],
    generalises: bool,
) -> Table:
    a: dict[tuple[str, str], float] = {}
    for held, (_, scores) in done.items():
        for domain in done:
            value = accuracy(scores, [id for id in scores if domains[id] == domain])
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
