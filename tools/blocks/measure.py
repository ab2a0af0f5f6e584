"""FedOT's `blocks = "auto"` beside fixed numbers of blocks, on five data sets in two protocols.

python -m tools.blocks.measure --stores FOLDER --seeds 5 [--sets pets] [--rounds 30] [--by test]
Designs are compared by validation rows, which is the default; --by test is for the last look. The
rate is chosen on validation rows too, for every set, number of blocks and seed. What was trained
is kept in --work, so a second call trains only what is missing. One core.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.data.table import EmbeddedTable
from fedvlm.runner.load import load
from fedvlm.runner.settings import build
from fedvlm.storage.files import write_file
from tools.auto.measure import LARGE, RATES
from tools.auto.sets import SIX, silent
from tools.auto.table import interval
from tools.training import groups, share, trained

BLOCKS: tuple[int | str, ...] = (1, 8, 64, "auto")
COLUMNS = ("r = 1", "8", "64", "auto", "auto less the best r", "cost by r = 1", "clients chose")
DOMAINS = {"partition": "domain"}
MIXED = {"partition": "dirichlet", "count": 4, "alpha": 1.0}  # where a set has no domains
DISJOINT = {"partition": "pathological", "count": 8}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "pacs": ("pacs_vitb16.npz", {"classes": SIX}),
    "pets": ("pets23_vitb32.npz", {}),
    "caltech": ("caltech101_vitb32.npz", {}),
    "flowers": ("flowers102_vitb32.npz", {}),
}


@dataclass(frozen=True)
class Cell:
    name: str
    clients: dict[str, Any]
    rows: Callable[[], EmbeddedTable]


def cells(stores: Path) -> Iterator[Cell]:
    """Each data set with clients that see the same classes, and with disjoint ones."""

    def rows(values: dict[str, Any]) -> EmbeddedTable:
        return load(build({"method": "fedavg", **values}), silent)[0]

    def stored(file: str, source: dict[str, Any]) -> Callable[[], EmbeddedTable]:
        return lambda: rows({"encoder": f"store:{stores / file}", "source": source})

    yield Cell("demo, domains", DOMAINS, lambda: rows({}))
    yield Cell("demo, disjoint", DISJOINT, lambda: rows({}))
    for name, (file, source) in FILES.items():
        if (stores / file).exists():
            alike = DOMAINS if name == "pacs" else MIXED
            disjoint = {**DISJOINT, "count": 3} if name == "pacs" else DISJOINT
            kind = "domains" if name == "pacs" else "mixed"
            yield Cell(f"{name}, {kind}", alike, stored(file, source))
            yield Cell(f"{name}, disjoint", disjoint, stored(file, source))


def best(cell: Cell, rows: EmbeddedTable, blocks: int | str, seed: int, told: Any) -> dict[str, Any]:
    """The training whose rate did best on validation rows; its cost is that of this one alone."""
    head = "random" if rows.text is None else "text"
    rates = RATES["fedot"][rows.scale > LARGE][-told.rates :]
    more = {"rounds": told.rounds, "head": head, "tau": rows.scale, "blocks": blocks}
    tried = []
    for rate in rates:
        method = {"name": "fedot", "lr": rate, **more}
        hits, local = trained(rows, cell.clients, method, seed)
        chosen = [int(one["leader"]) if "leader" in one else len(one["skew"]) for one in local]
        tried.append({**hits, "blocks": chosen})
    return max(tried, key=lambda one: share(one["validation"]))


def line(name: str, found: dict[str, list[dict[str, Any]]], by: str) -> str:
    """Accuracies, auto less the best fixed number with its interval, and their costs' ratio."""
    scores = {key: 100 * float(np.mean([share(s[by]) for s in v])) for key, v in found.items()}
    first = max((key for key in scores if key != "auto"), key=scores.__getitem__)
    gap, low, high = interval(groups(found["auto"], by), groups(found[first], by))
    spent = {key: sum(s["seconds"] for s in found[key]) for key in ("1", "auto")}
    chosen = [b for s in found["auto"] for b in s["blocks"]]
    counts = ", ".join(f"{chosen.count(b)} of r = {b}" for b in sorted(set(chosen)))
    cells = [f"{value:.2f}" for value in scores.values()]
    cells += [f"{gap:+.2f} [{low:+.2f}, {high:+.2f}]", f"{spent['auto'] / spent['1']:.2f}", counts]
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/blocks"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rates", type=int, default=3, help="how many, the largest ones")
    parser.add_argument("--sets", default="", help="beginnings of names, with commas")
    parser.add_argument("--by", choices=("validation", "test"), default="validation")
    told = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {told.by} rows, % | " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---:|" * (len(COLUMNS) - 1) + "---|")
    for cell in cells(told.stores):
        if not cell.name.startswith(tuple(told.sets.split(","))):
            continue
        rows, found = None, dict[str, list[dict[str, Any]]]()
        for blocks in BLOCKS:
            for seed in range(told.seeds):
                key = f"{cell.name} {blocks} {seed} {told.rounds} {told.rates}"
                file = told.work / f"{key.replace(', ', '-').replace(' ', '-')}.json"
                if not file.exists():
                    rows = rows or cell.rows()
                    write_file(file, json.dumps(best(cell, rows, blocks, seed, told)).encode())
                found.setdefault(str(blocks), []).append(json.loads(file.read_text()))
        print(line(cell.name, found, told.by), flush=True)


if __name__ == "__main__":
    main()
