"""Run an experiment as a plain Flower app: what an exported app calls at its server and at its clients.

Nothing here imports Flower: the app itself does, and only by Flower's public interface.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

from fedvlm.classifier.export import ClassifierOrigin, save_with_card
from fedvlm.classifier.personalised import Personalised
from fedvlm.core import Tensors
from fedvlm.data.splits import SPLITS
from fedvlm.data.table import EmbeddedTable
from fedvlm.deploy.kits import ServerKit, SiteKit
from fedvlm.deploy.messages import encoder_fingerprint, normalise_class_name
from fedvlm.deploy.server.run import check_deployable
from fedvlm.deploy.site.training import ignore_progress, load_site_samples
from fedvlm.engines.client import RemoteState, World, client_world, measure
from fedvlm.engines.flower.client import ClientTraining, TrainingHandler, to_arrays, to_tensors
from fedvlm.engines.flower.engine import FlowerEngine
from fedvlm.engines.flower.messages import Message, seal, unseal
from fedvlm.engines.state import State
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError
from fedvlm.evaluate.metrics import Table
from fedvlm.evaluate.protocols import Training, contract
from fedvlm.record import Record
from fedvlm.report.tables import compare_table
from fedvlm.runner.experiment_files import read_toml
from fedvlm.runner.load import load
from fedvlm.runner.manifest import build_manifest, provenance
from fedvlm.runner.prepare import (
    check_samples,
    frozen_from,
    prepare,
    prepare_client,
    template_of,
    terms_of,
    trainings_of,
    with_calibration,
)
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import TrainingRun, fit_calibration, run_training
from fedvlm.storage.files import slug

NODE_SETTINGS = ("client", "data", "encoder", "partition-id", "save")  # of a SuperNode's --node-config
NODE_POLL_SECONDS = 0.5  # seconds between looks for nodes
FACTS = ("encoder", "classes", "dim", "scale", "template")  # that all clients have alike, for the manifest
Exchange = Callable[[Mapping[int, Message]], Mapping[int, Message | str]]  # requests by node; replies or errors


def check_exportable(settings: Settings) -> None:
    """Refuse what an app on somebody else's federation cannot run."""
    if settings.channel.verified:
        raise SettingsError(
            "channel.verified needs fedvlm's own server and sites, which check each other's keys; leave it out, or "
            "use fedvlm deploy"
        )
    if settings.tune:
        raise SettingsError(
            f"tune = {list(settings.tune)} is a search of its own; run it first with fedvlm run, and export with the "
            "values that it chose"
        )
    if settings.global_test:
        raise SettingsError("global_test = true needs the test samples of all clients in one place; leave it out")
    check_deployable(ServerKit(Path(), "", rehearsal=True), settings)


@dataclass(frozen=True)
class ClientData:
    """Hold the samples of one client, and who it is."""

    id: str
    domain: str
    place: int  # in the order of clients
    clients: int  # of the experiment's data; 0 if every client brings its own
    world: Callable[[str], World]  # by the name of the training; "" before any
    rows: EmbeddedTable
    settings: Settings


@lru_cache(maxsize=8)  # a process may serve several clients
def load_client(experiment: Path, node: tuple[tuple[str, Any], ...], seed: int) -> ClientData:
    """Load the samples of the client that a node is: its own ones, or its part of the experiment's."""
    settings, config = build(read_toml(experiment)), dict(node)
    if "data" in config or str(config.get("encoder")).startswith("store:"):
        return _load_own_samples(settings, config, seed)
    rows = load(settings, ignore_progress)[0]
    check_samples(settings, rows)
    prepared = prepare(settings, rows, seed)
    prepared.check()
    ids, number = list(prepared.partition.clients), config.get("partition-id")
    if not isinstance(number, int) or not 0 <= number < len(ids):
        raise SettingsError(
            f"a node needs its own data, or a partition-id from 0 to {len(ids) - 1}, as the experiment has {len(ids)} "
            f"clients; got partition-id = {number}. Start as many nodes as clients, or set --node-config "
            "\"data='IMAGES' client='NAME'\""
        )
    id, trainings = ids[number], {training.name: training for training in prepared.trainings}

    def world(name: str) -> World:
        return client_world(prepared.world(trainings[name]), id) if name else prepared.own_world(id)

    return ClientData(id, prepared.partition.domains[id], number, len(ids), world, rows, settings)


def _load_own_samples(settings: Settings, config: Mapping[str, Any], seed: int) -> ClientData:
    classes, name, method = settings.source.get("classes", []), str(config.get("client", "")), settings.method
    if not classes or not name:
        raise SettingsError(
            "a node with its own data needs client = 'NAME' in its --node-config, and the experiment needs the names "
            "of all classes, as [source] classes = ['cat', 'dog']"
        )
    if contract.has_reference(method):
        raise SettingsError(
            f"{method.name} adapts to public reference samples, which nodes with their own data do not have; use "
            "another method, or fedvlm deploy"
        )
    encoder = str(config.get("encoder", settings.encoder))
    kit = SiteKit(Path(), name, "", str(config.get("data", "")), encoder, access=settings.access)
    rows = load_site_samples(kit, settings, [normalise_class_name(str(word)) for word in classes])
    check_samples(settings, rows)
    clients = settings.clients if encoder.startswith("store:") else with_calibration(settings.clients)
    prepared = prepare_client(replace(settings, clients=clients), rows, name, seed)
    contract.check_training_data(method, rows, prepared.partition, Training("own", (name,), ()))
    world = prepared.own_world(name, entropy=True)
    return ClientData(name, name, 0, 0, lambda training: world, rows, settings)


def answer(experiment: Path, node: Mapping[str, Any], request: Message, state: Message) -> tuple[Message, Message]:
    """Answer a request at a client; return the reply, and the client's state, which stays in its context."""
    own = {key: node[key] for key in NODE_SETTINGS if key in node}
    try:
        header = unseal(request, "this client").header
        seed, _, name = header["training"].partition("/")
        client = load_client(experiment, tuple(sorted(own.items())), int(seed))
        if header["kind"] == "open":
            return seal(_describe_client(client, header)), state
        training = ClientTraining(header["training"], client.id, client.world(name))
        folder = Path(own["save"]) / slug(f"{seed}-{name}") if "save" in own else None
        save = None if folder is None else partial(save_classifier, client, folder)
        reply, state = TrainingHandler({training.key: training}, save).answer(request, state)
    except FedVLMError as error:
        reply = Message({"error": str(error)})
    return seal(reply), state


def _describe_client(client: ClientData, header: Mapping[str, Any]) -> Message:
    """Return what the server must know of a client to start the trainings."""
    world = client.world("")
    frozen, member = world.frozen, world.members[client.id]
    shared, local = world.method.init(frozen)
    words = {
        **{key: header[key] for key in ("kind", "training", "round", "nonce")},
        **{"client": client.id, "domain": client.domain, "place": client.place, "clients": client.clients},
        **{"encoder": client.rows.encoder, "classes": list(frozen.classes), "dim": frozen.dim},
        **{"scale": frozen.scale, "local": sorted(local), **template_of(frozen)},
        "samples": {split: len(getattr(member, split)) for split in SPLITS},
    }
    first = {f"shared/{name}": value for name, value in shared.items()}
    return Message(words, to_arrays(first | ({} if frozen.text is None else {"text": frozen.text})))


def save_classifier(client: ClientData, folder: Path, training: ClientTraining, sent: Tensors, local: Tensors) -> None:
    """Save a client's own classifier where its node says (`save`)."""
    world, rows, id = training.world, client.rows, training.id
    calibration = fit_calibration(world, sent, local, id)
    classifier = Personalised(world.method, world.frozen, sent, local, id, rows.encoder, calibration)
    measured = measure(world, sent, local, id)
    identity = {"identity": client.settings.identity(), "data": rows.name, "rows": rows.fingerprint}
    counts = measured["test_rows"], measured["test_hits"]
    save_with_card(classifier, ClassifierOrigin({**identity, **provenance()}, training.key, *counts), folder)


class AppEngine(FlowerEngine):
    """Send tasks to the nodes of a Flower app."""

    def __init__(self, send: Exchange, nodes: Mapping[str, int], training: str, quorum: float = 1.0) -> None:
        super().__init__(None, nodes, training, quorum)
        self.send = send

    def exchange(self, parcels: Mapping[str, Message], number: int) -> dict[str, Message]:
        requests, replies = self._sealed(parcels), {}
        answers = self.send({self.nodes[id]: request for id, request in requests.items()})
        for id, request in requests.items():
            with self._record_failure(id, request):
                reply = answers.get(self.nodes[id], "it did not answer in time")
                if isinstance(reply, str):
                    raise FederationError(f"{id}: {reply}")
                replies[id] = self._check_reply(reply, id, request)
        self._check_quorum(parcels, replies, number)
        return replies


def run_experiment(
    experiment: Path, send: Exchange, find_nodes: Callable[[], Iterable[int]], config: Mapping[str, Any]
) -> str:
    """Run the experiment over the nodes, and return its table; the record is in `out` of the run's config, if set."""
    settings = build(read_toml(experiment))
    check_exportable(settings)
    end, wanted = monotonic() + float(config["wait"]), int(config["min-nodes"])
    while len(nodes := sorted(find_nodes())) < wanted and monotonic() < end:
        sleep(NODE_POLL_SECONDS)
    if len(nodes) < max(1, wanted):
        raise FederationError(f"{len(nodes)} nodes are connected, and min-nodes is {wanted}; start more or wait")
    with TemporaryDirectory() as place:
        record = Record(Path(str(config["out"] or place)))
        if (record.folder / "manifest.json").exists():
            raise DataError(f"{record.folder} holds a run already; choose another folder for out")
        with record.lock():
            run = AppRun(settings, send, nodes, record, float(config["quorum"]))
            record.finish([run.run_seed(seed) for seed in settings.seeds])
        return compare_table([record])


@dataclass(frozen=True)
class AppRun:
    """Run the trainings of an experiment over nodes."""

    settings: Settings
    send: Exchange
    nodes: Sequence[int]
    record: Record
    quorum: float

    def run_seed(self, seed: int) -> Table:
        settings, openings = self.settings, self.open_clients(seed)
        ids = list(openings)
        about, values = openings[ids[0]][1].header, to_tensors(openings[ids[0]][1].arrays)
        first = {key[7:]: value for key, value in values.items() if key.startswith("shared/")}
        terms = terms_of(settings, frozen_from(about, values.get("text"), seed), seed)
        domains = {id: str(reply.header["domain"]) for id, (_, reply) in openings.items()}
        counts = {id: reply.header["samples"] for id, (_, reply) in openings.items()}
        trainings, done = trainings_of(settings, domains, seed), {}
        if not (self.record.folder / "manifest.json").exists():
            text = values["text"].tolist() if "text" in values else None
            facts = {key: about[key] for key in FACTS if key in about} | {"rows": "at the clients", "text": text}
            facts |= {"data": f"{len(ids)} Flower nodes", "identity": settings.identity(), "memory": True, "notes": []}
            names = [training.name for training in trainings]
            self.record.start(
                build_manifest(facts, names, counts, dict.fromkeys(settings.seeds, 0)) | {"local": about["local"]}
            )
        for training in trainings:
            nodes = {id: node for id, (node, _) in openings.items()}
            engine = AppEngine(self.send, nodes, f"{seed}/{training.name}", self.quorum)
            engine.rows = {id: count["train"] for id, count in counts.items()}
            run = TrainingRun(settings, training, terms, self.record)
            local = RemoteState(0, tuple(about["local"]))
            done[training.name] = training, run_training(run, engine, State(0, first, {}), local, lambda rounds: None)
        return settings.rules().table(domains, done, bool(first) or settings.method.rounds == 0)

    def open_clients(self, seed: int) -> dict[str, tuple[int, Message]]:
        """Ask every node who it is; return node and reply by client, in the order of clients."""
        engine = AppEngine(self.send, {f"node {node}": node for node in self.nodes}, f"{seed}/")
        request = Message({"kind": "open", "training": engine.training, "round": 0})
        replies = engine.exchange(dict.fromkeys(engine.nodes, request), 0)
        ordered = sorted(replies.items(), key=lambda item: (item[1].header["place"], str(item[1].header["client"])))
        openings = {str(reply.header["client"]): (engine.nodes[node], reply) for node, reply in ordered}
        if len(openings) < len(replies):
            raise FederationError("two nodes are the same client; give each its own client or partition-id")
        names, first = list(openings), ordered[0][1].header
        for name, (_, reply) in openings.items():
            keys, base = (*FACTS, "local", "clients"), ordered[0][1]
            different = [key for key in keys if _comparable(key, reply) != _comparable(key, base)]
            if different:
                raise FederationError(
                    f"clients {names[0]} and {name} do not have the same {different[0]}; all need the same encoder, "
                    "classes and fedvlm"
                )
        if first["clients"] and len(openings) != first["clients"]:
            raise FederationError(
                f"{len(openings)} nodes are connected, and the experiment's data have {first['clients']} clients; "
                "start one node for each"
            )
        return openings


def _comparable(key: str, reply: Message) -> Any:
    value = reply.header.get(key)
    return encoder_fingerprint(str(value)) if key == "encoder" else value
