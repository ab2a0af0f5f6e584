"""Memory and CPU time of a run as clients grow from 1,000 to 100,000, of which 1 % take part.

python benchmarks/scale.py [--rounds 4] [--clients 1000,100000] [--plot docs/pictures/scale.svg]
`fedvlm.run` on a store of embeddings, FedOT in 16 blocks: every client has a map of its own, 64 kB
on disk. 20 rows a client, ten classes, 512 numbers a row. Each size in a process of its own, so
that its peak is its own; the peak before the first round (the table of clients is made) and that of
rounds, last measurement of every client and record are told apart. One core, CPU time.
"""

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from figures import peak, say

import fedvlm

SIZES, SHARE = "1000,3000,10000,30000,100000", 0.01
EACH, CLASSES, DIM = 20, 10, 512


def write_rows(path: Path, clients: int) -> None:
    """A store of rows around class centres, written a thousand clients at a time."""
    draw = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize
    text = unit(torch.randn(CLASSES, DIM, generator=draw), dim=1)
    rows = clients * EACH
    shapes = {
        "x": ("F32", [rows, DIM], 4 * rows * DIM),
        "y": ("I64", [rows], 8 * rows),
        "clients": ("I32", [rows], 4 * rows),
        "text": ("F32", [CLASSES, DIM], 4 * CLASSES * DIM),
    }
    header, place = {}, 0
    for name, (dtype, shape, size) in shapes.items():
        ends = [place, place + size]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": ends}
        place += size
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    labels = torch.arange(rows) % CLASSES
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(words)) + words)
        for mine in labels.split(1000 * EACH):
            noise = 0.08 * torch.randn(len(mine), DIM, generator=draw)
            file.write(unit(text[mine] + noise, dim=1).numpy().tobytes())
        file.write(labels.numpy().tobytes())
        file.write(np.repeat(np.arange(clients, dtype=np.int32), EACH).tobytes())
        file.write(text.numpy().tobytes())


def measure(clients: int, rounds: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    base = peak()
    ends: list[float] = []
    before = []

    def progress(what: str, done: int, total: int) -> None:
        if not ends:
            before.append(peak())
        ends.append(process_time())

    fedvlm.run(
        {"name": "fedot", "blocks": 16, "rounds": rounds + 1, "batch_size": 8},
        encoder=f"store:{folder / 'rows.safetensors'}",
        protocol="own-test",
        clients={"partition": "own", "ratios": [0.8, 0.0, 0.2]},
        fraction=SHARE,
        workers=1,
        out=folder / "run",
        progress=progress,
    )
    return {
        "clients": clients,
        "participants": max(1, round(SHARE * clients)),
        "seconds": (ends[rounds + 1] - ends[1]) / rounds,
        "begin": ends[0],
        "end": process_time() - ends[rounds + 1],
        "base": base,
        "before": before[0],
        "peak": peak(),
        "on_disk": (folder / "rows.safetensors").stat().st_size / 1e6,
    }


def draw(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "scale", "font.size": 9, "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.8), layout="constrained")
    clients = [one["clients"] for one in found]
    left.plot(clients, [one["peak"] for one in found], "o-", color="#0b6e99", label="rounds, end")
    before = [one["before"] for one in found]
    left.plot(clients, before, "o--", color="#7a7a7a", label="table of clients")
    left.legend(frameon=False, loc="lower right")
    left.set(xscale="log", xlabel="clients", ylabel="peak memory (MB)")
    each = [1000 * one["seconds"] / one["participants"] for one in found]
    right.plot(clients, each, "o-", color="#b5541c")
    right.set(xscale="log", xlabel="clients", ylabel="CPU ms per participant")
    for axis in (left, right):
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rounds", type=int, default=4)
    ask.add_argument("--clients", default=SIZES)
    ask.add_argument("--plot", type=Path)
    ask.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = ask.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.one[0]), args.rounds, Path(args.one[1]))))
        return
    found = []
    for clients in map(int, args.clients.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            write_rows(Path(folder) / "rows.safetensors", clients)
            command = [sys.executable, __file__, "--rounds", str(args.rounds)]
            command += ["--one", str(clients), folder]
            one = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        found.append(one)
        each = 1000 * one["seconds"] / one["participants"]
        say(
            f"{clients:,} clients, {one['participants']:,} a round: {1000 * one['seconds']:.0f} ms "
            f"a round ({each:.2f} ms each), at most {one['peak']:.0f} MB ({one['base']:.0f} as it "
            f"starts, {one['before']:.0f} while the table of clients is made), rows of "
            f"{one['on_disk']:.0f} MB on disk; {one['begin']:.0f} s before the first round, "
            f"{one['end']:.0f} s after the last",
            f"{clients:,} clients, 1 % of them a round",
            **{"ms a participant": each, "peak MB": one["peak"], "rows MB": one["on_disk"]},
        )
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
