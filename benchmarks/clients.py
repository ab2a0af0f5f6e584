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
from figures import peak, report

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
        progress=lambda label, done, total: ends.append(process_time()),
    )
    return {"ms": 1000 * (ends[rounds + 1] - ends[1]) / rounds, "peak": peak() / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", default="fedavg,fedprox,scaffold,fedrep,fedot")
    parser.add_argument("--crowds", default="100,1000")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        method, store, out = args.one
        print(json.dumps(measure(json.loads(method), args.rounds, store, Path(out))))
        return
    for n_clients in args.crowds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            store = save_store(f"{folder}/rows", made(SIZES[n_clients], classes=10))
            for name in args.methods.split(","):
                method = {"name": name, "batch_size": 10 if n_clients == "100" else 32}
                method |= {"blocks": 16} if name == "fedot" else {}
                command = [sys.executable, __file__, "--rounds", str(args.rounds), "--one"]
                command += [json.dumps(method), str(store), f"{folder}/{name}"]
                measurement = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                case = f"{name}, {n_clients} clients"
                report(
                    f"{case}: {measurement['ms']:.0f} ms a round, at most {measurement['peak']:.2f} GB",
                    case,
                    **{"processor ms a round": measurement["ms"], "GB at most": measurement["peak"]},
                )


if __name__ == "__main__":
    main()
