"""What fedvlm adds to a round of Flower, and rounds of both between real processes in one sitting.

    python benchmarks/flower.py              # the milliseconds we add, without processes
    python benchmarks/flower.py --deployed   # with real processes: ours, and a bare app on Flower's own
    python benchmarks/flower.py --sites 20   # ours with so many sites: seconds a round, and memory in all

A head of 65 classes on embeddings of 512, 200 rows a site, 5 steps: FedOT, whose map of 512 x 512
stays at its site. The bare app averages the same head with numpy and does nothing else; it runs on
Flower's own SuperLink and SuperNode, which looks for messages every 3 s.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import numpy as np
import psutil
import torch
from figures import report

from fedvlm.deploy.flower.processes import (
    Process,
    flower_environment,
    free_port,
    is_server_up,
    start_superlink,
)
from fedvlm.deploy.identity.certificates import current_certificate
from fedvlm.deploy.kits import ServerKit, create_kits, read_server, read_site, write_site
from fedvlm.deploy.server.launch import run_over_sites, running_processes, start_site
from fedvlm.deploy.server.run import DeployedRun
from fedvlm.deploy.site.service import Site
from fedvlm.engines.client import Task
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.sequential import run_client
from fedvlm.record import Record
from fedvlm.runner.settings import build
from fedvlm.storage.files import to_toml, write_file

CLASSES, DIM, ROWS, SITES = 65, 512, 200, ["a", "b", "c"]


def rows(folder: Path, name: str) -> Path:
    draw = np.random.default_rng(SITES.index(name))
    same = np.random.default_rng(9)
    text = same.standard_normal((CLASSES, DIM), dtype=np.float32)
    y = np.arange(ROWS * 5 // 3) % CLASSES
    x = text[y] + draw.standard_normal((len(y), DIM), dtype=np.float32)
    classes = np.array([f"class {i}" for i in range(CLASSES)])
    path = folder / f"{name}.npz"
    np.savez(path, x=x, y=y, classes=classes, text=text, encoder=np.array("made@0"))
    return path


def settings(rounds: int):
    method = {"name": "fedot", "rounds": rounds, "batch_size": 40, "lr": 1e-4}
    source = {"classes": [f"class {i}" for i in range(CLASSES)]}
    return build({"method": method, "protocol": "own-test", "source": source})


def kits(folder: Path):
    create_kits(folder / "fed", SITES, "127.0.0.1", free_port(), deadline=120.0)
    for name in SITES:
        kit = read_site(folder / "fed" / f"site-{name}")
        write_site(replace(kit, encoder=f"store:{rows(folder, name)}"))
    return read_server(folder / "fed" / "server")


def added(folder: Path, rounds: int = 20) -> None:
    """A round of three sites with signatures, checksums, ledger, policy and files, against none."""
    kit = kits(folder)
    sites = {name: Site(read_site(folder / "fed" / f"site-{name}")) for name in SITES}
    record = Record(folder / "run")
    DeployedRun(local_grid(sites), kit, settings(rounds), record, lambda *words: None).run_all()
    simulated = median(line["seconds"] for line in record.lines())
    training = next(iter(sites["a"].handler.trainings.values()))
    world = training.world
    shared, local = world.method.init(world.frozen)
    times = []
    for number in range(rounds):
        start_time = perf_counter()
        run_client(world, number, Task("a", shared, local, True))
        times.append(perf_counter() - start_time)
    work = median(times) * len(SITES)
    print(f"three sites, one after the other: {1e3 * simulated:.0f} ms a round, of which {1e3 * work:.0f}")
    extra = 1e3 * (simulated - work) / len(SITES)
    report(
        f"the method itself; {extra:.0f} ms are added per site and round",
        "a round of three sites without processes",
        **{"ms": 1e3 * simulated, "of which training": 1e3 * work, "added a site": extra},
    )


BARE = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "bare-app"
version = "1.0.0"
description = "an average over Flower"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedvlm"

[tool.flwr.app.components]
serverapp = "bare.server:app"
clientapp = "bare.client:app"

[tool.flwr.app.config]
out = ""
rounds = 3
""",
    "bare/__init__.py": "",
    "bare/server.py": """\
import json, time
import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    head, seconds = np.zeros((65, 512), np.float32), []
    while len(list(grid.get_node_ids())) < 3:
        time.sleep(0.2)
    for number in range(int(context.run_config["rounds"])):
        begin = time.perf_counter()
        content = RecordDict({"head": ArrayRecord({"w": Array(head)})})
        nodes = list(grid.get_node_ids())
        waiting = set(grid.push_messages(
            [grid.create_message(content, "train", node, str(number)) for node in nodes]))
        heads = []
        while waiting:
            for reply in grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                heads.append(reply.content["head"]["w"].numpy())
            time.sleep(0.1)
        head = np.mean(heads, axis=0)
        seconds.append(time.perf_counter() - begin)
    open(context.run_config["out"], "w").write(json.dumps(seconds))
""",
    "bare/client.py": """\
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    head = message.content["head"]["w"].numpy()
    draw = np.random.default_rng(context.node_id % 1000)
    x, y = draw.standard_normal((200, 512)).astype(np.float32), draw.integers(0, 65, 200)
    for _ in range(5):
        z = x @ head.T
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(200), y] -= 1
        head = head - 0.1 / 200 * p.T @ x
    answer = RecordDict({"head": ArrayRecord({"w": Array(head)})})
    return Message(answer, reply_to=message)
""",
}


BIN = Path(sys.executable).parent
CONNECTION_NAME = "bare"  # the name of the connection in Flower's own settings


def flower_home(kit: ServerKit) -> Path:
    return kit.folder / "flwr"


def run_flwr(kit: ServerKit, *words: str) -> dict:
    """Run Flower's command line and return its JSON answer."""
    done = subprocess.run(
        [str(BIN / "flwr"), *words, "--format", "json"],
        cwd=flower_home(kit),  # Flower takes the name of a connection for a folder of that name
        env=flower_environment(flower_home(kit)),
        capture_output=True,
        text=True,
    )
    return dict(json.loads(done.stdout[done.stdout.index("{") :]))


def with_programs(home: Path) -> dict[str, str]:
    """Return the environment in which Flower's processes find each other's programs."""
    return flower_environment(home) | {"PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")])}


def plain_link(kit: ServerKit) -> Process:
    """Flower's own SuperLink, with nothing of ours before it."""
    command = [
        *(str(BIN / "flower-superlink"), "--ssl-ca-certfile", str(kit.folder / "ca.crt")),
        *("--ssl-certfile", str(kit.folder / "server.pem")),
        *("--ssl-keyfile", str(kit.folder / "server.key"), "--enable-supernode-auth"),
        *("--host", "127.0.0.1", "--port", kit.address.rpartition(":")[2]),
    ]
    env = with_programs(flower_home(kit))
    link = Process("superlink", command, kit.folder / "superlink.log", env)
    while not is_server_up(kit):
        sleep(0.1)
    connection = {"address": kit.address, "root-certificates": str(kit.folder.resolve() / "ca.crt")}
    lines = [f'{key} = "{value}"' for key, value in connection.items()]
    write_file(flower_home(kit) / "config.toml", "\n".join([f"[superlink.{CONNECTION_NAME}]", *lines]).encode())
    for name in SITES:
        key = flower_home(kit).resolve() / f"{name}.pub"
        write_file(key, current_certificate(kit.folder, name).key.encode())
        assert run_flwr(kit, "supernode", "register", str(key), CONNECTION_NAME)["success"]
    return link


def bare(folder: Path, rounds: int, node: list[str]) -> list[float]:
    kit = kits(folder)
    for name, text in BARE.items():
        write_file(folder / "app" / name, text.encode())
    out = folder / "seconds.json"
    with running_processes() as running:
        running.append(plain_link(kit))
        for name in SITES:
            site = folder / "fed" / f"site-{name}"
            command = [*node, "--root-certificates", str(site / "ca.crt")]
            command += ["--auth-supernode-private-key", str(site / "key")]
            command += ["--superlink", kit.address, "--port", str(free_port())]
            env = with_programs(site / "flwr")
            running.append(Process(name, command, site / "supernode.log", env))
        config = to_toml({"out": str(out), "rounds": rounds}).replace("\n", " ").replace(" = ", "=")
        answer = run_flwr(kit, "run", str(folder / "app"), CONNECTION_NAME, "--run-config", config.strip())
        assert "run-id" in answer, (answer, flower_home(kit))
        while not out.exists() or not out.read_text():
            sleep(0.2)
    return list(json.loads(out.read_text()))


def run_fedvlm(folder: Path, rounds: int) -> list[float]:
    kit = kits(folder)
    with running_processes() as running:
        running.append(start_superlink(kit))
        running += [start_site(folder / "fed" / f"site-{name}") for name in SITES]
        wait_until_connected(folder)
        start_time = perf_counter()
        first_line: list[float] = []

        def print_line(text: str) -> None:
            first_line.append(perf_counter() - start_time)

        result = run_over_sites(kit, settings(rounds), print_line=print_line)
        trees = [psutil.Process(process.child.pid) for process in running]
        processes = [child for tree in trees for child in (tree, *tree.children(recursive=True))]
        memory = [process.memory_full_info().pss / 1e6 for process in processes]
        report(
            f"first line after {first_line[0]:.2f} s, {len(processes)} processes, {sum(memory):.0f} MB",
            f"fedvlm, {len(SITES)} sites",
            **{"first line s": first_line[0], "processes": len(processes), "MB": sum(memory)},
        )
        return [line["seconds"] for line in result.rounds]


def wait_until_connected(folder: Path) -> None:
    while not all((folder / "fed" / f"site-{name}" / ".node").exists() for name in SITES):
        sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deployed", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sites", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.sites:
        SITES[:] = [f"s{number}" for number in range(args.sites)]
        with tempfile.TemporaryDirectory() as place:
            times = run_fedvlm(Path(place), args.rounds)
        return report(f"{args.sites} sites: {median(times):.2f} s a round", f"{args.sites} sites", s=median(times))
    with tempfile.TemporaryDirectory() as place:
        added(Path(place))
    if not args.deployed:
        return None
    kinds = {
        "bare app on Flower's SuperNode": lambda place: bare(place, args.rounds, [str(BIN / "flower-supernode")]),
        "fedvlm": lambda place: run_fedvlm(place, args.rounds),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(2):  # one after the other, twice, because a machine has its moods
        for name, go in kinds.items():
            with tempfile.TemporaryDirectory() as place:
                seconds[name] += go(Path(place))
    baseline = median(seconds["fedvlm"])
    for name, times in seconds.items():
        text = ", ".join(f"{time:.2f}" for time in times)
        report(
            f"{name}: {median(times):.2f} s a round, {median(times) / baseline:.2f} x ({text})",
            name,
            **{"s a round": median(times), "times ours": median(times) / baseline},
        )
    return None


if __name__ == "__main__":
    main()
