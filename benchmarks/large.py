"""Wall-clock time and memory of whole runs of large problems: many classes, and wide embeddings.

python benchmarks/large.py [--methods ridge,auto] [--problems classes,dimensions]
1,000 classes x 1,024 dimensions x 50 clients with 100,000 samples, and 20 classes x 4,096 dimensions x 10 clients with
20,000. `fedvlm.run` on a store of embeddings with two workers, each case in a process of its own. The goal is 90 s and
3 GB for each.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

import psutil
from federation import made
from figures import report

import fedvlm
from fedvlm.encoders.store import save_store

PROBLEMS = {"classes": (1000, 1024, 50, 2000), "dimensions": (20, 4096, 10, 2000)}  # samples are those of a client
MAX_SECONDS = 1800


def run(method: str, store: str, out: Path) -> float:
    """Return the accuracy on the clients' own test samples."""
    options = {"protocol": "own-test", "clients": {"partition": "own"}, "allow_small": True}  # or no class is uploaded
    done = fedvlm.run(method, encoder=f"store:{store}", workers=2, out=out, **options)
    return float(done.tables[0]["own"] or 0.0)


def children_seconds() -> float:
    """Return the processor time of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def watch(command: list[str]) -> tuple[float, float, float, str]:
    """Return seconds, processor seconds, the most GB of a process and its children (shared pages once), and output."""
    start, peak, before = monotonic(), 0, children_seconds()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while process.poll() is None and monotonic() - start < MAX_SECONDS:
        total = 0
        try:
            parent = psutil.Process(process.pid)
            for member in (parent, *parent.children(recursive=True)):
                total += member.memory_full_info().pss
        except psutil.Error:
            pass
        peak = max(peak, total)
        try:
            process.wait(3.0)  # asking for shared pages takes the process's time, too
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    output = process.communicate()[0].strip()
    return monotonic() - start, children_seconds() - before, peak / 1e9, output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="ridge,auto")
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        method, store, out = args.one
        print(json.dumps(run(method, store, Path(out))))
        return
    for problem in args.problems.split(","):
        classes, dim, clients, samples = PROBLEMS[problem]
        sizes = {f"{i:03}": samples for i in range(clients)}
        with tempfile.TemporaryDirectory() as folder:
            store = save_store(f"{folder}/rows", made(sizes, classes, dim))
            for method in args.methods.split(","):
                command = [sys.executable, __file__, "--one", method, str(store), f"{folder}/{method}"]
                seconds, cpu_seconds, memory, output = watch(command)
                accuracy = f"{100 * float(output.splitlines()[-1]):.1f} %" if output else "not finished"
                cost = f"{seconds:.0f} s ({cpu_seconds:.0f} of a processor), {memory:.2f} GB, {accuracy}"
                line = f"{problem} {classes} x {dim} x {clients} {method}: {cost}"
                report(line, f"{method}, {classes} classes x {dim}", seconds=seconds, GB=memory)


if __name__ == "__main__":
    main()
