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

from fedvlm.channel import outliers
from fedvlm.data.table import EmbeddedTable
from fedvlm.engines.client import choose_attackers
from fedvlm.engines.loop import finish_training, initial_state, open_engine, run_rounds
from fedvlm.engines.state import Plan
from fedvlm.runner.load import load
from fedvlm.runner.prepare import prepare
from fedvlm.runner.settings import attack_of, build

GOALS = ("sign-flip 10", "scale 5", "noise 10")
NAMED, WRONG = 0.95, 0.05  # shares of runs that name every attacker, and an honest client
CHOSEN_ON = range(100, 120)  # seeds for the limits; the table's begin at 0
SIX = ["dog", "elephant", "giraffe", "horse", "house", "person"]  # the classes with a text vector
IID = {"partition": "dirichlet", "count": 10, "alpha": 100.0}
SETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "demo, iid": ("", {}, IID),
    "pets, iid": ("pets23_vitb32.npz", {}, IID),
    "pacs, domains": (
        "pacs_vitb16.npz",
        {"classes": SIX},
        {"partition": "domain-dirichlet", "count": 3, "alpha": 100.0, "shots": 20},
    ),
    "pets, disjoint": ("pets23_vitb32.npz", {}, {"partition": "pathological", "count": 10}),
}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # for the demo's logit scale, CLIP's
    "fedavg": ({"rounds": 10, "lr": 0.03}, {"rounds": 10, "lr": 5e-4}),
    "fedot": ({"rounds": 5, "lr": 0.01}, {"rounds": 5, "lr": 5e-4}),
    "tofa": ({}, {}),
    "auto": ({}, {}),
    "alone": ({}, {}),  # nothing to attack: what auto should not fall below
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
    "scale 5": {"attack": "scale", "attack_strength": 5.0},
    "noise 10": {"attack": "noise"},
    "label-flip": {"attack": "label-flip"},
    "collude 1.5": {"attack": "collude"},
    "sign-flip 2, within the bound": {"attack": "sign-flip", "attack_strength": 2.0},
}


def opened(name: str, stores: Path) -> EmbeddedTable:
    file, source, _ = SETS[name]
    values: dict[str, Any] = {"method": "alone", "source": source}
    if file:
        values["encoder"] = f"store:{stores / file}"
    return load(build(values), lambda step, done, total: None)[0]


@contextmanager
def overheard() -> Iterator[list[dict[str, Any]]]:
    """What each round's comparison is made of: norms, and cosines of each two clients."""
    rounds_seen: list[dict[str, Any]] = []
    judge = outliers.outlier_scores

    def listen(ids: Sequence[str], dots: Tensor) -> Any:
        norms = dots.diagonal().sqrt()
        unit = dots / norms.clamp(min=1e-300)[:, None] / norms.clamp(min=1e-300)
        pairs = [round(cosine, 4) for cosine in unit[_below(len(ids))].tolist()]
        rounds_seen.append({"ids": list(ids), "norms": norms.tolist(), "cosines": pairs})
        return judge(ids, dots)

    outliers.outlier_scores = listen
    try:
        yield rounds_seen
    finally:
        outliers.outlier_scores = judge


def _below(count: int) -> tuple[Tensor, Tensor]:
    first, second = torch.tril_indices(count, count, -1)
    return first, second


def dots_of(comparison: dict[str, Any]) -> Tensor:
    norms = torch.tensor(comparison["norms"], dtype=torch.float64)
    unit = torch.eye(len(norms), dtype=torch.float64)
    first, second = _below(len(norms))
    unit[first, second] = unit[second, first] = torch.tensor(comparison["cosines"], dtype=torch.float64)
    return unit * norms[:, None] * norms


def measure(
    rows: EmbeddedTable, name: str, method: str, channel: str, attack: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Accuracy by client, who attacks, and what each round's comparison is made of."""
    method_settings = METHODS[method][rows.scale > 50]
    settings = build(
        {
            "method": {"name": method, **method_settings},
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
    state, initial_local = initial_state(world)
    plan = Plan(training.train, ())
    with overheard() as comparisons:
        state = run_rounds(world, engine, plan, state, initial_local, lambda state, line: None)
    outcome = finish_training(world, engine, plan, state, initial_local)
    kind = attack_of(settings)
    bad = choose_attackers(kind, training.train, seed) if kind else set()
    right = {id: fraction_correct(outcome.scores[id]) for id in training.train}
    return {"accuracy": right, "bad": sorted(bad), "seen": comparisons}


def fraction_correct(scores: dict[str, Any]) -> float | None:
    """Fraction of a client's test rows that are classified correctly; None without any."""
    return scores["test_hits"] / scores["test_rows"] if scores["test_rows"] else None


class Runs:
    """Runs by their words, kept in a file."""

    def __init__(self, stores: Path, work: Path, only_made: bool = False) -> None:
        self.only_made = only_made
        self.stores, self.path = stores, work / "poisoning.jsonl"
        work.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.known = {tuple(key): result for key, result in map(json.loads, lines)}
        self.rows: dict[str, EmbeddedTable] = {}

    def get(
        self, name: str, method: str, channel: str, attack: str, attacker_fraction: float, seed: int
    ) -> dict[str, Any]:
        key = (name, method, channel, attack, attacker_fraction, seed)
        if key not in self.known:
            if name not in self.rows:
                self.rows[name] = opened(name, self.stores)
            how = {**ATTACKS[attack], "attacker_fraction": attacker_fraction} if attack else {}
            self.known[key] = measure(self.rows[name], name, method, channel, how, seed)
            with self.path.open("a") as file:
                file.write(json.dumps([key, self.known[key]]) + "\n")
        return dict(self.known[key])


def flagged(run: dict[str, Any], limits: outliers.OutlierLimits) -> set[str]:
    """Who is far in most of its rounds."""
    count: dict[str, list[bool]] = {}
    for comparison in run["seen"]:
        for id, score in outliers.outlier_scores(comparison["ids"], dots_of(comparison), limits).items():
            count.setdefault(id, []).append(bool(score["far"]))
    return {id for id, flags in count.items() if sum(flags) > limits.max_outlier_fraction * len(flags)}


def rates(runs: list[dict[str, Any]], limits: outliers.OutlierLimits = outliers.DEFAULT_LIMITS) -> tuple[float, float]:
    """Shares of runs in which every attacker is named, and in which an honest client is."""
    pairs = [(set(run["bad"]), flagged(run, limits)) for run in runs]
    return fmean(bad <= outliers for bad, outliers in pairs), fmean(bool(outliers - bad) for bad, outliers in pairs)


def choose(runs: Runs, sets: list[str], methods: list[str], attacker_fractions: list[float]) -> None:
    """Limits of the flags by other seeds: how far they miss the goals, summed over the cells."""
    cells: list[list[dict[str, Any]]] = []
    for name, method in product(sets, methods):
        cells.append([runs.get(name, method, "mean", "", 0.0, seed) for seed in CHOSEN_ON])
        for attack, attacker_fraction in product(GOALS, attacker_fractions):
            made = [runs.get(name, method, "trimmed", attack, attacker_fraction, seed) for seed in CHOSEN_ON]
            cells.append(made)
    print("| long | short | norm | below | cosine | spread | often | missed | named wrongly |")
    print("|---|---|---|---|---|---|---|---|---|")
    candidates = []
    tried = ((2.5, 3.0, 4.0), (4.0, 6.0), (2.0, 3.0), (0.3, 0.5), (0.7,), (6.0,), (0.5, 0.6, 0.7))
    for values in product(*tried):
        limits = outliers.OutlierLimits(*values)
        pairs = [rates(cell_runs, limits) for cell_runs in cells]
        missed = sum(max(0.0, NAMED - named) for named, _ in pairs)
        wrong = sum(max(0.0, rate - WRONG) for _, rate in pairs)
        candidates.append((missed + wrong, missed, wrong, values))
    for _, missed, wrong, values in sorted(candidates)[:10]:
        words = " | ".join(f"{rate:g}" for rate in values)
        print(f"| {words} | {missed:.2f} | {wrong:.2f} |")


def format_gap(gap: float, cell: float) -> str:
    """An accuracy in per cent, and what it lost."""
    return f"{100 * cell:.1f} ({100 * gap:+.1f})"


def table(
    runs: Runs,
    sets: list[str],
    methods: list[str],
    defences: list[str],
    attacks: list[str],
    attacker_fraction: float,
    seeds: int,
) -> None:
    """Each cell: accuracy of the honest, and its difference to theirs under the mean, unattacked.

    Cells whose runs are not there are made; with `--only-made` they are left empty.
    """
    print(f"\n{attacker_fraction:.0%} of the clients attack; {seeds} seeds\n")
    head = ["set", "method", "attack", *defences, "attackers named", "honest named"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, method in product(sets, methods):
        for attack in ("", *attacks):
            part = attacker_fraction if attack else 0.0
            cells, pairs = [], []
            for channel in defences:
                keys = [(name, method, channel, attack, part, seed) for seed in range(seeds)]
                if runs.only_made and any(key not in runs.known for key in keys):
                    cells.append("-")
                    continue
                cell_runs = [runs.get(*key) for key in keys]
                plain = [runs.get(name, method, "mean", "", 0.0, seed) for seed in range(seeds)]
                pairs = [
                    (of_honest(a, a["bad"]), of_honest(b, a["bad"])) for a, b in zip(cell_runs, plain, strict=True)
                ]
                mean, before = (fmean(values) for values in zip(*pairs, strict=True))
                cells.append(format_gap(mean - before, mean))
                pairs.append(rates(cell_runs))
            if not pairs:
                continue
            named = f"{100 * fmean(values[0] for values in pairs):.0f} %" if attack else "-"
            wrong = f"{100 * fmean(values[1] for values in pairs):.0f} %"
            print(
                "| " + " | ".join([name, method, attack or "none", *cells, named, wrong]) + " |",
                flush=True,
            )


def of_honest(run: dict[str, Any], bad: Sequence[str]) -> float:
    return fmean(accuracy for id, accuracy in run["accuracy"].items() if id not in bad and accuracy is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/poisoning"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--sets", default="demo, iid;pets, iid;pacs, domains")
    parser.add_argument("--methods", default="fedavg,tofa")
    parser.add_argument("--shares", default="0.1,0.3")
    parser.add_argument("--defences", default=",".join(DEFENCES))
    parser.add_argument("--attacks", default=",".join(attack.split(",")[0] for attack in ATTACKS))
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--only-made", action="store_true", help="print, and run nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sets = [name for name in SETS if name in args.sets.split(";")]
    methods = args.methods.split(",")
    attacks = [name for name in ATTACKS if name.split(",")[0] in args.attacks.split(",")]
    runs = Runs(args.stores, args.work, args.only_made)
    attacker_fractions = [float(attack) for attack in args.shares.split(",")]
    if args.choose:
        choose(runs, sets, methods, attacker_fractions)
        return
    for attacker_fraction in attacker_fractions:
        table(runs, sets, methods, args.defences.split(","), attacks, attacker_fraction, args.seeds)


if __name__ == "__main__":
    main()
