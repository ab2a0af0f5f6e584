"""The server's side of a deployed run: a training after the other over the sites, on record."""

import json
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from fedvlm.channel.pipeline import DecodedUploads
from fedvlm.channel.settings import check_secagg, with_deployment_bound
from fedvlm.core import Tensors
from fedvlm.core.schema import check_settings
from fedvlm.deploy.events import EventLog, EventLogger, ignore_event, round_logger
from fedvlm.deploy.kits import ServerKit, read_server
from fedvlm.deploy.race import FederatedTuning
from fedvlm.deploy.remote import RemoteEngine, SiteOpening
from fedvlm.deploy.rows import normalise_class_name
from fedvlm.deploy.sums import SUMS_SUFFIX, UploadSums, removal_obstacle
from fedvlm.engines.client import RemoteState, TrainingTerms
from fedvlm.engines.loop import ignore_sum
from fedvlm.engines.state import State
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError
from fedvlm.evaluate import metrics
from fedvlm.evaluate.protocols import Training, contract
from fedvlm.evaluate.protocols.base_to_new import BaseToNew
from fedvlm.record import Record
from fedvlm.runner import tune
from fedvlm.runner.load import load
from fedvlm.runner.manifest import build_manifest
from fedvlm.runner.prepare import frozen_from, prepare, terms_of, trainings_of
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import file_name, finished_scores, run_training
from fedvlm.storage.files import read_json, read_tensors, write_file, write_json

MANIFEST_FIELDS = ("encoder", "classes", "dim", "scale", "template")  # what a manifest has of a site's words
REFERENCE_FILE = "reference.safetensors"  # in the server's folder, for methods that need one
RUN_REQUEST_FILE = "request.json"  # in the server's folder: the run that is asked for
JOIN_RESULT_FILE = "joined.json"  # in the server's folder: how the last site that came late fares
ERROR_FILE = "error.txt"  # in the server's folder: why the last run ended


def check_deployable(kit: ServerKit, settings: Settings) -> None:
    """Refuses, before any site is asked, what a federation of sites cannot run."""
    if settings.smoke:
        raise SettingsError("smoke = true is for one process; set the method's rounds instead")
    if settings.warm_start is not None:
        raise SettingsError("warm_start is for runs in one process; leave it out, or run method = 'tofa' alone")
    if settings.tune:
        tune.check_tunable(settings)
    if settings.method.traits.centralised or settings.centralised:
        raise SettingsError(
            f"{settings.method.name} is not federated: it takes all clients' rows in one place, "
            "which only a simulation has; choose another method, as 'auto' or 'alone'"
        )
    if settings.attack != "none":
        raise SettingsError(f"attack = {settings.attack!r} is for simulations; leave it out of a deployed run")
    if settings.device != "cpu":
        raise SettingsError(
            f"device = {settings.device!r} is for simulations: what a site computes on is its own affair; leave it out"
        )
    if settings.protocol == BaseToNew.name:
        raise SettingsError(
            f"protocol = {settings.protocol!r} is for simulations: it leaves classes of the sites out; take 'own-test'"
        )
    check_secagg(settings.channel, settings.method)
    if not kit.rehearsal and "classes" not in settings.source:
        raise SettingsError(
            "the server has no images to take class names from; name the classes in the "
            "experiment, as [source] classes = ['cat', 'dog']"
        )
    wants = contract.has_reference(settings.method) and not kit.rehearsal
    if wants and not (kit.folder / REFERENCE_FILE).exists():
        raise DataError(
            f"the method {settings.method.name} needs public reference rows, and there is no "
            f"{kit.folder / REFERENCE_FILE}; make it: fedvlm deploy reference {kit.folder} --data "
            "IMAGES --encoder ENCODER"
        )


def training_spec(settings: Settings, training: Training, seed: int) -> dict[str, Any]:
    """A training as its sites are told of it."""
    return {
        "identity": json.loads(json.dumps(settings.identity())),
        "classes": [normalise_class_name(str(class_name)) for class_name in settings.source.get("classes", [])],
        "seed": seed,
        "training": training.name,
    }


def describe_bound(settings: Settings) -> str:
    """What keeps one site from moving the mean as far as it likes."""
    channel = with_deployment_bound(settings.channel, settings.method)
    if channel.bound == "median":
        return (
            "changes longer than twice the round's median are shortened, and rows above four times "
            "the median do not count (channel.bound)"
        )
    if channel.secure:
        return (
            f"only channel.clip = {channel.clip} bounds a change, at its site: in a secure sum nobody sees single ones"
        )
    if channel.bound:
        return f"changes of a norm above {channel.bound} are refused (channel.bound)"
    return f"nothing bounds a change: {settings.method.name} aggregates single uploads in its own way"


@dataclass
class DeployedRun:
    """One run over the sites; its record is as a run in one process leaves it."""

    grid: Any
    kit: ServerKit
    settings: Settings
    record: Record
    on_progress: Callable[[str, int, int], None]
    tuned: dict[str, Any] = field(default_factory=dict)  # the races for its settings, if any
    log_event: EventLogger = ignore_event
    excluded_nodes: Collection[int] = ()  # nodes of sites that are not asked

    def run_all(self) -> None:
        with self.record.lock():
            if self.settings.tune:
                tunings = {seed: FederatedTuning(self, seed).run_all() for seed in self.settings.seeds}
                self.tuned = {"tuned": tune.to_manifest(tunings)}
            tables = [self.run_seed(seed) for seed in self.settings.seeds]
            self.record.finish(tables)

    def run_seed(self, seed: int) -> metrics.Table:
        settings = tune.with_tuned(self.settings, self.tuned, seed)
        domains = {name: name for name in self.kit.sites}  # each site is one of its own
        done = {}
        has_shared = settings.method.rounds == 0
        for training in trainings_of(settings, domains, seed):
            name = file_name(training, seed)
            scores = finished_scores(self.record, name)
            if scores is None:
                scores = self.train(settings, training, seed)
            done[training.name] = (training, scores)
            path = self.record.folder / "trainings" / f"{name}.safetensors"
            has_shared = has_shared or any(key.startswith("shared/") for key in read_tensors(path)[0])
        return settings.rules().table(domains, done, has_shared)

    def open_training(
        self, settings: Settings, training: Training, seed: int, tuning: Any | None = None
    ) -> RemoteEngine:
        """A training at all sites that are there; of a `race` it tells how large that is."""
        spec = training_spec(settings, training, seed) | ({} if tuning is None else {"race": tuning})
        self.log_event(
            "begun",
            method=settings.method.name,
            training=training.name,
            rounds=settings.method.rounds,
            sites=list(self.kit.sites),
            record=str(self.record.folder),
        )
        engine = RemoteEngine(
            self.grid, self.kit, spec, self.load_reference(training, seed), self.log_event, self.excluded_nodes
        )
        engine.wait_for_sites()
        return engine

    def make_terms(self, settings: Settings, engine: RemoteEngine, seed: int) -> tuple[TrainingTerms, RemoteState]:
        """What everyone knows of a training, and the local tensors of one nobody has seen."""
        first = engine.sites[engine.base]
        terms = terms_of(settings, frozen_from(first.about, first.text, seed), seed)
        channel = with_deployment_bound(settings.channel, settings.method)
        return replace(terms, channel=channel), RemoteState(0, tuple(first.about["local"]))

    def train(self, settings: Settings, training: Training, seed: int) -> metrics.Results:
        engine = self.open_training(settings, training, seed)
        first = engine.sites[engine.base]
        requested = tune.reuse_tuned(self.settings, self.tuned)
        if not (self.record.folder / "manifest.json").exists():
            self.record.start(self.make_manifest(requested, engine, first, seed))
        else:
            self.record.compare({"identity": requested.identity()})
        name = file_name(training, seed)
        terms, initial_local = self.make_terms(settings, engine, seed)
        return run_training(
            settings,
            training,
            terms,
            engine,
            State(0, first.first, {}, channel=tune.initial_spend(self.tuned, training.name, seed)),
            initial_local,
            self.record,
            lambda done: self.on_progress(name, done, settings.method.rounds),
            checkpoint_seconds=0.0,  # a round over the network is worth a checkpoint
            on_sum=self.sum_recorder(settings, name),
        )

    def sum_recorder(self, settings: Settings, name: str) -> Callable[[int, Tensors, DecodedUploads], None]:
        """What is kept of a round's uploads for sites that withdraw later, where that helps."""
        if removal_obstacle(settings):
            return ignore_sum
        sums = UploadSums.read(self.record.folder / "trainings" / f"{name}.{SUMS_SUFFIX}")
        return sums.add

    def make_manifest(self, settings: Settings, engine: RemoteEngine, first: SiteOpening, seed: int) -> dict[str, Any]:
        """The manifest: of the rows the server knows no more than classes and numbers."""
        about = first.about
        text = None if first.text is None else first.text.tolist()
        site_facts = {key: about[key] for key in MANIFEST_FIELDS if key in about}
        site_facts |= {"rows": "at the sites", "data": f"{len(self.kit.sites)} sites", "text": text}
        trainings = trainings_of(settings, {name: name for name in self.kit.sites}, seed)
        names = [training.name for training in trainings]
        dropped = dict.fromkeys(settings.seeds, 0)
        return {
            **{"identity": settings.identity(), "memory": True, "notes": [describe_bound(settings)]},
            **build_manifest(site_facts, names, engine.counts, dropped),
            **{"sites": list(self.kit.sites), "local": about["local"]},
            **self.tuned,
        }

    def load_reference(self, training: Training, seed: int) -> Tensors:
        """The public rows that go with the first message, if the method wants them."""
        settings = self.settings
        if not contract.has_reference(settings.method):
            return {}
        if self.kit.rehearsal:
            rows, _ = load(settings, lambda stage, done, total: None)
            index = prepare(settings, rows, seed).reference(training)
            return {"reference": rows.view(settings.method.traits.needs)[torch.from_numpy(index)]}
        values, _ = read_tensors(self.kit.folder / REFERENCE_FILE)
        view = "patches" if "patches" in settings.method.traits.needs else "image"
        if view not in values:
            raise DataError(
                f"{self.kit.folder / REFERENCE_FILE} has no {view} rows, which {settings.method.name} "
                "works on; make it again: fedvlm deploy reference"
            )
        return {"reference": values[view]}


RUN_RULES = {"quorum", "deadline", "wait"}  # of server.toml, that one run may have otherwise


def with_rules(kit: ServerKit, rules: Mapping[str, Any]) -> ServerKit:
    """The kit with the rules of this run."""
    fixed_fields = {kit_field.name for kit_field in fields(ServerKit)} - RUN_RULES
    return replace(kit, **check_settings("the run", rules, ServerKit, excluded=fixed_fields))


STOPPED_MESSAGE = "it was stopped, or the server was; run the same command again to go on"


def run_request(grid: Any, folder: Path, id: str = "") -> None:
    """The ServerApp: what is to be run is in a file, and so is why it failed, if it did."""
    request, log_event = read_json(folder / RUN_REQUEST_FILE), EventLog(folder)
    if request.get("id", "") != id:  # as if this process began late; it would get in the way
        raise FederationError("another run was asked for before this one began; ask for it again")

    def report_failure(reason: str, full_text: str) -> None:
        log_event("failed", why=reason)
        if read_json(folder / RUN_REQUEST_FILE) == request:  # else nobody waits for this one any more
            write_file(folder / ERROR_FILE, full_text.encode())

    try:
        _execute_request(grid, folder, request, log_event)
    except FedVLMError as error:
        report_failure(str(error), str(error))
        raise
    except Exception as error:
        report_failure(f"{type(error).__name__}: {error}", traceback.format_exc())
        raise
    except BaseException:  # Flower ends its processes by signals
        report_failure(STOPPED_MESSAGE, STOPPED_MESSAGE)
        raise


def _execute_request(grid: Any, folder: Path, request: Mapping[str, Any], log_event: EventLogger) -> None:
    kit = with_rules(read_server(folder), request.get("rules", {}))
    if "joins" in request:
        from fedvlm.deploy.late import join_late

        done = join_late(grid, kit, Path(request["out"]), request["joins"], log_event)
        return write_json(folder / JOIN_RESULT_FILE, done)
    settings = build(request["identity"])
    check_deployable(kit, settings)
    progress = Path(request["out"]).with_suffix(".progress")

    def write_progress(stage: str, done: int, total: int) -> None:
        write_json(progress, [stage, done, total])

    record = Record(Path(request["out"]), round_logger(log_event, settings.method.rounds))
    DeployedRun(grid, kit, settings, record, write_progress, log_event=log_event).run_all()
    log_event("ended", record=str(record.folder))
