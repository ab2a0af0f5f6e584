"""The server's side of a deployed run: a training after the other over the sites, on record."""

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlm.channel.settings import fits_secagg
from fedvlm.core import Tensors
from fedvlm.data.federation import Division, Member, divide
from fedvlm.data.table import Embedded
from fedvlm.deploy.kits import ServerKit, read_server
from fedvlm.deploy.remote import Remote, absent
from fedvlm.deploy.rows import named
from fedvlm.engines.client import World
from fedvlm.engines.flower.engine import VERSION
from fedvlm.engines.flower.wire import flower
from fedvlm.engines.state import State
from fedvlm.errors import DataError, FedVLMError, SettingsError
from fedvlm.evaluate import protocols, reference, scores
from fedvlm.record import Record
from fedvlm.runner.load import load
from fedvlm.runner.run import frozen, jobs_of, manifest
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import carry_out, finished, job_name
from fedvlm.storage.files import write
from fedvlm.storage.sealed import read_json, read_tensors, write_json

REFERENCE = "reference.safetensors"  # in the server's folder, for methods that need one
FAILED = "error.txt"  # in the server's folder: why the last run ended


def ready(kit: ServerKit, settings: Settings) -> None:
    """Refuses, before any site is asked, what a federation of sites cannot run."""
    if settings.smoke:
        raise SettingsError("smoke = true is for one process; set the method's rounds instead")
    if settings.warm_start is not None:
        raise SettingsError(
            "warm_start is for runs in one process; leave it out, or run method = 'tofa' alone"
        )
    fits_secagg(settings.channel, settings.method)
    if not kit.rehearsal and "classes" not in settings.source:
        raise SettingsError(
            "the server has no pictures to take class names from; name the classes in the "
            "experiment, as [source] classes = ['cat', 'dog']"
        )
    wants = reference.wants_reference(settings.method) and not kit.rehearsal
    if wants and not (kit.folder / REFERENCE).exists():
        raise DataError(
            f"the method {settings.method.name} needs public reference rows, and there is no "
            f"{kit.folder / REFERENCE}; make it: fedvlm deploy reference {kit.folder} --data "
            "PICTURES --encoder ENCODER"
        )


def division(members: Mapping[str, Member]) -> Division:
    """The sites as a run in one process knows its clients."""
    return Division(dict(members), 0, np.zeros(0, np.int64))


@dataclass
class Run:
    """One run over the sites; its record is as a run in one process leaves it."""

    grid: Any
    kit: ServerKit
    settings: Settings
    record: Record
    tell: Callable[[str, int, int], None]

    def all(self) -> None:
        with self.record.lock():
            tables = [self.seed(seed) for seed in self.settings.seeds]
            write_json(self.record.folder / "result.json", {"tables": tables})

    def seed(self, seed: int) -> scores.Table:
        settings = self.settings
        members = {name: absent(name) for name in self.kit.sites}
        done = {}
        shares = settings.method.rounds == 0
        for job in jobs_of(settings, division(members), seed):
            scores = finished(self.record, job_name(job, seed))
            done[job.name] = (job, self.job(job, seed) if scores is None else scores)
            path = self.record.folder / "jobs" / f"{job_name(job, seed)}.safetensors"
            shares = shares or any(key.startswith("shared/") for key in read_tensors(path)[0])
        return protocols.table(settings.protocol, members, done, shares)

    def job(self, job: protocols.Job, seed: int) -> scores.Results:
        settings = self.settings
        spec = {
            "identity": json.loads(json.dumps(settings.identity())),
            "classes": [named(str(one)) for one in settings.source.get("classes", [])],
            "seed": seed,
            "job": job.name,
        }
        engine = Remote(self.grid, self.kit, spec, self.reference(job, seed))
        engine.gather()
        first, rows = engine.sites[min(engine.sites)], self.rows(engine)
        if not (self.record.folder / "manifest.json").exists():
            divisions = dict.fromkeys(settings.seeds, division(engine.members))
            about = {"identity": settings.identity(), "memory": True, "notes": []}
            about |= manifest(settings, rows, divisions)
            about |= {"sites": list(self.kit.sites), "local": first.about["local"]}
            self.record.begin(about)
        else:
            self.record.compare({"identity": settings.identity()})
        fresh = {name: torch.zeros(0) for name in first.about["local"]}
        world = World(
            settings.method,
            frozen(rows, seed),
            rows.x,
            torch.zeros(0, dtype=torch.int64),
            engine.members,
            seed,
            channel=settings.channel,
        )
        name = job_name(job, seed)
        return carry_out(
            settings,
            job,
            world,
            engine,
            State(0, first.first, {}),
            {**fresh, VERSION: torch.tensor(0)},
            self.record,
            lambda done: self.tell(name, done, settings.method.rounds),
            every=0.0,  # a round over the network is worth a checkpoint
        )

    def rows(self, engine: Remote) -> Embedded:
        """What the server knows of the sites' rows: nothing but classes and sizes."""
        one = engine.sites[min(engine.sites)]
        none = np.zeros(0, np.str_)
        return Embedded(
            name=f"{len(self.kit.sites)} sites",
            classes=tuple(one.about["classes"]),
            x=torch.zeros(0, int(one.about["dim"])),
            labels=np.zeros(0, np.int64),
            domains=none,
            clients=none,
            splits=none,
            content=[],
            scale=float(one.about["scale"]),
            text=one.text,
            patches=None,
            encoder=str(one.about["encoder"]),
            fingerprint="at the sites",
        )

    def reference(self, job: protocols.Job, seed: int) -> Tensors:
        """The public rows that go with the first message, if the method wants them."""
        settings = self.settings
        if not reference.wants_reference(settings.method):
            return {}
        if self.kit.rehearsal:
            rows, _ = load(settings, lambda what, done, total: None)
            division = divide(rows, settings.clients, seed, settings.target)
            index = reference.reference(settings.method, division, job)
            return {"reference": rows.view(settings.method.traits.needs)[torch.from_numpy(index)]}
        values, _ = read_tensors(self.kit.folder / REFERENCE)
        view = "patches" if "patches" in settings.method.traits.needs else "image"
        if view not in values:
            raise DataError(
                f"{self.kit.folder / REFERENCE} has no {view} rows, which {settings.method.name} "
                "works on; make it again: fedvlm deploy reference"
            )
        return {"reference": values[view]}


def conduct(grid: Any, request: Path) -> None:
    """The ServerApp: what is to be run is in a file, and so is why it failed, if it did."""
    told = read_json(request)
    kit = read_server(Path(told["kit"]))
    try:
        settings = build(told["identity"])
        ready(kit, settings)
        progress = Path(told["out"]).with_suffix(".progress")

        def tell(what: str, done: int, total: int) -> None:
            write_json(progress, [what, done, total])

        Run(grid, kit, settings, Record(Path(told["out"])), tell).all()
    except FedVLMError as error:
        write(kit.folder / FAILED, str(error).encode())
        raise
    except Exception:
        write(kit.folder / FAILED, traceback.format_exc().encode())
        raise


def server_app() -> Any:
    flower()
    from flwr.serverapp import ServerApp

    def main(grid: Any, context: Any) -> None:
        conduct(grid, Path(str(context.run_config["request"])))

    app = ServerApp()
    app.main()(main)
    return app
