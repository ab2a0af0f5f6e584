"""CPU time of a round of many small clients, and the memory of the run, on embeddings it makes.

python benchmarks/clients.py [--rounds 5] [--methods fedavg,fedprox] [--crowds 100,1000]
100 clients of 82 rows (50 to train on) in minibatches of 10, and 1,000 clients of 5 to 500 rows;
ten classes, 512 numbers a row, all of them take part. `fedvlm.run` on a store of embeddings, each
case in a process of its own, so that its peak is its own. One core, CPU time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import torch
from federation import made
from figures import peak, say

import fedvlm
from fedvlm.encoders.store import save_store

SIZES = {
    "100": {f"{i:03}": 82 for i in range(100)},
    "1000": {f"{i:03}": 5 + (i * 331) % 496 for i in range(1000)},
}


def measure(method: dict[str, Any], rounds: int, store: str, out: Path) -> dict[str, float]:
    """Milliseconds of CPU time of one round, the first left out, and the peak of the whole run."""
    torch.set_num_threads(1)
    ends: list[float] = []
    fedvlm.run(
        {**method, "rounds": rounds + 1},
        encoder=f"store:{store}",
        protocol="own-test",
        clients={"partition": "own"},
        workers=1,
        out=out,
        progress=lambda what, done, total: ends.append(process_time()),
    )
    return {"ms": 1000 * (ends[rounds + 1] - ends[1]) / rounds, "peak": peak() / 1e3}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--methods", default="fedavg,fedprox,scaffold,fedrep,fedot")
    ask.add_argument("--crowds", default="100,1000")
    ask.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = ask.parse_args()
    if args.one:
        method, store, out = args.one
        print(json.dumps(measure(json.loads(method), args.rounds, store, Path(out))))
        return
    for crowd in args.crowds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            store = save_store(f"{folder}/rows", made(SIZES[crowd], classes=10))
            for name in args.methods.split(","):
                method = {"name": name, "batch_size": 10 if crowd == "100" else 32}
                method |= {"blocks": 16} if name == "fedot" else {}
                command = [sys.executable, __file__, "--rounds", str(args.rounds), "--one"]
                command += [json.dumps(method), str(store), f"{folder}/{name}"]
                found = json.loads(
                    subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
                )
                case = f"{name}, {crowd} clients"
                say(
                    f"{case}: {found['ms']:.0f} ms a round, at most {found['peak']:.2f} GB",
                    case,
                    **{"processor ms a round": found["ms"], "GB at most": found["peak"]},
                )


if __name__ == "__main__":
    main()
