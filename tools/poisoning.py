"""What attackers do to a federation, what the channel keeps of it, and whom it names.

python -m tools.poisoning --stores FOLDER [--seeds 20] [--sets "pacs, domains;demo, iid"]
python -m tools.poisoning --stores FOLDER --choose
Accuracy is that of the honest clients' test rows after the last round. `--choose` tries limits of
the flags on seeds that the table does not use. Runs that were made are kept in --work.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedvlm.channel import compare
from fedvlm.data.table import Embedded
from fedvlm.engines.attackers import attackers
from fedvlm.engines.loop import finish, open_engine, start, train
from fedvlm.engines.state import Plan
from fedvlm.evaluate.scores import accuracy
from fedvlm.runner.load import load
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import attack_of, build

CHOSEN_ON = range(100, 105)  # seeds for the limits; the table's begin at 0
SIX = ["dog", "elephant", "giraffe", "horse", "house", "person"]  # the classes with a text vector
IID = {"by": "dirichlet", "count": 10, "alpha": 100.0}
SETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "demo, iid": ("", {}, IID),
    "pets, iid": ("pets23_vitb32.npz", {}, IID),
    "pacs, domains": (
        "pacs_vitb16.npz",
        {"classes": SIX},
        {"by": "domain-dirichlet", "count": 3, "alpha": 100.0, "shots": 20},
    ),
    "pets, disjoint": ("pets23_vitb32.npz", {}, {"by": "pathological", "count": 10}),
}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # for the demo's logit scale, CLIP's
    "fedavg": ({"rounds": 10, "rate": 0.03}, {"rounds": 10, "rate": 5e-4}),
    "fedot": ({"rounds": 5, "rate": 0.01}, {"rounds": 5, "rate": 5e-4}),
    "tofa": ({}, {}),
    "auto": ({"rounds": 6}, {"rounds": 6}),
}
DEFENCES: dict[str, dict[str, Any]] = {
    "mean": {},
    "bound": {"bound": "median"},
    "median": {"aggregation": "median"},
    "trimmed": {"aggregation": "trimmed"},
    "krum": {"aggregation": "krum"},
    "geometric": {"aggregation": "geometric-median"},
}
ATTACKS: dict[str, dict[str, Any]] = {
    "sign-flip 10": {"attack": "sign-flip"},
    "scale 10": {"attack": "scale"},
    "scale 5": {"attack": "scale", "strength": 5.0},
    "noise 10": {"attack": "noise"},
    "label-flip": {"attack": "label-flip"},
    "collude 1.5": {"attack": "collude"},
    "sign-flip 2, within the bound": {"attack": "sign-flip", "strength": 2.0},
}


def opened(name: str, stores: Path) -> Embedded:
    file, source, _ = SETS[name]
    values: dict[str, Any] = {"method": "alone", "source": source}
    if file:
        values["encoder"] = f"store:{stores / file}"
    return load(build(values), lambda what, done, total: None)[0]


@contextmanager
def overheard() -> Iterator[list[dict[str, Any]]]:
    """What each round's comparison is made of: norms, and cosines of each two clients."""
    heard: list[dict[str, Any]] = []
    judge = compare.apart

    def listen(ids: Sequence[str], dots: Tensor) -> Any:
        norms = dots.diagonal().sqrt()
        unit = dots / norms.clamp(min=1e-300)[:, None] / norms.clamp(min=1e-300)
        pairs = [round(one, 4) for one in unit[_below(len(ids))].tolist()]
        heard.append({"ids": list(ids), "norms": norms.tolist(), "cosines": pairs})
        return judge(ids, dots)

    compare.apart = listen
    try:
        yield heard
    finally:
        compare.apart = judge


def _below(count: int) -> tuple[Tensor, Tensor]:
    first, second = torch.tril_indices(count, count, -1)
    return first, second


def dots_of(heard: dict[str, Any]) -> Tensor:
    norms = torch.tensor(heard["norms"], dtype=torch.float64)
    unit = torch.eye(len(norms), dtype=torch.float64)
    first, second = _below(len(norms))
    unit[first, second] = unit[second, first] = torch.tensor(heard["cosines"], dtype=torch.float64)
    return unit * norms[:, None] * norms


def measure(
    rows: Embedded, name: str, method: str, channel: str, attack: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Accuracy by client, who attacks, and what each round's comparison is made of."""
    own = METHODS[method][rows.scale > 50]
    settings = build(
        {
            "method": {"name": method, **own},
            "clients": SETS[name][2],
            "protocol": "own-test",
            "allow_small": True,
            "channel": DEFENCES[channel],
            "seeds": [seed],
            **attack,
        }
    )
    prepared = prepare(settings, rows, seed)
    (training,) = prepared.trainings
    world = prepared.world(training)
    engine = open_engine("batched", world, 1, settings.method.rounds)
    state, fresh = start(world)
    plan = Plan(training.train, ())
    with overheard() as seen:
        state = train(world, engine, plan, state, fresh, lambda state, line: None)
    outcome = finish(world, engine, plan, state, fresh)
    kind = attack_of(settings)
    bad = attackers(kind, training.train, seed) if kind else set()
    right = {id: accuracy(outcome.scores, [id], "test") for id in training.train}
    return {"accuracy": right, "bad": sorted(bad), "seen": seen}


class Runs:
    """Runs by their words, kept in a file."""

    def __init__(self, stores: Path, work: Path) -> None:
        self.stores, self.path = stores, work / "poisoning.jsonl"
        work.mkdir(parents=True, exist_ok=True)
        kept = self.path.read_text().splitlines() if self.path.exists() else []
        self.known = {tuple(key): one for key, one in map(json.loads, kept)}
        self.rows: dict[str, Embedded] = {}

    def get(
        self, name: str, method: str, channel: str, attack: str, share: float, seed: int
    ) -> dict[str, Any]:
        key = (name, method, channel, attack, share, seed)
        if key not in self.known:
            if name not in self.rows:
                self.rows[name] = opened(name, self.stores)
            how = {**ATTACKS[attack], "attackers": share} if attack else {}
            self.known[key] = measure(self.rows[name], name, method, channel, how, seed)
            with self.path.open("a") as file:
                file.write(json.dumps([key, self.known[key]]) + "\n")
        return dict(self.known[key])


def flagged(run: dict[str, Any], *limits: float) -> set[str]:
    """Who is far in more than half of its rounds."""
    count: dict[str, list[bool]] = {}
    for one in run["seen"]:
        if one:
            ratio, cosines = torch.tensor(list(one.values()), dtype=torch.float64).unbind(1)
            for id, far in zip(one, outside(ratio, cosines, *limits).tolist(), strict=True):
                count.setdefault(id, []).append(far)
    return {id for id, many in count.items() if 2 * sum(many) > len(many)}


def rates(runs: list[dict[str, Any]], *limits: float) -> tuple[float, float]:
    """Shares of runs in which every attacker is named, and in which an honest client is."""
    found = [(set(run["bad"]), flagged(run, *limits)) for run in runs]
    return fmean(bad <= far for bad, far in found), fmean(bool(far - bad) for bad, far in found)


def choose(runs: Runs, sets: list[str], methods: list[str]) -> None:
    """Limits of the flags by other seeds: the attacks with a goal, one of ten."""
    goals = ("sign-flip 10", "scale 5", "noise 10")
    made: list[dict[str, Any]] = []
    plain: list[dict[str, Any]] = []
    for name, method, seed in product(sets, methods, CHOSEN_ON):
        plain.append(runs.get(name, method, "mean", "", 0.0, seed))
        made += [runs.get(name, method, "trimmed", attack, 0.1, seed) for attack in goals]
    print("| norm | cosine | deviations | attackers named | honest named | honest, no attack |")
    print("|---|---|---|---|---|---|")
    for limits in product((2.0, 2.5, 3.0, 4.0), (0.2, 0.3, 0.4, 0.5), (3.0, 4.0, 6.0)):
        named, wrong = rates(made, *limits)
        alone = rates(plain, *limits)[1]
        words = " | ".join(f"{one:g}" for one in limits)
        print(f"| {words} | {100 * named:.1f} | {100 * wrong:.1f} | {100 * alone:.1f} |")


def table(
    runs: Runs,
    sets: list[str],
    methods: list[str],
    defences: list[str],
    attacks: list[str],
    share: float,
    seeds: int,
) -> None:
    print(
        f"\n{share:.0%} of the clients attack; {seeds} seeds; accuracy of the honest in per cent\n"
    )
    head = ["set", "method", "attack", *defences, "attackers named", "honest named"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, method in product(sets, methods):
        for attack in ("", *attacks):
            part = share if attack else 0.0
            made = {
                channel: [runs.get(name, method, channel, attack, part, s) for s in range(seeds)]
                for channel in defences
            }
            cells = [f"{100 * fmean(r['accuracy'] for r in many):.1f}" for many in made.values()]
            found = [rates(many) for many in made.values()]  # over all defences
            named = f"{100 * fmean(one[0] for one in found):.0f} %" if attack else "-"
            wrong = f"{100 * fmean(one[1] for one in found):.0f} %"
            words = [name, method, attack or "none", *cells, named, wrong]
            print("| " + " | ".join(words) + " |", flush=True)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--stores", type=Path, required=True)
    ask.add_argument("--work", type=Path, default=Path("runs/poisoning"))
    ask.add_argument("--seeds", type=int, default=20)
    ask.add_argument("--sets", default="demo, iid;pets, iid;pacs, domains")
    ask.add_argument("--methods", default="fedavg,tofa")
    ask.add_argument("--shares", default="0.1,0.3")
    ask.add_argument("--defences", default=",".join(DEFENCES))
    ask.add_argument("--attacks", default=",".join(one.split(",")[0] for one in ATTACKS))
    ask.add_argument("--choose", action="store_true")
    told = ask.parse_args()
    torch.set_num_threads(1)
    sets = [name for name in SETS if name in told.sets.split(";")]
    methods = told.methods.split(",")
    attacks = [name for name in ATTACKS if name.split(",")[0] in told.attacks.split(",")]
    runs = Runs(told.stores, told.work)
    if told.choose:
        choose(runs, sets, methods)
        return
    for share in map(float, told.shares.split(",")):
        table(runs, sets, methods, told.defences.split(","), attacks, share, told.seeds)


if __name__ == "__main__":
    main()
