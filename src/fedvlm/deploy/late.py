"""A site that comes after the last round: its classifier from what is shared and its own rows.

The server asks that site alone; its key, policy and ledger are as in any round. The others take no
part, and are sent nothing if they have taken part before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedvlm.deploy.events import EventLogger
from fedvlm.deploy.kits import ServerKit
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.remote import RemoteEngine, SiteOpening, known_nodes
from fedvlm.deploy.server import MANIFEST_FIELDS, DeployedRun
from fedvlm.engines.client import RemoteState, Task
from fedvlm.errors import FederationError, SettingsError
from fedvlm.evaluate.protocols import Training
from fedvlm.record import Record
from fedvlm.runner import tune
from fedvlm.runner.prepare import trainings_of
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import file_name, finished_scores

RUN_NAME = "the run"  # what stands for its sites where a new one is compared with them


@dataclass
class LateJoin:
    """One site, and a run that is finished."""

    run: DeployedRun
    site: str

    def join_all(self) -> dict[str, Mapping[str, Any]]:
        """Scores of the site by training; its classifiers are with it."""
        record, out = self.run.record, {}
        with record.lock():
            domains = {name: name for name in record.manifest["sites"]}
            for seed in self.run.settings.seeds:
                settings = tune.with_tuned(self.run.settings, record.manifest, seed)
                for training in trainings_of(settings, domains, seed):
                    out[file_name(training, seed)] = self.join_training(settings, training, seed)
        return out

    def join_training(self, settings: Settings, training: Training, seed: int) -> Mapping[str, Any]:
        record, method, name = self.run.record, settings.method, file_name(training, seed)
        if finished_scores(record, name) is None:
            raise SettingsError(f"{record.folder} is not finished; go on with it: fedvlm deploy run")
        engine = self.run.open_training(settings, training, seed)
        self.check_compatible(engine)
        sent = method.send(record.outcome(training.name, seed)[0], self.site)
        Ledger(self.run.kit.folder).add("out", method.rounds, sent, kind="join", site=self.site, run=record.folder.name)
        # One that took part goes on from its own tensors of the last round that it was in.
        lines = [line for line in record.lines() if line["training"] == name]
        took = [line["round"] + 1 for line in lines if self.site in line["clients"]]
        task = Task(self.site, sent, RemoteState(max(took, default=0)), True)
        answers = engine.adapt(method.rounds, [task])
        self.run.log_event("joined", site=self.site, rows=engine.rows[self.site], training=name)
        return answers.replies[self.site].scores

    def check_compatible(self, engine: RemoteEngine) -> None:
        """The site against what the run's sites had: one encoder, one list of classes."""
        manifest = self.run.record.manifest
        text = None if manifest["text"] is None else torch.tensor(manifest["text"])
        about = {key: manifest[key] for key in (*MANIFEST_FIELDS, "local") if key in manifest}
        engine.sites[RUN_NAME] = SiteOpening(about, engine.sites[self.site].first, text)
        if reason := engine.describe_difference(RUN_NAME, self.site):
            raise FederationError(f"{self.site} cannot join: {reason}")


def _without_begin_events(log_event: EventLogger) -> EventLogger:
    """What is noted of one site; no run begins."""

    def filtered(kind: str, **facts: Any) -> None:
        if kind != "begun":
            log_event(kind, **facts)

    return filtered


def join_late(grid: Any, kit: ServerKit, out: Path, site: str, log_event: EventLogger) -> dict[str, Any]:
    """Brings one site to the classifiers of a finished run."""
    if site not in kit.sites:
        raise SettingsError(f"{site} has no certificate at this server; admit it first")
    record = Record(out)
    if record.result() is None:
        raise SettingsError(f"{out} is no finished run; go on with it: fedvlm deploy run")
    alone = replace(kit, sites=(site,), quorum=1.0)
    settings = build(record.manifest["identity"])
    other_nodes = {node for name, node in known_nodes(kit).items() if name != site}
    run = DeployedRun(
        grid,
        alone,
        settings,
        record,
        lambda *words: None,
        log_event=_without_begin_events(log_event),
        excluded_nodes=other_nodes,
    )
    return dict(LateJoin(run, site).join_all())
