"""How long a round of a verified sum takes beside a plain one, and how many bytes a site sends and gets.

python benchmarks/verified.py [--sites 10] [--rounds 5]
Real sites in one process with signed messages, FedAvg on a head of 65 classes and 512 dimensions. Both modes are run
in turn; the ratio is that of the medians of processor seconds. A site's work is its training, keys, masks, signatures,
the sum of all uploads and the aggregate; the network is not in it.
"""

import argparse
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
from figures import report

from fedvlm.deploy.kits import create_kits, read_server, read_site, write_site
from fedvlm.deploy.server.run import DeployedRun
from fedvlm.deploy.site.policy import example_policy
from fedvlm.deploy.site.service import Site
from fedvlm.engines.flower.engine import local_grid
from fedvlm.record import Record
from fedvlm.runner.settings import build

CLASSES, DIM = 65, 512


def make_sites(folder: Path, count: int, samples: int) -> tuple[Any, dict[str, Site]]:
    """Create kits with random unit embeddings."""
    names = [f"site{number:02}" for number in range(count)]
    create_kits(folder / "kits", names, "127.0.0.1", 8443, deadline=60.0, wait=0.0, plain=True)
    draw, sites = np.random.default_rng(0), {}
    text = draw.standard_normal((CLASSES, DIM)).astype(np.float32)
    for name in names:
        x = draw.standard_normal((samples, DIM)).astype(np.float32)
        content = np.array([f"{name}{row}" for row in range(samples)])
        facts = {"classes": np.array([f"class {c}" for c in range(CLASSES)]), "scale": np.array(100.0)}
        y = np.arange(samples) % CLASSES
        np.savez(folder / f"{name}.npz", x=x, y=y, text=text, content=content, encoder=np.array("toy@0"), **facts)
        kit = folder / "kits" / f"site-{name}"
        write_site(replace(read_site(kit), encoder=f"store:{folder / name}.npz"))
        (kit / "policy.toml").write_text(
            example_policy(plain=True).replace("max_upload_bytes = 50000000", "max_upload_bytes = 0")
        )
        sites[name] = Site(read_site(kit))
    return read_server(folder / "kits" / "server"), sites


def run(folder: Path, kit: Any, sites: dict[str, Site], rounds: int, verified: bool, out: str) -> list[float]:
    """Return the processor seconds of each round but the first."""
    method = {"name": "fedavg", "rounds": rounds, "lr": 1e-3, "local_epochs": 1}
    source = {"classes": [f"class {c}" for c in range(CLASSES)]}
    channel = {"clip": 1.0, "verified": verified}
    settings = build({"method": method, "protocol": "own-test", "source": source, "channel": channel})
    times: list[float] = []
    DeployedRun(
        local_grid(sites), kit, settings, Record(folder / out), lambda *words: times.append(process_time())
    ).run_all()
    return [after - before for before, after in pairwise(times[:rounds])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        kit, sites = make_sites(folder, options.sites, options.samples)
        started = perf_counter()
        plain = run(folder, kit, sites, options.rounds, False, "plain")
        verified = run(folder, kit, sites, options.rounds, True, "verified")
        print(f"{options.sites} sites, {options.samples} samples each, head {CLASSES} x {DIM}")
        ratio = median(verified) / median(plain)
        report(
            f"plain round {median(plain):.3f} s, verified round {median(verified):.3f} s, ratio {ratio:.2f}",
            f"{options.sites} sites",
            plain=median(plain),
            verified=median(verified),
            ratio=ratio,
        )
        print(f"in all {perf_counter() - started:.1f} s")
    numbers = CLASSES * DIM + 1 + 5
    for count in (3, 10, 50):
        up, down = 8 * numbers, 8 * numbers * count + 4 * CLASSES * DIM
        print(f"{count} sites: a site sends {up / 1e6:.2f} MB and gets {down / 1e6:.2f} MB a round")


if __name__ == "__main__":
    main()
