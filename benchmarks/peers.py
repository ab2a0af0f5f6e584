"""A round of FedAvg on a linear head here and by Flower's simulation, pfl-research and FedJAX.

    python benchmarks/peers.py [--rounds 7] [--keep FOLDER]

100 clients of 50 rows, 512 numbers a row, ten classes, minibatches of ten, one epoch, all of them
in every round. Every peer has the same rows, the same minibatches and the same first head, runs on
one thread in an environment that this script makes with pip, and must end within a point of our
accuracy. A peer that does not install is skipped, with pip's reason. Times are medians over the
rounds but the first; processor time is that of all processes of a peer together, and its ratio
holds on a busy machine too. `--keep` makes the environments in a folder that stays.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from figures import report

FOLDER = Path(__file__).parent
CONSTRAINTS = FOLDER.parent / "constraints.txt"
# pfl-research asks for an older dp-accounting than ours, and FedJAX for a jax that we have not:
# only Flower, which we pin, can have all our versions; the others have our torch.
PEERS = {
    "Flower's simulation": ("with_flower.py", ["flwr[simulation]", "torch", "psutil"], True),
    "pfl-research": ("with_pfl.py", ["pfl[pytorch]", "psutil"], False),
    "FedJAX": ("with_fedjax.py", ["fedjax", "psutil"], False),
}
ONE_THREAD = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Unusable(Exception):
    """Why a peer is skipped."""


def install(folder: Path, packages: list[str], with_fedvlm: bool) -> Path:
    """The Python of an environment with these packages."""
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    pins = [CONSTRAINTS.read_text()] if with_fedvlm else []
    pins += [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (folder / "pins.txt").write_text("\n".join(pins))
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "-c", folder / "pins.txt", *packages], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unusable(f"pip: {last(done.stderr)}")
    (folder / "ready").touch()
    return python


def last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "?")


def run(python: Path | str, script: str, folder: Path, rounds: int) -> dict:
    """What a script found; `folder` has the rows, and gets the head it ends with."""
    command = [python, FOLDER / "peer" / script, str(rounds)]
    env = {**ONE_THREAD, "FEDVLM_PEER": str(folder), "PYTHONPATH": str(FOLDER / "peer")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / "found.json").exists():
        raise Unusable(f"{script}: {last(done.stderr)}")
    measurement = json.loads((folder / "found.json").read_text())
    (folder / "found.json").unlink()
    x, y = np.load(folder / "test_x.npy"), np.load(folder / "test_y.npy")
    measurement["head"] = np.load(folder / "head.npy")
    measurement["accuracy"] = 100 * float(((x @ measurement["head"].T).argmax(1) == y).mean())
    return measurement


def print_row(name: str, measurement: dict, reference: dict) -> None:
    wall, processor = (1000 * median(measurement[kind]) for kind in ("wall", "processor"))
    reference_ms = [1000 * median(reference[kind]) for kind in ("wall", "processor")]
    versions = ", ".join(f"{key} {value}" for key, value in measurement["versions"].items())
    gap = float(np.abs(measurement["head"] - reference["head"]).max())
    report(
        f"{name} ({versions}): {wall:.0f} ms a round ({wall / reference_ms[0]:.1f}x), {processor:.0f} ms "
        f"of processor time ({processor / reference_ms[1]:.1f}x), {measurement['accuracy']:.2f} % right, head "
        f"within {gap:.0e} of ours",
        f"{name} ({versions})",
        **{
            "ms a round": wall,
            "times ours": wall / reference_ms[0],
            "processor ms": processor,
            "times ours, processor": processor / reference_ms[1],
            "% right": measurement["accuracy"],
        },
    )
    off = abs(measurement["accuracy"] - reference["accuracy"])
    assert off <= 1, f"{name} ends {off:.1f} points from our accuracy: not the same work"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "rows"
        folder.mkdir()
        reference = run(sys.executable, "with_fedvlm.py", folder, args.rounds)
        print_row("fedvlm", reference, reference)
        for name, (script, packages, pinned) in PEERS.items():
            try:
                python = install((args.keep or Path(place)) / Path(script).stem, packages, pinned)
                print_row(name, run(python, script, folder, args.rounds), reference)
            except Unusable as reason:
                report(f"{name}: skipped, {reason}", f"{name}: skipped, {reason}")


if __name__ == "__main__":
    main()
