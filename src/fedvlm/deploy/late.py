"""A site that comes after the last round: its classifier from what is shared and its own rows.

The server asks that site alone; its key, policy and ledger are as in any round. The others take no
part, and are sent nothing if they have taken part before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedvlm.deploy.events import Note
from fedvlm.deploy.kits import ServerKit
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.remote import Opened, Remote, nodes_of
from fedvlm.deploy.server import KNOWN, Run
from fedvlm.engines.client import Kept, Task
from fedvlm.errors import FederationError, SettingsError
from fedvlm.evaluate.protocols import Training
from fedvlm.record import Record
from fedvlm.runner import tune
from fedvlm.runner.prepare import trainings_of
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import file_name, finished

RUN = "the run"  # what stands for its sites where a new one is compared with them


@dataclass
class Late:
    """One site, and a run that is finished."""

    run: Run
    site: str

    def all(self) -> dict[str, Mapping[str, Any]]:
        """Scores of the site by training; its classifiers are with it."""
        record, out = self.run.record, {}
        with record.lock():
            domains = {name: name for name in record.manifest["sites"]}
            for seed in self.run.settings.seeds:
                settings = tune.settled(self.run.settings, record.manifest, seed)
                for training in trainings_of(settings, domains, seed):
                    out[file_name(training, seed)] = self.training(settings, training, seed)
        return out

    def training(self, settings: Settings, training: Training, seed: int) -> Mapping[str, Any]:
        record, method, name = self.run.record, settings.method, file_name(training, seed)
        if finished(record, name) is None:
            raise SettingsError(
                f"{record.folder} is not finished; go on with it: fedvlm deploy run"
            )
        engine = self.run.open(settings, training, seed)
        self.check(engine)
        sent = method.send(record.outcome(training.name, seed)[0], self.site)
        Ledger(self.run.kit.folder).add(
            "out", method.rounds, sent, kind="join", site=self.site, run=record.folder.name
        )
        # One that took part goes on from its own tensors of the last round that it was in.
        lines = [one for one in record.lines() if one["training"] == name]
        took = [one["round"] + 1 for one in lines if self.site in one["clients"]]
        task = Task(self.site, sent, Kept(max(took, default=0)), True)
        answers = engine.adapt(method.rounds, [task])
        self.run.note("joined", site=self.site, rows=engine.rows[self.site], training=name)
        return answers.done[self.site].scores

    def check(self, engine: Remote) -> None:
        """The site against what the run's sites had: one encoder, one list of classes."""
        manifest = self.run.record.manifest
        text = None if manifest["text"] is None else torch.tensor(manifest["text"])
        about = {key: manifest[key] for key in (*KNOWN, "local") if key in manifest}
        engine.sites[RUN] = Opened(about, engine.sites[self.site].first, text)
        if why := engine.differs(RUN, self.site):
            raise FederationError(f"{self.site} cannot join: {why}")


def _told(note: Note) -> Note:
    """What is noted of one site; no run begins."""

    def noted(kind: str, **facts: Any) -> None:
        if kind != "begun":
            note(kind, **facts)

    return noted


def join_late(grid: Any, kit: ServerKit, out: Path, site: str, note: Note) -> dict[str, Any]:
    """Brings one site to the classifiers of a finished run."""
    if site not in kit.sites:
        raise SettingsError(f"{site} has no certificate at this server; admit it first")
    record = Record(out)
    if record.result() is None:
        raise SettingsError(f"{out} is no finished run; go on with it: fedvlm deploy run")
    alone = replace(kit, sites=(site,), quorum=1.0)
    settings = build(record.manifest["identity"])
    others = {node for name, node in nodes_of(kit).items() if name != site}
    run = Run(grid, alone, settings, record, lambda *words: None, note=_told(note), others=others)
    return dict(Late(run, site).all())
