"""The server's side of a deployed run: a training after the other over the sites, on record."""

import json
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from fedvlm.channel.settings import deployed, fits_secagg
from fedvlm.channel.uploads import Arrived
from fedvlm.core import Tensors
from fedvlm.core.schema import check_settings
from fedvlm.deploy.events import Events, Note, rounds_noted, unnoted
from fedvlm.deploy.kits import ServerKit, read_server
from fedvlm.deploy.race import Race
from fedvlm.deploy.remote import Opened, Remote
from fedvlm.deploy.rows import named
from fedvlm.deploy.sums import ENDING, Sums, why_bound
from fedvlm.engines.client import Kept, Terms
from fedvlm.engines.loop import unheard
from fedvlm.engines.state import State
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError
from fedvlm.evaluate import reference, scores
from fedvlm.evaluate.protocols import Training
from fedvlm.evaluate.protocols.base_to_new import BaseToNew
from fedvlm.record import Record
from fedvlm.runner import tune
from fedvlm.runner.begin import manifest
from fedvlm.runner.load import load
from fedvlm.runner.prepare import frozen_from, prepare, terms_of, trainings_of
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import carry_out, file_name, finished
from fedvlm.storage.files import write
from fedvlm.storage.sealed import read_json, read_tensors, write_json

KNOWN = ("encoder", "classes", "dim", "scale", "template")  # what a manifest has of a site's words
REFERENCE = "reference.safetensors"  # in the server's folder, for methods that need one
REQUEST = "request.json"  # in the server's folder: the run that is asked for
JOINED = "joined.json"  # in the server's folder: how the last site that came late fares
FAILED = "error.txt"  # in the server's folder: why the last run ended


def ready(kit: ServerKit, settings: Settings) -> None:
    """Refuses, before any site is asked, what a federation of sites cannot run."""
    if settings.smoke:
        raise SettingsError("smoke = true is for one process; set the method's rounds instead")
    if settings.warm_start is not None:
        raise SettingsError(
            "warm_start is for runs in one process; leave it out, or run method = 'tofa' alone"
        )
    if settings.tune:
        tune.check(settings)
    if settings.method.traits.centralised or settings.centralised:
        raise SettingsError(
            f"{settings.method.name} is not federated: it takes all clients' rows in one place, "
            "which only a simulation has; choose another method, as 'auto' or 'alone'"
        )
    if settings.attack != "none":
        raise SettingsError(
            f"attack = {settings.attack!r} is for simulations; leave it out of a deployed run"
        )
    if settings.device != "cpu":
        raise SettingsError(
            f"device = {settings.device!r} is for simulations: what a site computes on is its own "
            "affair; leave it out"
        )
    if settings.protocol == BaseToNew.name:
        raise SettingsError(
            f"protocol = {settings.protocol!r} is for simulations: it leaves classes of the sites "
            "out; take 'own-test'"
        )
    fits_secagg(settings.channel, settings.method)
    if not kit.rehearsal and "classes" not in settings.source:
        raise SettingsError(
            "the server has no images to take class names from; name the classes in the "
            "experiment, as [source] classes = ['cat', 'dog']"
        )
    wants = reference.wants_reference(settings.method) and not kit.rehearsal
    if wants and not (kit.folder / REFERENCE).exists():
        raise DataError(
            f"the method {settings.method.name} needs public reference rows, and there is no "
            f"{kit.folder / REFERENCE}; make it: fedvlm deploy reference {kit.folder} --data "
            "IMAGES --encoder ENCODER"
        )


def spec_of(settings: Settings, training: Training, seed: int) -> dict[str, Any]:
    """A training as its sites are told of it."""
    return {
        "identity": json.loads(json.dumps(settings.identity())),
        "classes": [named(str(one)) for one in settings.source.get("classes", [])],
        "seed": seed,
        "training": training.name,
    }


def bound_note(settings: Settings) -> str:
    """What keeps one site from moving the mean as far as it likes."""
    channel = deployed(settings.channel, settings.method)
    if channel.bound == "median":
        return (
            "changes longer than twice the round's median are shortened, and rows above four times "
            "the median do not count (channel.bound)"
        )
    if channel.secure:
        return (
            f"only channel.clip = {channel.clip} bounds a change, at its site: in a secure sum "
            "nobody sees single ones"
        )
    if channel.bound:
        return f"changes of a norm above {channel.bound} are refused (channel.bound)"
    return (
        f"nothing bounds a change: {settings.method.name} aggregates single uploads in its own way"
    )


@dataclass
class Run:
    """One run over the sites; its record is as a run in one process leaves it."""

    grid: Any
    kit: ServerKit
    settings: Settings
    record: Record
    tell: Callable[[str, int, int], None]
    tuned: dict[str, Any] = field(default_factory=dict)  # the races for its settings, if any
    note: Note = unnoted
    others: Collection[int] = ()  # nodes of sites that are not asked

    def all(self) -> None:
        with self.record.lock():
            if self.settings.tune:
                races = {seed: Race(self, seed).all() for seed in self.settings.seeds}
                self.tuned = {"tuned": tune.noted(races)}
            tables = [self.seed(seed) for seed in self.settings.seeds]
            self.record.finish(tables)

    def seed(self, seed: int) -> scores.Table:
        settings = tune.settled(self.settings, self.tuned, seed)
        domains = {name: name for name in self.kit.sites}  # each site is one of its own
        done = {}
        shares = settings.method.rounds == 0
        for training in trainings_of(settings, domains, seed):
            name = file_name(training, seed)
            scores = finished(self.record, name)
            if scores is None:
                scores = self.train(settings, training, seed)
            done[training.name] = (training, scores)
            path = self.record.folder / "trainings" / f"{name}.safetensors"
            shares = shares or any(key.startswith("shared/") for key in read_tensors(path)[0])
        return settings.rules().table(domains, done, shares)

    def open(
        self, settings: Settings, training: Training, seed: int, race: Any | None = None
    ) -> Remote:
        """A training at all sites that are there; of a `race` it tells how large that is."""
        spec = spec_of(settings, training, seed) | ({} if race is None else {"race": race})
        self.note(
            "begun",
            method=settings.method.name,
            training=training.name,
            rounds=settings.method.rounds,
            sites=list(self.kit.sites),
            record=str(self.record.folder),
        )
        engine = Remote(
            self.grid, self.kit, spec, self.reference(training, seed), self.note, self.others
        )
        engine.gather()
        return engine

    def terms(self, settings: Settings, engine: Remote, seed: int) -> tuple[Terms, Kept]:
        """What everyone knows of a training, and the local tensors of one nobody has seen."""
        first = engine.sites[engine.base]
        terms = terms_of(settings, frozen_from(first.about, first.text, seed), seed)
        channel = deployed(settings.channel, settings.method)
        return replace(terms, channel=channel), Kept(0, tuple(first.about["local"]))

    def train(self, settings: Settings, training: Training, seed: int) -> scores.Results:
        engine = self.open(settings, training, seed)
        first = engine.sites[engine.base]
        asked = tune.known(self.settings, self.tuned)
        if not (self.record.folder / "manifest.json").exists():
            self.record.begin(self.about(asked, engine, first, seed))
        else:
            self.record.compare({"identity": asked.identity()})
        name = file_name(training, seed)
        terms, fresh = self.terms(settings, engine, seed)
        return carry_out(
            settings,
            training,
            terms,
            engine,
            State(0, first.first, {}, channel=tune.begun(self.tuned, training.name, seed)),
            fresh,
            self.record,
            lambda done: self.tell(name, done, settings.method.rounds),
            every=0.0,  # a round over the network is worth a checkpoint
            on_sum=self.sums(settings, name),
        )

    def sums(self, settings: Settings, name: str) -> Callable[[int, Tensors, Arrived], None]:
        """What is kept of a round's uploads for sites that withdraw later, where that helps."""
        if why_bound(settings):
            return unheard
        kept = Sums.read(self.record.folder / "trainings" / f"{name}.{ENDING}")
        return kept.add

    def about(self, settings: Settings, engine: Remote, first: Opened, seed: int) -> dict[str, Any]:
        """The manifest: of the rows the server knows no more than classes and numbers."""
        about = first.about
        text = None if first.text is None else first.text.tolist()
        known = {key: about[key] for key in KNOWN if key in about}
        known |= {"rows": "at the sites", "data": f"{len(self.kit.sites)} sites", "text": text}
        trainings = trainings_of(settings, {name: name for name in self.kit.sites}, seed)
        names = [one.name for one in trainings]
        dropped = dict.fromkeys(settings.seeds, 0)
        return {
            **{"identity": settings.identity(), "memory": True, "notes": [bound_note(settings)]},
            **manifest(known, names, engine.counts, dropped),
            **{"sites": list(self.kit.sites), "local": about["local"]},
            **self.tuned,
        }

    def reference(self, training: Training, seed: int) -> Tensors:
        """The public rows that go with the first message, if the method wants them."""
        settings = self.settings
        if not reference.wants_reference(settings.method):
            return {}
        if self.kit.rehearsal:
            rows, _ = load(settings, lambda what, done, total: None)
            index = prepare(settings, rows, seed).reference(training)
            return {"reference": rows.view(settings.method.traits.needs)[torch.from_numpy(index)]}
        values, _ = read_tensors(self.kit.folder / REFERENCE)
        view = "patches" if "patches" in settings.method.traits.needs else "image"
        if view not in values:
            raise DataError(
                f"{self.kit.folder / REFERENCE} has no {view} rows, which {settings.method.name} "
                "works on; make it again: fedvlm deploy reference"
            )
        return {"reference": values[view]}


RULES = {"quorum", "deadline", "wait"}  # of server.toml, that one run may have otherwise


def ruled(kit: ServerKit, rules: Mapping[str, Any]) -> ServerKit:
    """The kit with the rules of this run."""
    others = {one.name for one in fields(ServerKit)} - RULES
    return replace(kit, **check_settings("the run", rules, ServerKit, given=others))


STOPPED = "it was stopped, or the server was; run the same command again to go on"


def conduct(grid: Any, folder: Path, id: str = "") -> None:
    """The ServerApp: what is to be run is in a file, and so is why it failed, if it did."""
    request, note = read_json(folder / REQUEST), Events(folder)
    if request.get("id", "") != id:  # as if this process began late; it would get in the way
        raise FederationError("another run was asked for before this one began; ask for it again")

    def ended(why: str, whole: str) -> None:
        note("failed", why=why)
        if read_json(folder / REQUEST) == request:  # else nobody waits for this one any more
            write(folder / FAILED, whole.encode())

    try:
        _do(grid, folder, request, note)
    except FedVLMError as error:
        ended(str(error), str(error))
        raise
    except Exception as error:
        ended(f"{type(error).__name__}: {error}", traceback.format_exc())
        raise
    except BaseException:  # Flower ends its processes by signals
        ended(STOPPED, STOPPED)
        raise


def _do(grid: Any, folder: Path, request: Mapping[str, Any], note: Note) -> None:
    kit = ruled(read_server(folder), request.get("rules", {}))
    if "joins" in request:
        from fedvlm.deploy.late import join_late

        done = join_late(grid, kit, Path(request["out"]), request["joins"], note)
        return write_json(folder / JOINED, done)
    settings = build(request["identity"])
    ready(kit, settings)
    progress = Path(request["out"]).with_suffix(".progress")

    def tell(what: str, done: int, total: int) -> None:
        write_json(progress, [what, done, total])

    record = Record(Path(request["out"]), rounds_noted(note, settings.method.rounds))
    Run(grid, kit, settings, record, tell, note=note).all()
    note("ended", record=str(record.folder))
