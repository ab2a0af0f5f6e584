"""Run the trainings of an experiment over the sites, tune settings, and let late sites join."""

import json
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from statistics import fmean
from typing import Any

import torch

from fedvlm.channel.pipeline import DecodedUploads
from fedvlm.channel.settings import with_deployment_bound
from fedvlm.channel.verified import MIN_SUM_MEMBERS
from fedvlm.core import Tensors
from fedvlm.core.schema import check_settings
from fedvlm.deploy.kits import REFERENCE_FILE, RUN_REQUEST_FILE, ServerKit, read_server
from fedvlm.deploy.messages import ERROR_MESSAGES, training_spec
from fedvlm.deploy.operations.events import EventLog, EventLogger, ignore_event, round_logger
from fedvlm.deploy.server.engine import RemoteEngine, SiteOpening, known_nodes
from fedvlm.deploy.server.evaluation import evaluate_at_sites
from fedvlm.deploy.server.sums import SumEngine
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.policy import PLAIN_RISK
from fedvlm.deploy.transcript import TRANSCRIPT_SUFFIX, Transcript
from fedvlm.deploy.withdrawal import SUMS_SUFFIX, UploadSums, removal_obstacle, trainings_of_record
from fedvlm.engines.client import RemoteState, Task, TrainingTerms
from fedvlm.engines.loop import ignore_sum
from fedvlm.engines.state import Plan, State, pack_state, unpack_state
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError
from fedvlm.evaluate import metrics
from fedvlm.evaluate.protocols import Training, contract
from fedvlm.evaluate.protocols.contract import NEW_CLASS_PROTOCOLS
from fedvlm.record import Record
from fedvlm.report.tables import table_cells
from fedvlm.runner import tune
from fedvlm.runner.load import encode, load, open_data, open_encoder_with_notes
from fedvlm.runner.manifest import build_manifest
from fedvlm.runner.prepare import frozen_from, prepare, terms_of, trainings_of
from fedvlm.runner.settings import Settings, build
from fedvlm.runner.training import TrainingRun, file_name, finished_scores, run_training
from fedvlm.storage.files import read_json, read_tensors, write_file, write_json, write_tensors

BUDGET_EXCEEDED = ERROR_MESSAGES["tuning"].split("{")[0]


class FederatedTuning:
    """Tune the settings for one seed over the sites; a stopped search continues where it was."""

    def __init__(self, run: "DeployedRun", seed: int) -> None:
        self.run, self.seed, self.settings = run, seed, run.settings
        words = json.dumps([run.settings.identity(), seed], sort_keys=True)
        self.key = sha256(words.encode()).hexdigest()[:24]
        self.folder: Path = run.kit.folder / "races" / self.key
        sites = {name: name for name in run.kit.sites}
        self.trainings = trainings_of(run.settings, sites, seed)
        self.engines: dict[tuple[int, str], RemoteEngine] = {}
        self.scores_by_step: dict[str, float] = {}  # scores of trials by what they had done

    def run_all(self) -> dict[str, Any]:
        """Return the record of the search; a finished search is only read."""
        result = self.folder / "result.json"
        if result.exists():
            return dict(read_json(result))
        if (self.folder / "scores.json").exists():
            self.scores_by_step = dict(read_json(self.folder / "scores.json"))
        self._open_trials(tune.make_candidates(self.settings)[0])
        about = self._run_rungs()
        write_json(result, about)
        for path in self.folder.glob("*.checkpoint"):
            path.unlink()
        return about

    def _run_rungs(self) -> dict[str, Any]:
        """Run one trial after the other: sites do one thing at a time."""
        rungs, done = tune.halving_rungs(self.settings), 0
        while True:
            try:
                advances = next(rungs)
            except StopIteration as over:
                return dict(over.value)
            for trial, until in advances:
                done += until - trial.rounds
                self._advance(trial, until)
                self.run.on_progress("tuning", done, tune.total_rounds(self.settings))

    def _open_trials(self, trials: list[tune.Trial]) -> None:
        """Open every trial at every site first: a search over a site's budget is refused before it costs anything."""
        totals = {"key": self.key, **run_size(self.settings, self.run.kit.sites, self.seed)}
        for place, trial in enumerate(trials):
            plain = _trial_settings(self.settings, trial)
            for training in self.trainings:
                engine = self.run.open_training(plain, training, self.seed, totals)
                over = {name: reason for name, reason in engine.missing.items() if BUDGET_EXCEEDED in reason}
                if over:
                    name, reason = min(over.items())
                    raise FederationError(
                        f"tuning of {', '.join(self.settings.tune)} does not start; {name}: {reason}; leave tune out, "
                        "or set fewer rounds"
                    )
                self.engines[place, training.name] = engine

    def _advance(self, trial: tune.Trial, until: int) -> None:
        place = [candidate.values for candidate in tune.make_candidates(self.settings)[0]].index(trial.values)
        name = f"{place}-{until}"
        if name in self.scores_by_step:
            trial.score, trial.updates = self.scores_by_step[name], int(self.scores_by_step[f"{name} updates"])
            trial.samples = int(self.scores_by_step[f"{name} samples"])
            for training in self.trainings:
                trial.states[training.name] = self._state(place, training, trial)
        else:
            scored = [self._train(place, trial, training, until) for training in self.trainings]
            trial.score, trial.samples = fmean(accuracy for accuracy, _ in scored), sum(count for _, count in scored)
            counts = {f"{name} updates": trial.updates, f"{name} samples": trial.samples}
            self.scores_by_step |= {name: trial.score, **counts}
            write_json(self.folder / "scores.json", self.scores_by_step)
        trial.rounds = until

    def _train(self, place: int, trial: tune.Trial, training: Training, until: int) -> tuple[float, int]:
        """Return the accuracy on the validation samples that judge, and their number."""
        engine = self.engines[place, training.name]
        terms, initial_local = self.run.make_terms(_trial_settings(self.settings, trial), engine, self.seed)
        if self.settings.channel.verified or not engine.sites[engine.base].first:  # a sum needs every site
            training = replace(training, unseen=())
        else:
            number = self.seed + [entry.name for entry in self.trainings].index(training.name)
            training = tune.leave_source_out(training, {name: name for name in self.run.kit.sites}, number)
        counts = {id: engine.counts[id]["validation"] for id in training.unseen or training.train}
        judges = {id: count for id, count in counts.items() if count}
        trial.states[training.name] = self._state(place, training, trial)
        path = self._checkpoint_path(place, training)

        def keep(state: State) -> None:
            flat, about = pack_state(state)
            write_tensors(path, flat, {**about, "updates": trial.updates})

        plan = Plan(training.train, training.unseen, self.settings.fraction)
        scores = tune.continue_trial(
            trial, training.name, tune.TrialTraining(terms, engine, plan, initial_local), until, keep
        )
        validation_accuracy = metrics.mean_accuracy(scores, judges, "validation")
        if validation_accuracy is None:
            raise FederationError(
                f"tune = {list(self.settings.tune)}: no site reports its correct validation samples (`scores` of its "
                "policy), so nothing can be chosen by them; leave tune out"
            )
        return validation_accuracy, sum(judges.values())

    def _state(self, place: int, training: Training, trial: tune.Trial) -> State:
        """Return the state of a trial: in memory, on disk after a stop, or its first."""
        if training.name in trial.states:
            return trial.states[training.name]
        path = self._checkpoint_path(place, training)
        if path.exists():
            flat, about = read_tensors(path)
            trial.updates = max(trial.updates, int(about["updates"]))
            return unpack_state(flat, about)
        engine = self.engines[place, training.name]
        return State(0, engine.sites[engine.base].first, {})

    def _checkpoint_path(self, place: int, training: Training) -> Path:
        number = [training_item.name for training_item in self.trainings].index(training.name)
        return self.folder / f"{place}-{number}.checkpoint"


def run_size(settings: Settings, sites: Sequence[str], seed: int) -> dict[str, int]:
    """Return how many trainings a site opens and how many rounds it answers at most, those of tuning included."""
    trainings = trainings_of(settings, {name: name for name in sites}, seed)
    trainings_per_site = max(sum(name in planned.train for planned in trainings) for name in sites)
    rounds = settings.method.rounds
    trials, first = tune.make_candidates(settings) if settings.tune else ([], 0)
    search = tune.search_rounds(rounds, len(trials), first) if trials else 0
    return {"trainings": (len(trials) + 1) * len(trainings), "rounds": trainings_per_site * (search + rounds)}


def _trial_settings(settings: Settings, trial: tune.Trial) -> Settings:
    """Return the settings of a trial: those of its candidate, without tuning."""
    return replace(settings, method=trial.method, tune=())


# what a manifest has of a site's words
MANIFEST_FIELDS = ("encoder", "classes", "multi_label", "dim", "scale", "template")
ANSWER_FILE = "answer.json"  # in the server's folder: of the last request that is no run
OPENINGS_FILE = "openings.json"  # in the server's folder: what tells a new run from a resumed one
ERROR_FILE = "error.txt"  # in the server's folder: why the last run ended


def check_deployable(kit: ServerKit, settings: Settings) -> None:
    """Refuse what a federation of sites cannot run, before any site is asked."""
    if settings.smoke:
        raise SettingsError("smoke = true is for one process; set the method's rounds instead")
    if settings.warm_start is not None:
        raise SettingsError("warm_start is for runs in one process; leave it out, or run method = 'tofa' alone")
    if settings.tune:
        tune.check_tunable(settings)
    if settings.method.traits.privacy.centralised or settings.centralised:
        raise SettingsError(
            f"{settings.method.name} is not federated: it needs all clients' samples in one place, which only a "
            "simulation has; choose another method, e.g. 'auto' or 'alone'"
        )
    if settings.attack != "none":
        raise SettingsError(f"attack = {settings.attack!r} is for simulations; leave it out of a deployed run")
    if settings.device != "cpu":
        raise SettingsError(f"device = {settings.device!r} is for simulations: each site has its own; leave it out")
    if settings.protocol in NEW_CLASS_PROTOCOLS:
        raise SettingsError(
            f"protocol = {settings.protocol!r} is for simulations: it tests on classes without training; use 'own-test'"
        )
    if settings.channel.verified and settings.selection != "last":
        raise SettingsError(
            f"selection = {settings.selection!r} needs scores of every site in every round, which a verified "
            "sum does not have; leave it out"
        )
    if not kit.rehearsal and "classes" not in settings.source:
        raise SettingsError(
            "the server has no images to take class names from; name the classes in the experiment, as [source] "
            "classes = ['cat', 'dog']"
        )
    wants = contract.has_reference(settings.method) and not kit.rehearsal
    if wants and not (kit.folder / REFERENCE_FILE).exists():
        raise DataError(
            f"the method {settings.method.name} needs public reference samples, and there is no "
            f"{kit.folder / REFERENCE_FILE}; make it: fedvlm deploy reference {kit.folder} --data IMAGES --encoder "
            "ENCODER"
        )


def choose_mode(kit: ServerKit, settings: Settings) -> Settings:
    """Ask for a verified sum unless uploads have noise or a person chose plain mode; say why if it is not possible."""
    if settings.channel.verified or settings.channel.noise_multiplier or kit.plain:
        return settings
    try:
        if len(kit.sites) < MIN_SUM_MEMBERS:
            raise SettingsError(f"a verified sum needs at least {MIN_SUM_MEMBERS} sites, got {len(kit.sites)}")
        verified = {**settings.identity(), **settings.statement}
        return build({**verified, "channel": {**verified["channel"], "verified": True}})
    except SettingsError as error:
        raise SettingsError(
            f"{error}. Otherwise {PLAIN_RISK}: add channel.noise_multiplier, or accept that with plain = true in "
            "server.toml and in every site's policy"
        ) from error


def describe_bound(settings: Settings) -> str:
    """Describe what bounds the influence of one site on the mean."""
    channel = with_deployment_bound(settings.channel, settings.method)
    if channel.bound == "median":
        limits = "changes above twice the round's median are shortened, and samples above four times the median"
        return f"{limits} do not count (channel.bound)"
    if channel.verified:
        return f"only channel.clip = {channel.clip} bounds a change, at its site: the server sees no single upload"
    if channel.bound:
        return f"changes of a norm above {channel.bound} are refused (channel.bound)"
    return f"nothing bounds a change: {settings.method.name} aggregates single uploads in its own way"


def describe_protection(settings: Settings) -> list[str]:
    """Describe what bounds a site's influence, and in plain mode what the server could learn."""
    hides = settings.channel.verified or settings.channel.noise_multiplier
    return [describe_bound(settings), *([] if hides else [f"plain mode: {PLAIN_RISK}"])]


@dataclass
class DeployedRun:
    """Run an experiment over the sites; its record is that of a run in one process."""

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
        """Open a training at all connected sites; `tuning` says how large its search is."""
        spec = training_spec(settings, training, seed) | {"run": self.run_plan}
        spec |= {} if tuning is None else {"tuning": tuning}
        facts = {"method": settings.method.name, "training": training.name, "rounds": settings.method.rounds}
        self.log_event("begun", **facts, sites=list(self.kit.sites), record=str(self.record.folder))
        is_sum = settings.channel.verified and tuning is None
        engine = (SumEngine if is_sum else RemoteEngine)(
            self.grid, self.kit, spec, self.load_reference(training, seed), self.log_event, self.excluded_nodes
        )
        engine.opening = self.opening_token(file_name(training, seed), is_trial=tuning is not None)
        engine.wait_for_sites()
        return engine

    def opening_token(self, name: str, is_trial: bool) -> str:
        """Return what tells a site whether a training begins or is resumed; a tuning search goes on for ever."""
        if is_trial:
            return "tuning"
        path, place = self.kit.folder / OPENINGS_FILE, f"{self.record.folder.resolve()}/{name}"
        openings = dict(read_json(path)) if path.exists() else {}
        has_begun = any(self.record.folder.glob(f"trainings/{name}.*"))
        if not (has_begun and place in openings):
            write_json(path, openings := {**openings, place: token_hex(8)})
        return str(openings[place])

    @cached_property
    def run_plan(self) -> dict[str, Any]:
        """Return what a person at a site consents to."""
        sizes = [run_size(self.settings, self.kit.sites, seed) for seed in self.settings.seeds]
        totals = {key: sum(size[key] for size in sizes) for key in sizes[0]}
        return {"identity": json.loads(json.dumps(self.settings.identity())), **self.settings.statement, **totals}

    def make_terms(self, settings: Settings, engine: RemoteEngine, seed: int) -> tuple[TrainingTerms, RemoteState]:
        """Return what everyone knows of a training, and the local tensors of an unseen client."""
        first = engine.sites[engine.base]
        terms = terms_of(settings, frozen_from(first.header, first.text, seed), seed)
        channel = with_deployment_bound(settings.channel, settings.method)
        return replace(terms, channel=channel), RemoteState(0, tuple(first.header["local"]))

    def train(self, settings: Settings, training: Training, seed: int) -> metrics.Results:
        engine = self.open_training(settings, training, seed)
        first = engine.sites[engine.base]
        requested = tune.reuse_tuned(self.settings, self.tuned)
        if not (self.record.folder / "manifest.json").exists():
            self.record.start(self.make_manifest(requested, engine, first, seed))
        else:
            self.record.compare({"identity": requested.identity()})
        name = file_name(training, seed)
        if isinstance(engine, SumEngine):
            engine.begin(Transcript(self.record.folder / "trainings" / f"{name}.{TRANSCRIPT_SUFFIX}"))
        terms, initial_local = self.make_terms(settings, engine, seed)
        return run_training(
            TrainingRun(settings, training, terms, self.record),
            engine,
            State(0, first.first, {}, channel=tune.initial_spend(self.tuned, training.name, seed)),
            initial_local,
            lambda done: self.on_progress(name, done, settings.method.rounds),
            checkpoint_seconds=0.0,  # a round over the network is worth a checkpoint
            on_sum=self.sum_recorder(settings, name),
        )

    def sum_recorder(self, settings: Settings, name: str) -> Callable[[int, Tensors, DecodedUploads], None]:
        """Return what keeps a round's sum of uploads for sites that withdraw later, where that helps."""
        if removal_obstacle(settings):
            return ignore_sum
        sums = UploadSums.read(self.record.folder / "trainings" / f"{name}.{SUMS_SUFFIX}")
        return sums.add

    def make_manifest(self, settings: Settings, engine: RemoteEngine, first: SiteOpening, seed: int) -> dict[str, Any]:
        """Return the manifest; of the samples, the server knows only classes and counts."""
        about = first.header
        text = None if first.text is None else first.text.tolist()
        site_facts = {key: about[key] for key in MANIFEST_FIELDS if key in about}
        site_facts |= {"rows": "at the sites", "data": f"{len(self.kit.sites)} sites", "text": text}
        trainings = trainings_of(settings, {name: name for name in self.kit.sites}, seed)
        names = [training.name for training in trainings]
        dropped = dict.fromkeys(settings.seeds, 0)
        return {
            **{"identity": settings.identity(), "memory": True},
            "notes": [*describe_protection(settings), *engine.notes],
            **build_manifest(site_facts, names, engine.counts, dropped),
            **{"sites": list(self.kit.sites), "local": about["local"]},
            **settings.statement,
            **self.tuned,
        }

    def load_reference(self, training: Training, seed: int) -> Tensors:
        """Return the public reference samples that go with the first message, if the method needs them."""
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
                f"{self.kit.folder / REFERENCE_FILE} has no {view} embeddings, which {settings.method.name} works on; "
                "make it again: fedvlm deploy reference"
            )
        return {"reference": values[view]}


def stated_settings(record: Mapping[str, Any]) -> Settings:
    """Return the settings of a request or a manifest, with its purpose and contact."""
    return build({**record["identity"], **{key: record.get(key, "") for key in ("purpose", "contact")}})


RUN_RULES = {"quorum", "deadline", "wait"}  # of server.toml, that one run may have otherwise


def with_rules(kit: ServerKit, rules: Mapping[str, Any]) -> ServerKit:
    fixed_fields = {kit_field.name for kit_field in fields(ServerKit)} - RUN_RULES
    return replace(kit, **check_settings("the run", rules, ServerKit, excluded=fixed_fields))


STOPPED_MESSAGE = "it was stopped, or the server was; repeat the command to resume"


def run_request(grid: Any, folder: Path, id: str = "") -> None:
    """Carry out the request in the server's folder as the ServerApp, and write down why it failed if it did."""
    request, log_event = read_json(folder / RUN_REQUEST_FILE), EventLog(folder)
    if request.get("id", "") != id:  # as if this process began late; it would get in the way
        raise FederationError("another run was requested before this one started; request it again")

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
    answer: Mapping[str, Any] | None = None
    if "joins" in request:
        answer = join_late(grid, kit, Path(request["out"]), request["joins"], log_event)
    elif "describes" in request:
        answer = describe_sites(grid, kit, Path(request["out"]), log_event)
    elif "evaluates" in request:
        answer = evaluate_at_sites(grid, kit, request, log_event)
    if answer is not None:
        return write_json(folder / ANSWER_FILE, answer)
    settings = stated_settings(request)
    check_deployable(kit, settings)
    progress = Path(request["out"]).with_suffix(".progress")

    def write_progress(stage: str, done: int, total: int) -> None:
        write_json(progress, [stage, done, total])

    record = Record(Path(request["out"]), round_logger(log_event, settings.method.rounds))
    DeployedRun(grid, kit, settings, record, write_progress, log_event=log_event).run_all()
    head, body = table_cells([record])
    cells = dict(zip(head[1:], body[0][1:], strict=True))  # the first column has its name
    table = {column: cell for column, cell in cells.items() if column != "seeds"}
    log_event("ended", record=str(record.folder), table=table)


def describe_sites(grid: Any, kit: ServerKit, out: Path, log_event: EventLogger) -> dict[str, Any]:
    """Let the members of a finished verified sum describe their data, as their policies allow."""
    record, settings = Record(out), stated_settings(Record(out).manifest)
    run = DeployedRun(grid, kit, settings, record, lambda *words: None, {}, without_begin(log_event))
    [(settings, training, seed)] = trainings_of_record(record, settings)
    engine = run.open_training(settings, training, seed)
    assert isinstance(engine, SumEngine)
    return engine.describe(Transcript(out / "trainings" / f"{file_name(training, seed)}.{TRANSCRIPT_SUFFIX}"))


def without_begin(log_event: EventLogger) -> EventLogger:
    """Return a logger for what begins no run."""
    return lambda kind, **facts: None if kind == "begun" else log_event(kind, **facts)


RUN_NAME = "the run"  # what stands for its sites where a new one is compared with them


def join_late(grid: Any, kit: ServerKit, out: Path, site: str, log_event: EventLogger) -> dict[str, Any]:
    """Give one site the classifiers of a finished run; return its scores by training.

    The server asks that site alone; its key, policy and ledger apply as in any round. The other sites are sent nothing.
    """
    if site not in kit.sites:
        raise SettingsError(f"{site} has no certificate at this server; admit it first")
    record = Record(out)
    if record.result() is None:
        raise SettingsError(f"{out} is not a finished run; resume it: fedvlm deploy run")

    others = {node for name, node in known_nodes(kit).items() if name != site}
    alone, settings = replace(kit, sites=(site,), quorum=1.0), stated_settings(record.manifest)
    run = DeployedRun(grid, alone, settings, record, lambda *words: None, {}, without_begin(log_event), others)
    with record.lock():
        trainings = trainings_of_record(record, settings)
        return {file_name(of, seed): _join_training(run, site, now, of, seed) for now, of, seed in trainings}


def _join_training(run: DeployedRun, site: str, settings: Settings, training: Training, seed: int) -> Any:
    """Let a site adapt to a finished training; its classifier stays with it."""
    record, name = run.record, file_name(training, seed)
    engine, manifest = run.open_training(settings, training, seed), record.manifest
    text = None if manifest["text"] is None else torch.tensor(manifest["text"])
    about = {key: manifest[key] for key in (*MANIFEST_FIELDS, "local") if key in manifest}
    engine.sites[RUN_NAME] = SiteOpening(about, engine.sites[site].first, text)
    if reason := engine.describe_difference(RUN_NAME, site):
        raise FederationError(f"{site} cannot join: {reason}")
    method = run.make_terms(settings, engine, seed)[0].method
    sent = method.send(record.outcome(training.name, seed)[0], site)
    Ledger(run.kit.folder).add("out", method.rounds, sent, kind="join", site=site, run=record.folder.name)
    if isinstance(engine, SumEngine):
        transcript = Transcript(record.folder / "trainings" / f"{name}.{TRANSCRIPT_SUFFIX}")
        scores: Mapping[str, Any] = engine.join(transcript, site)
    else:  # one that took part goes on from its own tensors of the last round that it was in
        lines = [line for line in record.lines() if line["training"] == name]
        took = [line["round"] + 1 for line in lines if site in line["clients"]]
        task = Task(site, sent, RemoteState(max(took, default=0)), True)
        scores = engine.adapt(method.rounds, [task]).replies[site].scores
    run.log_event("joined", site=site, samples=engine.rows[site], training=name)
    return scores


def write_reference(
    folder: Path, data: str, encoder: str, patches: bool, progress: Callable[[str, int, int], None]
) -> int:
    """Embed public images without labels for the server to send; return their number."""
    box, _ = open_encoder_with_notes(encoder, {})
    rows = encode(open_data(data, {}), box, patches, "float32", progress).embedded
    values = {"image": rows.x}
    if rows.patches is not None:
        values["patches"] = rows.patches[:]
    write_tensors(folder / REFERENCE_FILE, values, {"encoder": rows.encoder})
    return len(rows.x)
