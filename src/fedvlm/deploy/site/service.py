"""A site: its own rows, its policy and ledger, and its answers to the server's requests."""

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from time import monotonic
from typing import Any

from fedvlm import tensors
from fedvlm.classifier.export import ClassifierOrigin, save_with_card
from fedvlm.classifier.personalised import Personalised
from fedvlm.core import ClassStatistics, Tensors
from fedvlm.deploy.flower import SUPEREXEC_ENDED
from fedvlm.deploy.flower.access import SECRET_FILE as CONTROL
from fedvlm.deploy.flower.access import TOKEN_FOLDER_VARIABLE, new_secret
from fedvlm.deploy.flower.processes import Process, Unreachable, check_server, start_supernode
from fedvlm.deploy.flower.site import CONNECTION_LOST, SITE_SOCKET_VARIABLE, receive_message, send_messages
from fedvlm.deploy.identity.certificates import describe_validity, read_own_certificate
from fedvlm.deploy.identity.keys import Signer, Verifier
from fedvlm.deploy.kits import SiteKit, write_secret
from fedvlm.deploy.messages import (
    SCORES,
    ReportedError,
    RequestRefused,
    check_request,
    encode_error,
    encoder_fingerprint,
    public_encoder_name,
    training_key,
)
from fedvlm.deploy.operations.events import EventLog, EventLogger
from fedvlm.deploy.site.ledger import Ledger, PrivacyBudget, ReplyCache, request_kind, upload_cost
from fedvlm.deploy.site.policy import Policy, check_not_withdrawn, current_policy, read_policy
from fedvlm.deploy.site.training import SiteTraining, compare_with_alone, describe_request, load_site_training
from fedvlm.engines.client import measure
from fedvlm.engines.flower.client import ClientTraining, TrainingHandler, to_arrays, to_tensors
from fedvlm.engines.flower.messages import Message, to_bytes
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.runner.prepare import template_of
from fedvlm.runner.settings import build
from fedvlm.runner.training import calibration
from fedvlm.storage.files import exclusive_lock, read_json, read_tensors, slug, write_json, write_tensors

PrintLine = Callable[[str], None]
ECHOED_FIELDS = ("kind", "training", "round", "nonce")  # what a reply repeats of its request
UNSIGNED_LOG_SECONDS = 60.0  # seconds between two lines of the ledger about strangers


class UnsignedMessageError(FederationError):
    """A message that the server did not sign; it gets no answer."""


class Site:
    """Answers requests that its server has signed, as far as its policy allows."""

    def __init__(self, kit: SiteKit, print_line: PrintLine = lambda text: None) -> None:
        self.kit, self.log_event = kit, EventLog(kit.folder, print_line)
        self.sign = Signer(kit.folder / "key")
        self.verify = Verifier(kit.folder / "server.pub")
        self.ledger = Ledger(kit.folder)
        self.budget = PrivacyBudget(self.ledger)
        self.handler = TrainingHandler(listener=self)
        self.site_trainings: dict[str, SiteTraining] = {}  # by training
        self.admitted_tunings: set[str] = set()  # that were admitted
        self.n_unsigned, self.last_unsigned_log = (
            0,
            -UNSIGNED_LOG_SECONDS,
        )  # messages of others since a line, and its time
        read_policy(kit.folder)  # a mistake in it is found now, not in the first round

    def log_text(self, text: str) -> None:
        """To the people here, on the terminal and in the site's log."""
        self.log_event("said", text=text)

    def answer(self, request: Message, state: Message) -> tuple[Message, Message]:
        """The signed reply, also of an error or a refusal, and the new state.

        Whoever is not the server gets none: nothing of its message is looked at.
        """
        try:
            self.verify(request, "the server")
        except Exception as error:  # whatever a stranger's words make of a checksum
            self._count_unsigned()
            raise UnsignedMessageError("a message that the server did not sign was dropped") from error
        try:
            check_request(request.about)
            about = dict(request.about)
        except FederationError as error:  # signed, so the server may hear of it
            return self._error_reply({}, ReportedError("words", str(error))), state
        try:
            self.ledger.add(
                "in", about["round"], to_tensors(request.arrays), to_bytes(request), **_ledger_fields(about)
            )
            check_not_withdrawn(self.kit.folder, self.sign.public)
            policy = current_policy(self.kit.folder)
            reply, state, costs = self._compute_reply(request, about, state, policy)
            policy.check_upload_size(sum(array.nbytes for array in reply.arrays.values()))
        except Exception as error:
            return self._error_reply(about, error), state
        sent = self._record_reply("out", about, self.sign(reply), **costs)
        if "spends" in costs:  # after it was counted: what is given again costs nothing
            ReplyCache(self._folder(about["training"])).store(request, reply, state)
        return sent, state

    def _compute_reply(
        self, request: Message, about: Mapping[str, Any], state: Message, policy: Policy
    ) -> tuple[Message, Message, dict[str, Any]]:
        """The reply, the new state, and what it costs by the site's account."""
        kind, key = request_kind(about), about["training"]
        costs: dict[str, Any] = {"costs": kind}
        if kind == "training":
            self.budget.admit(policy, kind, key, 0.0)
            return self.open_training(about, to_tensors(request.arrays), policy), state, costs
        training = self._load_training(key, policy)
        site_training, world = self.site_trainings[key], training.world
        policy.admit(self.kit.folder, world.method, world.channel, site_training.labels)
        if (again := ReplyCache(self._folder(key)).read(request)) is not None:
            return again[0], training.restore(again[1]) if about["trains"] else state, {}
        spends = upload_cost(world.method, world.channel, len(site_training.labels)) if kind == "upload" else 0.0
        self.budget.admit(policy, kind, key, spends)
        reply, state = self.handler.answer(request, state)
        scores = policy.allowed_scores(reply.about["scores"])
        if site_training.is_trial:  # of which hits on validation rows are enough
            scores = {name: scores[name] for name in SCORES}
        words = {
            "scores": scores,
            "described": {} if policy.score_detail == "none" or site_training.is_trial else reply.about["described"],
            "releases": self.budget.rounds[key] + (kind == "upload"),
        }
        return Message({**reply.about, **words}, reply.arrays), state, {**costs, "spends": spends}

    def _error_reply(self, about: Mapping[str, Any], error: Exception) -> Message:
        """A kind and its numbers for the server; all else for the people of the site."""
        is_expected = isinstance(error, FedVLMError)
        detail = str(error) if is_expected else "".join(traceback.format_exception(error))
        self.log_text(detail)
        words = {**{name: about.get(name) for name in ECHOED_FIELDS}, "client": self.kit.name}
        reply = self.sign(Message({**words, "error": encode_error(error)}))
        kind: Any = "refused" if isinstance(error, RequestRefused) else "out"
        return self._record_reply(kind, about, reply, error=detail[-2000:])

    def _record_reply(self, direction: Any, about: Mapping[str, Any], reply: Message, **details: Any) -> Message:
        """Noted and counted before it leaves."""
        number, data = about.get("round", -1), to_bytes(reply)
        entry = {**_ledger_fields(about), **details}
        self.ledger.add(direction, number, to_tensors(reply.arrays), data, **entry)
        self.budget.count_line(entry)
        if "error" not in details:
            fields = list(reply.arrays) or ["scores only"]
            self.log_event("sent", what=_describe_activity(about), bytes=len(data), fields=fields)
        return reply

    def _count_unsigned(self) -> None:
        """A short line, and not more than one a minute: a stranger cannot fill the disk."""
        self.n_unsigned += 1
        if monotonic() - self.last_unsigned_log >= UNSIGNED_LOG_SECONDS:
            self.last_unsigned_log = monotonic()
            self.ledger.add("dropped", -1, strangers=self.n_unsigned)
            self.n_unsigned = 0

    def open_training(self, about: Mapping[str, Any], sent: Tensors, policy: Policy) -> Message:
        """Makes a training known here, and tells the server what it has to know to start it."""
        spec = about["spec"]
        key = training_key(spec)
        settings = build(spec["identity"])
        if key != about["training"]:
            raise ReportedError("words", "the training is not that of its settings")
        site_training = load_site_training(self.kit, settings, spec, sent.get("reference"), policy)
        if policy.consent:
            self.log_event("asks", **describe_request(settings, site_training, self.budget, policy))
        policy.admit(self.kit.folder, settings.method, settings.channel, site_training.labels)
        self._admit_tuning(spec, key, site_training, policy)
        self._log_suppressed_classes(site_training, policy)
        folder = self._folder(key)
        if (folder / "training.json").exists():
            _check_same_encoder(read_json(folder / "training.json"), site_training)
        write_json(folder / "training.json", {**spec, "encoder": site_training.encoder})
        write_tensors(folder / "reference.safetensors", sent, {})
        self._know(key, site_training)
        shared, local = settings.method.init(site_training.world.frozen)
        member = site_training.world.members[self.kit.name]
        text = {} if site_training.world.frozen.text is None else {"text": site_training.world.frozen.text}
        words = {
            **{name: about[name] for name in ECHOED_FIELDS},
            "client": self.kit.name,
            "opened": key,
            "encoder": public_encoder_name(site_training.encoder),
            "classes": list(site_training.world.frozen.classes),
            "dim": site_training.world.frozen.dim,
            "scale": site_training.world.frozen.scale,
            "local": sorted(local),
            "rows": {part: len(getattr(member, part)) for part in ("train", "validation", "test")},
        } | template_of(site_training.world.frozen)
        first = {f"shared/{name}": value for name, value in shared.items()}
        self.log_event(
            "opened",
            method=settings.method.name,
            rows=len(member.train),
            validation=len(member.validation),
            classes=len(set(site_training.labels.tolist())),
        )
        return Message(words, to_arrays({**first, **text}))

    def _admit_tuning(self, spec: Mapping[str, Any], key: str, site_training: SiteTraining, policy: Policy) -> None:
        """All of a race is admitted when its first trial is opened, or none of it."""
        tuning = spec.get("race")
        if tuning is None or tuning["race"] in self.admitted_tunings or key in self.budget.trainings:
            return
        cost_per_round = upload_cost(site_training.world.method, site_training.world.channel, len(site_training.labels))
        self.budget.admit_tuning(policy, tuning["trainings"], tuning["rounds"], cost_per_round)
        self.admitted_tunings.add(tuning["race"])

    def _log_suppressed_classes(self, site_training: SiteTraining, policy: Policy) -> None:
        """To the people here; the server is not told which classes are small."""
        names = [site_training.world.frozen.classes[i] for i in policy.small_classes(site_training.labels)]
        if names and isinstance(site_training.world.method, ClassStatistics):
            self.log_text(f"of these classes there are few rows; nothing leaves: {', '.join(names)}")

    def _load_training(self, key: str, policy: Policy) -> ClientTraining:
        """A training that was opened; after a restart from what was noted then."""
        folder = self._folder(key)
        if key not in self.handler.trainings:
            if not (folder / "training.json").exists():
                raise ReportedError("closed")
            spec = read_json(folder / "training.json")
            sent, _ = read_tensors(folder / "reference.safetensors")
            site_training = load_site_training(self.kit, build(spec["identity"]), spec, sent.get("reference"), policy)
            _check_same_encoder(spec, site_training)
            self._know(key, site_training)
        training = self.handler.trainings[key]
        world = replace(training.world, method=policy.with_min_class_samples(training.world.method))
        self.handler.trainings[key] = replace(training, world=world)
        return self.handler.trainings[key]

    def _know(self, key: str, _register: SiteTraining) -> None:
        self.site_trainings[key] = _register
        training = ClientTraining(key, self.kit.name, _register.world, self._folder(key))
        self.handler.trainings[key] = training

    def _folder(self, key: str) -> Path:
        return self.kit.folder / "state" / key

    def on_adapted(self, training: ClientTraining, sent: Tensors, local: Tensors) -> None:
        """The site's own classifier, which is what all this was for; without it the run goes on."""
        if self.site_trainings[training.key].is_trial:
            return
        try:
            self._save_classifier(training, sent, local)
        except Exception:
            self.log_text(f"its classifier cannot be kept:\n{traceback.format_exc()}")

    def _save_classifier(self, training: ClientTraining, sent: Tensors, local: Tensors) -> None:
        site_training, world = self.site_trainings[training.key], training.world
        place = self.kit.folder / "classifiers" / slug(site_training.title)
        # A classifier sends what it holds once more: most methods send all of it, as it is.
        if tensors.max_relative_difference(sent, world.method.send(sent, training.id)) > 0:
            self.log_text(f"{world.method.name} sends each client tensors of its own; none is kept")
            return
        calibrated = calibration(world, sent, local, training.id)
        classifier = Personalised(
            world.method, world.frozen, sent, local, training.id, site_training.encoder, calibrated
        )
        measured = measure(world, sent, local, training.id)
        save_with_card(
            classifier,
            ClassifierOrigin(site_training.about, site_training.title, measured["test_rows"], measured["test_hits"]),
            place,
        )
        self.log_event("classifier", place=str(place))
        self.log_event("gained", **compare_with_alone(world, training.id, measured))


def _check_same_encoder(stored_spec: Mapping[str, Any], site_training: SiteTraining) -> None:
    if encoder_fingerprint(stored_spec["encoder"]) != encoder_fingerprint(site_training.encoder):
        raise ReportedError(
            "encoder",
            f"this site began this training with the encoder {stored_spec['encoder']}, and now has "
            f"{site_training.encoder}; give it the first one again, or start another experiment",
        )


def _ledger_fields(about: Mapping[str, Any]) -> dict[str, str | int | float | None]:
    return {name: about.get(name) for name in ("kind", "training")}


def _describe_activity(about: Mapping[str, Any]) -> str:
    activity = {"open": "opened a training", "adapt": "adapted"}.get(about["kind"], "")
    return activity or f"round {about['round']}"


def serve_site(kit: SiteKit, print_line: PrintLine, stop: Event | None = None) -> None:
    """The life of a site's process: answers what its SuperNode brings, until it is stopped."""
    certificate = read_own_certificate(kit.folder)
    site = Site(kit, print_line)
    log_event = site.log_event
    stop = stop or Event()
    with (
        exclusive_lock(kit.folder / ".lock", f"site {kit.name} is already running in {kit.folder}"),
        TemporaryDirectory(prefix="fedvlm-") as place,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        bin = Path(place) / "bin"
        bin.mkdir()
        _write_script(bin / "flower-superexec", "site", "run_superexec")
        write_secret(Path(place) / CONTROL, new_secret())
        listener.bind(str(Path(place) / "desk"))
        listener.listen(8)
        listener.settimeout(0.5)
        until = describe_validity(certificate.days_left, kit.folder)
        log_event("connecting", site=kit.name, address=kit.address, until=until)
        if not _wait_for_server(kit, log_event, stop):
            return
        node = _start_node(kit, bin, place)
        try:
            while not stop.is_set():
                if not node.alive:
                    raise FederationError(describe_supernode_exit(kit, node))
                try:
                    stream, _ = listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # as when no file can be opened for a while
                    log_event("said", text=f"a request was not taken ({error})")
                    stop.wait(0.5)
                    continue
                with stream:
                    answer_request(site, stream)
        finally:
            node.stop()


def answer_request(site: Site, stream: socket.socket) -> None:
    """Whatever comes in, and whatever comes of it, the site goes on."""
    stream.settimeout(60)
    try:
        send_messages(stream, site.answer(receive_message(stream), receive_message(stream)))
    except Exception as error:
        with suppress(Exception):  # also if nobody reads what the site says
            site.log_text(f"a request was not answered ({type(error).__name__}: {error})")


def _wait_for_server(kit: SiteKit, log_event: EventLogger, stop: Event) -> bool:
    """Waits for the server as long as it takes, and says why it is not reached."""
    last_error = ""
    while not stop.is_set():
        try:
            check_server(kit.address, kit.folder / "ca.crt")
            log_event("reached")
            return True
        except Unreachable as error:
            if last_error != (last_error := str(error)):
                log_event("unreachable", why=last_error)
        stop.wait(1.0)
    return False


def _start_node(kit: SiteKit, bin: Path, place: str) -> Process:
    source = str(Path(__file__).resolve().parents[3])  # as this process found fedvlm
    paths = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {SITE_SOCKET_VARIABLE: str(Path(place) / "desk"), TOKEN_FOLDER_VARIABLE: place, "PYTHONPATH": paths}
    return start_supernode(kit, bin, environment)


def _write_script(path: Path, module: str, main: str) -> None:
    """A program of this name, to be found before Flower's own."""
    named = f"from fedvlm.deploy.flower.{module} import {main}"
    path.write_text(f"#!{sys.executable}\n{named}\n{main}()\n")
    path.chmod(0o700)


def describe_supernode_exit(kit: SiteKit, node: Process) -> str:
    """Why a SuperNode ended, in words that help."""
    log_tail = node.tail()
    causes = [cause for cause in (SUPEREXEC_ENDED, CONNECTION_LOST) if cause in log_tail]
    if node.killed:
        causes.append(f"its SuperNode was ended by {node.killed}")
    if causes:
        return f"site {kit.name} stopped, for {causes[0]}; start it again. Flower says:\n{log_tail}"
    return (
        f"site {kit.name} is not let in at {kit.address}, or no longer; either its key is not "
        "known there, because it was revoked or renewed, has expired, or is of another federation "
        "(ask the server's people, who see it by `fedvlm deploy keys`), or a copy of the kit is "
        "connected (or was, a minute ago), or the server has a new database (start the site "
        f"again). Flower says:\n{log_tail}"
    )
