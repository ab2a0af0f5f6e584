"""Time and peak memory of a method on drawn embeddings with several findings per sample.

python benchmarks/findings.py [--samples 100000] [--findings 14] [--dim 512] [--clients 10] [--method auto]
The run includes the partition, the rounds, the adaptation, all metrics and the record.
"""

import argparse
import resource
import tempfile
import time
import warnings

import numpy as np
from figures import report

import fedvlm

WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def draw_clients(samples: int, findings: int, dim: int, clients: int) -> tuple[dict, list[str]]:
    """Draw unit-norm embeddings and findings of 3 to 40 % of the samples, a tenth of them unknown."""
    generator = np.random.default_rng(0)
    weights = generator.standard_normal((findings, dim), np.float32)
    rates = np.linspace(0.03, 0.4, findings)
    out = {}
    for client in range(clients):
        x = generator.standard_normal((samples // clients, dim), np.float32)
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        logits = x @ weights.T + 0.5 * generator.standard_normal((len(x), findings), np.float32)
        y = (logits > np.quantile(logits, 1 - rates, axis=0).diagonal()).astype(np.float32)
        y[generator.random(y.shape) < 0.1] = np.nan
        out[f"site {client}"] = (x, y)
    return out, [f"finding {number}" for number in range(findings)]


def processor_seconds() -> float:
    """Return the processor time of this process and of its workers that have ended."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, WHOSE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--findings", type=int, default=14)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--method", default="auto")
    options = parser.parse_args()
    clients, names = draw_clients(options.samples, options.findings, options.dim, options.clients)
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    begun = processor_seconds()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        result = fedvlm.run(options.method, clients=clients, classes=names, seeds=[0], out=f"{folder}/run")
        seconds = time.perf_counter() - started
        auc = np.mean([score["AUC"] for score in next(iter(result.trainings().values()))["scores"].values()])
    processor = processor_seconds() - begun
    peak_mb, worker_mb = (resource.getrusage(who).ru_maxrss / 1024 for who in WHOSE)
    sizes = f"{options.samples} samples x {options.findings} findings x {options.dim} dimensions"
    print(f"{sizes}, {options.clients} sites; mean AUC {auc:.3f}")
    report(
        f"{options.method}: {seconds:.1f} s, {processor:.1f} s of processor time; peak memory {peak_mb:.0f} MB, of "
        f"which {before_mb:.0f} MB before the run; largest worker {worker_mb:.0f} MB",
        options.method,
        s=seconds,
        processor_s=processor,
        mb=peak_mb,
        worker_mb=worker_mb,
    )


if __name__ == "__main__":
    main()
