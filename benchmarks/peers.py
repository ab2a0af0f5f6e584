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
from figures import say

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parent / "constraints.txt"
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


def install(folder: Path, packages: list[str], ours: bool) -> Path:
    """The Python of an environment with these packages."""
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    pins = [CONSTRAINTS.read_text()] if ours else []
    pins += [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (folder / "pins.txt").write_text("\n".join(pins))
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "-c", folder / "pins.txt", *packages], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Unusable(f"pip: {last(done.stderr)}")
    (folder / "ready").touch()
    return python


def last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "?")


def run(python: Path | str, script: str, folder: Path, rounds: int) -> dict:
    """What a script found; `folder` has the rows, and gets the head it ends with."""
    command = [python, HERE / "peer" / script, str(rounds)]
    env = {**ONE_THREAD, "FEDVLM_PEER": str(folder), "PYTHONPATH": str(HERE / "peer")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / "found.json").exists():
        raise Unusable(f"{script}: {last(done.stderr)}")
    found = json.loads((folder / "found.json").read_text())
    (folder / "found.json").unlink()
    x, y = np.load(folder / "test_x.npy"), np.load(folder / "test_y.npy")
    found["head"] = np.load(folder / "head.npy")
    found["accuracy"] = 100 * float(((x @ found["head"].T).argmax(1) == y).mean())
    return found


def tell(name: str, found: dict, ours: dict) -> None:
    wall, processor = (1000 * median(found[kind]) for kind in ("wall", "processor"))
    least = [1000 * median(ours[kind]) for kind in ("wall", "processor")]
    versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
    apart = float(np.abs(found["head"] - ours["head"]).max())
    say(
        f"{name} ({versions}): {wall:.0f} ms a round ({wall / least[0]:.1f}x), {processor:.0f} ms "
        f"of processor time ({processor / least[1]:.1f}x), {found['accuracy']:.2f} % right, head "
        f"within {apart:.0e} of ours",
        f"{name} ({versions})",
        **{
            "ms a round": wall,
            "times ours": wall / least[0],
            "processor ms": processor,
            "times ours, processor": processor / least[1],
            "% right": found["accuracy"],
        },
    )
    off = abs(found["accuracy"] - ours["accuracy"])
    assert off <= 1, f"{name} ends {off:.1f} points from our accuracy: not the same work"


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    ask.add_argument("--rounds", type=int, default=7)
    ask.add_argument("--keep", type=Path)
    given = ask.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "rows"
        folder.mkdir()
        ours = run(sys.executable, "with_fedvlm.py", folder, given.rounds)
        tell("fedvlm", ours, ours)
        for name, (script, packages, pinned) in PEERS.items():
            try:
                python = install((given.keep or Path(place)) / Path(script).stem, packages, pinned)
                tell(name, run(python, script, folder, given.rounds), ours)
            except Unusable as reason:
                say(f"{name}: skipped, {reason}", f"{name}: skipped, {reason}")


if __name__ == "__main__":
    main()
