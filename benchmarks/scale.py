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
from figures import peak, report

import fedvlm

SIZES, FRACTION = "1000,3000,10000,30000,100000", 0.01
SAMPLES_PER_CLIENT, CLASSES, DIM = 20, 10, 512


def write_rows(path: Path, clients: int) -> None:
    """A store of rows around class centres, written a thousand clients at a time."""
    draw = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize
    text = unit(torch.randn(CLASSES, DIM, generator=draw), dim=1)
    rows = clients * SAMPLES_PER_CLIENT
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
        for client_labels in labels.split(1000 * SAMPLES_PER_CLIENT):
            noise = 0.08 * torch.randn(len(client_labels), DIM, generator=draw)
            file.write(unit(text[client_labels] + noise, dim=1).numpy().tobytes())
        file.write(labels.numpy().tobytes())
        file.write(np.repeat(np.arange(clients, dtype=np.int32), SAMPLES_PER_CLIENT).tobytes())
        file.write(text.numpy().tobytes())


def measure(clients: int, rounds: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    base = peak()
    ends: list[float] = []
    before = []

    def progress(label: str, done: int, total: int) -> None:
        if not ends:
            before.append(peak())
        ends.append(process_time())

    fedvlm.run(
        {"name": "fedot", "blocks": 16, "rounds": rounds + 1, "batch_size": 8},
        encoder=f"store:{folder / 'rows.safetensors'}",
        protocol="own-test",
        clients={"partition": "own", "ratios": [0.8, 0.0, 0.2]},
        fraction=FRACTION,
        workers=1,
        out=folder / "run",
        progress=progress,
    )
    return {
        "clients": clients,
        "participants": max(1, round(FRACTION * clients)),
        "seconds": (ends[rounds + 1] - ends[1]) / rounds,
        "begin": ends[0],
        "end": process_time() - ends[rounds + 1],
        "base": base,
        "before": before[0],
        "peak": peak(),
        "on_disk": (folder / "rows.safetensors").stat().st_size / 1e6,
    }


def draw(measurements: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "scale", "font.size": 9, "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    figure, (memory_axes, right) = plt.subplots(1, 2, figsize=(7.2, 2.8), layout="constrained")
    clients = [measurement["clients"] for measurement in measurements]
    memory_axes.plot(
        clients, [measurement["peak"] for measurement in measurements], "o-", color="#0b6e99", label="rounds, end"
    )
    before = [measurement["before"] for measurement in measurements]
    memory_axes.plot(clients, before, "o--", color="#7a7a7a", label="table of clients")
    memory_axes.legend(frameon=False, loc="lower right")
    memory_axes.set(xscale="log", xlabel="clients", ylabel="peak memory (MB)")
    ms_per_client = [1000 * measurement["seconds"] / measurement["participants"] for measurement in measurements]
    right.plot(clients, ms_per_client, "o-", color="#b5541c")
    right.set(xscale="log", xlabel="clients", ylabel="CPU ms per participant")
    for axis in (memory_axes, right):
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clients", default=SIZES)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.one[0]), args.rounds, Path(args.one[1]))))
        return
    measurements = []
    for clients in map(int, args.clients.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            write_rows(Path(folder) / "rows.safetensors", clients)
            command = [sys.executable, __file__, "--rounds", str(args.rounds)]
            command += ["--one", str(clients), folder]
            measurement = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        measurements.append(measurement)
        ms_per_client = 1000 * measurement["seconds"] / measurement["participants"]
        report(
            f"{clients:,} clients, {measurement['participants']:,} a round: {1000 * measurement['seconds']:.0f} ms "
            f"a round ({ms_per_client:.2f} ms each), at most {measurement['peak']:.0f} MB ({measurement['base']:.0f} "
            f"at the start, {measurement['before']:.0f} while the table of clients is made), rows of "
            f"{measurement['on_disk']:.0f} MB on disk; {measurement['begin']:.0f} s before the first round, "
            f"{measurement['end']:.0f} s after the last",
            f"{clients:,} clients, 1 % of them a round",
            **{"ms a participant": ms_per_client, "peak MB": measurement["peak"], "rows MB": measurement["on_disk"]},
        )
    if args.plot:
        draw(measurements, args.plot)


if __name__ == "__main__":
    main()
