"""What fedvlm adds to a round of Flower, and rounds of both between real processes in one sitting.

    python benchmarks/flower.py              # the milliseconds we add, without processes
    python benchmarks/flower.py --deployed   # with a SuperLink and SuperNodes: ours and a bare app

A head of 65 classes on embeddings of 512, 200 rows a site, 5 steps: FedOT, whose map of 512 x 512
stays at its site. The bare app averages the same head with numpy and does nothing else; it runs on
Flower's own SuperLink and SuperNode, which looks for messages every 3 s, and once every 0.3 s.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import numpy as np
import torch
from figures import report

from fedvlm.deploy.flower.processes import (
    CONNECTION_NAME,
    Process,
    flower_environment,
    flower_home,
    free_port,
    is_server_up,
    run_flwr,
    start_superlink,
    write_connection,
)
from fedvlm.deploy.identity.certificates import current_certificate
from fedvlm.deploy.kits import ServerKit, create_kits, read_server, read_site, to_toml, write_site
from fedvlm.deploy.server.launch import FLOWER_APP, run_over_sites, running_processes, start_site
from fedvlm.deploy.server.run import DeployedRun
from fedvlm.deploy.site.service import Site
from fedvlm.engines.client import Task
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.sequential import run_client
from fedvlm.record import Record
from fedvlm.runner.settings import build
from fedvlm.storage.files import write_file

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
    "pyproject.toml": FLOWER_APP["pyproject.toml"].replace("fedvlm_app", "bare")
    + '\n[tool.flwr.app.config]\nout = ""\nrounds = 3\n',
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
LOOKS_OFTEN = """\
from importlib import import_module
from fedvlm.deploy.flower.supernode import Time
import_module("flwr.supernode.start_client_internal").time = Time()
import_module("flwr.supernode.cli").flower_supernode()
"""


def plain_link(kit: ServerKit) -> Process:
    """Flower's own SuperLink, with nothing of ours before it."""
    command = [
        *(str(BIN / "flower-superlink"), "--ssl-ca-certfile", str(kit.folder / "ca.crt")),
        *("--ssl-certfile", str(kit.folder / "server.pem")),
        *("--ssl-keyfile", str(kit.folder / "server.key"), "--enable-supernode-auth"),
        *("--host", "127.0.0.1", "--port", kit.address.rpartition(":")[2]),
    ]
    env = flower_environment(flower_home(kit), BIN)
    link = Process("superlink", command, kit.folder / "superlink.log", env)
    while not is_server_up(kit):
        sleep(0.1)
    write_connection(kit)
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
            env = flower_environment(site / "flwr", BIN)
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
        return [line["seconds"] for line in run_over_sites(kit, settings(rounds)).rounds]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deployed", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        added(Path(place))
    if not args.deployed:
        return
    kinds = {
        "bare app on Flower's SuperNode": lambda place: bare(place, args.rounds, [str(BIN / "flower-supernode")]),
        "bare app that looks every 0.3 s": lambda place: bare(place, args.rounds, [sys.executable, "-c", LOOKS_OFTEN]),
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


if __name__ == "__main__":
    main()
