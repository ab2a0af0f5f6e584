"""An exported Flower app gives the numbers of `fedvlm run`, by Flower's public interface alone."""

import ast
import os
import socket
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest

from fedvlm.classifier.personalised import Personalised
from fedvlm.core import make, methods
from fedvlm.deploy.flower.processes import free_port
from fedvlm.deploy.flower_app.export import export_flower_app
from fedvlm.engines.flower import QUIET_ENVIRONMENT, import_flower
from fedvlm.errors import DataError, FederationError, SettingsError
from fedvlm.result import Result
from fedvlm.runner.settings import build
from fedvlm.storage.files import read_tensors
from fedvlm.testing import shorten
from tests.deploy.conftest import CLASSES, store
from tests.helpers.running import execute

import_flower()  # before an app does, so that telemetry is off
CLOSE = 1e-6
NAMES = ["art", "photo", "sketch"]
RUN_CONFIG = {"min-nodes": 3, "wait": 0.0, "timeout": 60.0, "quorum": 1.0}


def app_grid(client_app, node_configs):
    """Return Flower's grid without processes: a message is a call of the app, in a context per node."""
    app = import_flower()
    grid_class = import_module("flwr.serverapp").Grid
    identity = import_module("flwr.supercore.task_identity").TaskIdentity
    identity.task_id = identity.run_id = identity.node_id = 1

    class AppGrid(grid_class):
        def __init__(self):
            self.contexts = {
                node: app.Context(1, node, config, app.RecordDict(), {})
                for node, config in enumerate(node_configs, start=1000)
            }
            self.sent = []

        def set_run(self, run): ...

        run = None

        def create_message(self, *words, **options):
            raise NotImplementedError("Flower calls it deprecated")

        def get_node_ids(self):
            return list(self.contexts)

        def push_messages(self, messages):
            raise NotImplementedError

        def pull_messages(self, message_ids):
            raise NotImplementedError

        def send_and_receive(self, messages, *, timeout=None):
            replies = []
            for number, message in enumerate(messages):
                message.metadata.__dict__["_message_id"] = str(number)
                node = message.metadata.dst_node_id
                try:
                    replies.append(client_app(message, self.contexts[node]))
                except Exception as error:  # as Flower's own processes do
                    replies.append(app.Message(app.Error(2, str(error)), reply_to=message))
            self.sent += replies
            return replies

    return AppGrid()


def run_app(folder, out, node_configs, monkeypatch, **config):
    """Run an exported app in this process, by its own modules."""
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.startswith("fedvlm_app")]:
        del sys.modules[name]
    components = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
    server, client = (import_module(components[name].partition(":")[0]).app for name in ("serverapp", "clientapp"))
    app, grid = import_flower(), app_grid(client, node_configs)
    context = app.Context(1, 1, {}, app.RecordDict(), {**RUN_CONFIG, "out": str(out), **config})
    server(grid, context)
    return Result(out), grid


def partitions(count=3):
    return [{"partition-id": number, "num-partitions": count} for number in range(count)]


@pytest.fixture
def experiment(rows, tmp_path):
    path = store(tmp_path / "rows.npz", rows, np.ones(len(rows.labels), bool), domains=rows.domains)

    def make_settings(method, **overrides):
        return build({"method": method, "protocol": "own-test", "encoder": f"store:{path}", **overrides})

    return make_settings


def compare(app_result, settings, folder):
    """Compare tables, scores and shared tensors with `fedvlm run`, and every diagnostic with its sequential engine.

    Diagnostics, such as a cosine of two small differences, show the rounding of the batched engine.
    """
    plain = execute(settings, folder / "plain")
    sequential = execute(replace(settings, engine="single"), folder / "sequential")
    for other in (plain, sequential):
        tables = (result.result()["tables"] for result in (app_result, other))
        assert_close(*({str(number): table for number, table in enumerate(entry)} for entry in tables))
        for file in sorted((other.folder / "trainings").glob("*.safetensors")):
            values = [read_tensors(result.folder / "trainings" / file.name)[0] for result in (app_result, other)]
            assert_close(*({key: value for key, value in part.items() if "shared/" in key} for part in values))
    for line in range(len(sequential.rounds)):
        lines = (result.rounds[line] for result in (app_result, sequential))
        assert_close(*({**entry, "seconds": 0, "checksum": 0} for entry in lines))


def assert_close(ours, theirs, where=""):
    """Compare nested values to 1e-6."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_close(ours[key], theirs[key], f"{where} {key}")
    elif isinstance(theirs, str | None):
        assert ours == theirs
    else:
        assert np.allclose(np.asarray(ours), np.asarray(theirs), rtol=CLOSE, atol=CLOSE, equal_nan=True), where


ABLE = [
    name
    for name, kind in methods().items()
    if not kind().traits.needs - {"image", "text"} and not kind().traits.privacy.centralised
]


@pytest.mark.parametrize("name", ABLE)
def test_the_app_gives_the_numbers_of_a_run(name, experiment, tmp_path, monkeypatch):
    """For every method that works on pooled embeddings, with three clients."""
    overrides = {"clients": {"public_ratio": 0.2}} if make(name).traits.training.reference else {}
    settings = experiment(shorten(make(name)), allow_small=True, **overrides)
    export_flower_app(settings, tmp_path / "app")
    result, _ = run_app(tmp_path / "app", tmp_path / "out", partitions(), monkeypatch)
    compare(result, settings, tmp_path)


@pytest.mark.parametrize("protocol", ["leave-one-domain-out", "own-test"])
def test_protocols_and_the_channel_are_the_same(protocol, experiment, tmp_path, monkeypatch):
    """Also clients that are only measured, noise by seed, several seeds, and a chosen round."""
    method = {"name": "fedot", "rounds": 3, "lr": 1e-3}
    channel = {"clip": 1.0, "noise_multiplier": 0.1}
    settings = experiment(method, protocol=protocol, seeds=[0, 1], channel=channel, selection="validation")
    export_flower_app(settings, tmp_path / "app")
    result, _ = run_app(tmp_path / "app", tmp_path / "out", partitions(), monkeypatch)
    compare(result, settings, tmp_path)


def test_nodes_with_their_own_data_give_what_one_process_gives(rows, experiment, tmp_path, monkeypatch):
    """Each node has a store of its own, and gets its own classifier."""
    settings = experiment({"name": "fedot", "rounds": 3, "lr": 1e-3}, source={"classes": CLASSES})
    plain = execute(settings, tmp_path / "plain")
    export_flower_app(settings, tmp_path / "app")
    nodes = [
        {
            "client": name,
            "encoder": f"store:{store(tmp_path / f'{name}.npz', rows, rows.domains == name)}",
            "save": str(tmp_path / "own" / name),
        }
        for name in NAMES
    ]
    result, grid = run_app(tmp_path / "app", tmp_path / "out", nodes, monkeypatch)
    assert list(result.result()["tables"][0]) == list(plain.result()["tables"][0])
    assert result.rounds[-1]["clients"].keys() == set(NAMES)
    for name in NAMES:
        classifier = Personalised.from_pretrained(tmp_path / "own" / name / "0-all")
        assert classifier.client == name and "skew" in classifier.local
    for reply in grid.sent:  # neither local tensors nor samples one by one
        assert "skew" not in reply.content["arrays"] and '"hits"' not in reply.content["header"]["json"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"tune": ["lr"]}, "search of its own"),
        ({"channel": {"verified": True, "clip": 1.0}}, "fedvlm deploy"),
        ({"method": "pooled"}, "not federated"),
        ({"global_test": True}, "in one place"),
        ({"warm_start": "tofa"}, "warm_start"),
        ({"attack": "noise"}, "simulations"),
    ],
)
def test_what_an_app_cannot_run_is_refused_with_the_reason(overrides, reason, experiment, tmp_path):
    settings = experiment(**{"method": "fedot", **overrides})
    with pytest.raises(SettingsError, match=reason):
        export_flower_app(settings, tmp_path / "app")
    assert not (tmp_path / "app").exists()


def test_faults_of_nodes_are_named(experiment, tmp_path, monkeypatch):
    export_flower_app(experiment({"name": "fedavg", "rounds": 1}), tmp_path / "app")

    def run(nodes, out="out", **config):
        return run_app(tmp_path / "app", tmp_path / out, nodes, monkeypatch, **config)

    with pytest.raises(FederationError, match="2 nodes are connected, and the experiment's data have 3 clients"):
        run(partitions()[:2], **{"min-nodes": 1})
    with pytest.raises(FederationError, match="2 nodes are connected, and min-nodes is 3"):
        run(partitions()[:2])
    with pytest.raises(FederationError, match="partition-id from 0 to 2"):
        run(partitions(4))
    with pytest.raises(FederationError, match="the same client"):
        run([*partitions()[:2], partitions()[1]])
    with pytest.raises(FederationError, match="client = 'NAME'"):
        run([*partitions()[:2], {"data": "images"}])
    run(partitions(), "done")
    with pytest.raises(DataError, match="holds a run already"):
        run(partitions(), "done")
    with pytest.raises(DataError, match="not empty"):
        export_flower_app(experiment("fedavg"), tmp_path / "app")


def test_files_of_an_experiment_are_found_from_another_folder(experiment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    export_flower_app(replace(experiment("fedavg"), data="images", encoder="store:rows.npz"), tmp_path / "app")
    values = tomllib.loads((tmp_path / "app" / "fedvlm_app" / "experiment.toml").read_text())
    assert values["data"] == str(tmp_path / "images") and values["encoder"] == f"store:{tmp_path / 'rows.npz'}"


def test_the_app_imports_public_names_of_flower_only(experiment, tmp_path):
    export_flower_app(experiment("fedavg"), tmp_path / "app")
    imported = set()
    for path in (tmp_path / "app").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "flwr":
                imported |= {(node.module, alias.name) for alias in node.names}
            assert not isinstance(node, ast.Import) or "flwr" not in ast.unparse(node)
    import_flower()
    assert {module for module, _ in imported} == {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
    assert all(name in import_module(module).__all__ for module, name in imported)


def answers(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.mark.deployed
@pytest.mark.slow
def test_flwr_run_gives_the_numbers_of_a_run(experiment, tmp_path):
    """Flower's own SuperLink, three of its SuperNodes and `flwr run`, as they come: nothing of fedvlm's deployment."""
    settings = experiment({"name": "fedot", "rounds": 2, "lr": 1e-3})
    export_flower_app(settings, tmp_path / "app")
    home, running = tmp_path / "home", []
    home.mkdir()
    bin = Path(sys.executable).parent
    source = str(Path(import_module("fedvlm").__file__).parents[1])
    env = {**os.environ, **QUIET_ENVIRONMENT, "FLWR_HOME": str(home), "PYTHONPATH": source}
    env |= {"PATH": f"{bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def start(name, *words):
        with open(tmp_path / f"{name}.log", "wb") as log:
            running.append(
                subprocess.Popen([bin / words[0], *words[1:]], stdout=log, stderr=log, env=env, cwd=tmp_path)
            )

    def flwr(*words):
        done = subprocess.run(
            [bin / "flwr", *words], env=env, capture_output=True, text=True, cwd=tmp_path, timeout=120
        )
        return done.stdout + done.stderr

    try:
        for _ in range(3):  # another program may take the port meanwhile
            port = free_port()
            start("link", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
            while running[-1].poll() is None and not answers(port):
                sleep(0.2)
            if running[-1].poll() is None:
                break
        (home / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
        for number in range(3):
            own = ["--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1", "--port", str(free_port())]
            config = ["--node-config", f"partition-id={number} num-partitions=3"]
            start(f"node{number}", "flower-supernode", "--insecure", *own, *config)
        out = tmp_path / "out"
        told = flwr("run", "app", "here", "--run-config", f'out="{out}" min-nodes=3')
        assert "Successfully started run" in told
        end = monotonic() + 200
        while monotonic() < end and not (out / "result.json").exists():
            sleep(1)
        logs = "\n".join(path.read_text()[-3000:] for path in sorted(tmp_path.glob("*.log")))
        assert (out / "result.json").exists(), logs
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(20)
    compare(Result(out), settings, tmp_path)
