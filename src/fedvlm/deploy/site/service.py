"""Serve a site: answer the server's signed requests with its own samples, under its policy and ledger."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from threading import Event
from time import monotonic
from typing import Any

import fedvlm
from fedvlm import tensors
from fedvlm.classifier.export import ClassifierOrigin, save_with_card
from fedvlm.classifier.personalised import Personalised
from fedvlm.core import ClassStatistics, Tensors
from fedvlm.data.splits import SPLITS
from fedvlm.deploy import messages
from fedvlm.deploy.flower import fleet
from fedvlm.deploy.flower.network import Unreachable, check_server
from fedvlm.deploy.identity.certificates import describe_validity, federation_id, read_own_certificate
from fedvlm.deploy.identity.keys import Signer, Verifier
from fedvlm.deploy.kits import SiteKit
from fedvlm.deploy.messages import PROTOCOL
from fedvlm.deploy.operations.events import EventLog, EventLogger, validation_accuracy
from fedvlm.deploy.operations.security_log import log_security
from fedvlm.deploy.site import consent
from fedvlm.deploy.site.evaluation import EVALUATION_KEY, Evaluation, describe_evaluation
from fedvlm.deploy.site.ledger import Direction, Ledger, PrivacyBudget, ReplyCache
from fedvlm.deploy.site.policy import Policy, check_not_withdrawn, current_policy, read_policy
from fedvlm.deploy.site.snapshot import keep_samples
from fedvlm.deploy.site.sums import SumMember
from fedvlm.deploy.site.training import SiteTraining, compare_with_alone, load_site_training
from fedvlm.engines.client import World, measure
from fedvlm.engines.flower.client import ClientTraining, TrainingHandler, to_arrays, to_tensors
from fedvlm.engines.flower.messages import Message, to_bytes
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.runner.prepare import template_of, text_of
from fedvlm.runner.settings import build
from fedvlm.runner.training import fit_calibration, fit_client_novelty
from fedvlm.storage.files import exclusive_lock, read_json, read_tensors, slug, write_json, write_tensors

PrintLine = Callable[[str], None]
ACTIVITIES = {
    "open": "opened a training",
    "adapt": "adapted",
    "plan": "agreed to a plan",
    "counts": "masked class counts",
    "end": "ended a session",
    "join": "joined late",
    "evaluate": "measured classifiers",
    "describe": "described the data",
}
UNSIGNED_LOG_SECONDS = 60.0  # seconds between two lines of the ledger about strangers


class UnsignedMessageError(FederationError):
    """A message that the server did not sign; it gets no reply."""


class Site:
    """Answer requests that the server has signed, as far as the policy allows."""

    def __init__(self, kit: SiteKit, print_line: PrintLine = lambda text: None) -> None:
        self.kit, self.log_event = kit, EventLog(kit.folder, print_line)
        self.sign = Signer(kit.folder / "key")
        self.verify = Verifier(kit.folder / "server.pub")
        self.ledger = Ledger(kit.folder)
        self.budget = PrivacyBudget(self.ledger.history())
        self.handler = TrainingHandler(on_adapted=self.on_adapted)
        federation = federation_id((kit.folder / "server.pub").read_bytes(), (kit.folder / "ca.crt").read_bytes())
        self.sums = SumMember(kit, self.sign, federation, self.on_sum_ended)
        self.site_trainings: dict[str, SiteTraining] = {}  # by training
        self.admitted_tunings: set[str] = set()
        self.accuracy: float | None = None  # on its validation samples, of the last round; for its people's eyes
        self.n_unsigned, self.last_unsigned_log = 0, -UNSIGNED_LOG_SECONDS
        read_policy(kit.folder)  # a mistake in it is found now, not in the first round

    def log_text(self, text: str) -> None:
        self.log_event("said", text=text)

    def answer(self, request: Message, state: Message) -> tuple[Message, Message]:
        """Return the signed reply or refusal and the new state; an unsigned message gets none, and is not parsed."""
        try:
            self.verify(request, "the server")
        except Exception as error:  # whatever an outsider's bytes make a checksum raise
            self._count_unsigned()
            raise UnsignedMessageError("a message that the server did not sign was dropped") from error
        try:
            fields = messages.parse_request(request.header)
        except FederationError as error:  # signed, so the server may hear of it
            known = (
                error if isinstance(error, messages.ReportedError) else messages.ReportedError("request", str(error))
            )
            return self._error_reply(None, known), state
        try:
            entry = _ledger_fields(fields)
            self.ledger.add("in", fields.round, to_tensors(request.arrays), to_bytes(request), **entry)
            check_not_withdrawn(self.kit.folder, self.sign.public)
            policy = current_policy(self.kit.folder)
            if isinstance(fields, messages.OpenRequest):
                self.budget.admit(policy, "training", fields.training, 0.0)
                costs = {"costs": "training", "plan": consent.plan_hash(request.header["spec"])}
                reply = self.open_training(request, policy)
            elif isinstance(fields, messages.EvaluationRequest):
                reply, costs = self._evaluate(request, fields, policy)
            elif isinstance(fields, messages.SumRequest):
                reply, costs = self._run_sum(request, fields, policy)
            else:
                reply, state, costs = self._run_round(request, fields, state, policy)
            policy.check_upload_size(sum(array.nbytes for array in reply.arrays.values()))
        except Exception as error:
            return self._error_reply(fields, error), state
        sent = self._record_reply("out", fields, self.sign(reply), **costs)
        if "spends" in costs and isinstance(fields, messages.RoundRequest):  # counted: a repeated reply costs nothing
            ReplyCache(self._folder(fields.training)).store(request, reply, state)
        return sent, state

    def _run_round(
        self, request: Message, fields: messages.RoundRequest, state: Message, policy: Policy
    ) -> tuple[Message, Message, dict[str, Any]]:
        """Return the reply, the new state, and what the reply costs."""
        kind, key = "upload" if fields.kind == "round" and fields.trains else "measurement", fields.training
        training, site_training = self._admit(key, policy)
        if training.world.channel.verified:
            raise messages.ReportedError("sum", "an upload of a verified sum was asked for without its session")
        if (cached := ReplyCache(self._folder(key)).read(request)) is not None:
            return cached[0], training.restore(cached[1]) if fields.trains else state, {}
        spends = site_training.upload_cost if kind == "upload" else 0.0
        self.budget.admit(policy, kind, key, spends)
        reply, state = self.handler.answer(request, state)
        self.accuracy = validation_accuracy(reply.header["scores"])
        scores, described = policy.allowed_scores(reply.header["scores"]), reply.header["described"]
        if site_training.is_trial:  # counts of correct validation samples are enough to choose by
            scores = {name: scores[name] for name in messages.SCORE_COUNTS}
        if policy.score_detail == "none" or site_training.is_trial:
            described = {}
        releases = self.budget.rounds[key] + (kind == "upload")
        header = {**reply.header, "scores": scores, "described": described, "releases": releases}
        return Message(header, reply.arrays), state, {"costs": kind, "spends": spends}

    def _run_sum(self, request: Message, fields: messages.SumRequest, policy: Policy) -> tuple[Message, dict[str, Any]]:
        """Return the reply to a step of a verified sum, and what it costs."""
        training, site_training = self._admit(fields.training, policy)
        kind = "upload" if fields.kind == "sum" else "measurement"
        self.budget.admit(policy, kind, fields.training, site_training.upload_cost if kind == "upload" else 0.0)
        return self.sums.answer(request, fields, site_training, training.world, policy)

    def _admit(self, key: str, policy: Policy) -> tuple[ClientTraining, SiteTraining]:
        """Return an opened training, as far as the policy and the people here allow it to go on."""
        training = self._load_training(key, policy)
        site_training, world = self.site_trainings[key], training.world
        policy.admit(world.method, world.channel, site_training.labels, site_training.groups)
        if policy.consent:
            consent.check_consent(self.kit.folder, policy, consent.plan_hash(site_training.spec))
            consent.check_consented_size(site_training.spec, world.method.rounds, self.budget, key)
        return training, site_training

    def _evaluate(
        self, request: Message, fields: messages.EvaluationRequest, policy: Policy
    ) -> tuple[Message, dict[str, Any]]:
        """Return the scores of given classifiers, and what the reply costs."""
        if fields.training != EVALUATION_KEY:
            raise messages.ReportedError("request", "the key is not that of evaluations")
        self.budget.admit(policy, "measurement", EVALUATION_KEY, 0.0)
        evaluation = Evaluation.read(self.kit, fields, to_tensors(request.arrays))
        evaluation.admit(policy)
        if not policy.plain and policy.scores == "exact":
            policy = replace(policy, scores="coarse")  # as at the end of a verified sum
        is_trusted = policy.plain or evaluation.is_signed(self.sums.federation, self.sign.public.decode(), policy)
        if policy.consent or not is_trusted:
            spec = request.header["spec"]
            try:
                self._check_consent(spec, lambda: describe_evaluation(evaluation, spec["run"], policy), policy)
            except messages.RequestRefused as refusal:
                raise (
                    refusal if is_trusted or refusal.code != "consent" else messages.RequestRefused("classifier")
                ) from refusal
        encoder, units, scores = evaluation.measure_all(policy)
        header = {
            **{name: request.header[name] for name in messages.ECHOED_FIELDS},
            **{"client": self.kit.name, "encoder": messages.public_encoder_name(encoder)},
            "units": 0 if policy.score_detail == "none" else units,
            "scores": [policy.allowed_scores(score) for score in scores],
        }
        return Message(header, {}), {"costs": "measurement", "count": len(scores)}

    def on_sum_ended(self, key: str, world: World, sent: Tensors, local: Tensors) -> None:
        self.on_adapted(replace(self.handler.trainings[key], world=world), sent, local)

    def _error_reply(self, fields: messages.Header | None, error: Exception) -> Message:
        """Return a code with its numbers for the server; log everything else here."""
        is_expected = isinstance(error, FedVLMError)
        detail = str(error) if is_expected else "".join(traceback.format_exception(error))
        self.log_text(detail)
        header = {**{name: getattr(fields, name, None) for name in messages.ECHOED_FIELDS}, "client": self.kit.name}
        reply = self.sign(Message({**header, "error": messages.encode_error(error)}))
        direction: Direction = "refused" if isinstance(error, messages.RequestRefused) else "out"
        if direction == "refused":
            target = f"{getattr(fields, 'kind', '')} {getattr(fields, 'training', '')}"
            log_security(self.kit.folder, "request", "refused", actor="the server", target=target, reason=detail)
        return self._record_reply(direction, fields, reply, error=detail[-2000:])

    def _record_reply(
        self, direction: Direction, fields: messages.Header | None, reply: Message, **details: Any
    ) -> Message:
        """Write a reply to the ledger and count it, before it leaves."""
        data, entry = to_bytes(reply), {**_ledger_fields(fields), **details}
        self.ledger.add(direction, fields.round if fields else -1, to_tensors(reply.arrays), data, **entry)
        self.budget.count_line(entry)
        if fields and "error" not in details:
            content = "a signature" if fields.kind in messages.SUM_KINDS else "scores only"
            names = list(reply.arrays) or ["numbers about its data" if fields.kind == "describe" else content]
            number = fields.round + 1 if fields.kind in ("round", "sum") else None
            activity = ACTIVITIES.get(fields.kind, f"round {number}")
            facts = {"round": number, "share": self.accuracy if fields.kind == "round" else None}
            self.log_event("sent", what=activity, bytes=len(data), fields=names, **facts)
        return reply

    def _count_unsigned(self) -> None:
        """Log unsigned messages at most once a minute, so that an outsider cannot fill the disk."""
        self.n_unsigned += 1
        if monotonic() - self.last_unsigned_log >= UNSIGNED_LOG_SECONDS:
            self.last_unsigned_log = monotonic()
            self.ledger.add("dropped", -1, strangers=self.n_unsigned)
            reason = "the server did not sign it"
            log_security(self.kit.folder, "message", "refused", self.n_unsigned, actor="unknown", reason=reason)
            self.n_unsigned = 0

    def open_training(self, request: Message, policy: Policy) -> Message:
        """Open a training here, and tell the server what it must know to start it."""
        spec, sent = request.header["spec"], to_tensors(request.arrays)
        if self.kit.test_only:
            raise messages.RequestRefused("test only")
        key, settings = messages.training_key(spec), build(spec["identity"])
        if key != request.header["training"]:
            raise messages.ReportedError("request", "the key of the training does not match its settings")
        consent.check_plan(spec, settings)
        folder, opening = self._folder(key), request.header.get("opening", "")
        stored = read_json(folder / "training.json") if (folder / "training.json").exists() else {}
        resumes = bool(opening) and stored.get("opening") == opening
        site_training = load_site_training(self.kit, settings, spec, sent.get("reference"), policy, resumes)
        policy.admit(settings.method, settings.channel, site_training.labels, site_training.groups)
        if policy.consent:
            self._check_consent(
                spec, lambda: consent.describe_request(spec, settings, site_training, self.budget, policy), policy
            )
            consent.check_consented_size(spec, settings.method.rounds, self.budget, key)
        self._admit_tuning(spec, key, site_training, policy)
        self._log_suppressed_classes(site_training, policy)
        if stored:
            _check_same_encoder(stored, site_training)
        data = self._keep_samples(folder, site_training)
        write_json(folder / "training.json", {**spec, "encoder": site_training.encoder, "opening": opening})
        write_tensors(folder / "reference.safetensors", sent, {})
        self._register(key, site_training)
        frozen, member = site_training.world.frozen, site_training.world.members[self.kit.name]
        shared, local = site_training.world.method.init(frozen)
        is_sum = settings.channel.verified
        header = {
            **{name: request.header[name] for name in messages.ECHOED_FIELDS},
            **{"client": self.kit.name, "opened": key, "encoder": messages.public_encoder_name(site_training.encoder)},
            **{"classes": list(frozen.classes), "dim": frozen.dim, "scale": frozen.scale, "local": sorted(local)},
            "multi_label": frozen.multi_label,
            # Members of a verified sum add up their counts, and tell nobody their own.
            "samples": {split: 0 if is_sum else len(getattr(member, split)) for split in SPLITS},
            **template_of(frozen),
            **{"software": fedvlm.__version__, "protocol": PROTOCOL, **data},
        }
        counts = {"samples": len(member.train), "validation": len(member.validation)}
        counts["classes"] = site_training.n_classes
        self.log_event("opened", method=settings.method.name, rounds=settings.method.rounds, **counts)
        first = {f"shared/{name}": value for name, value in shared.items()}
        texts = {"text": text_of(frozen), "descriptions": frozen.descriptions if is_sum else None}
        first |= {name: value for name, value in texts.items() if value is not None}
        return Message(header, to_arrays(first))

    def _keep_samples(self, folder: Path, site_training: SiteTraining) -> dict[str, Any]:
        """Keep a new run's samples, drop replies and local tensors of others; return what the server learns."""
        chosen = site_training.samples
        if chosen is None:
            return {}
        if chosen.note:
            self.log_text(f"{site_training.title}: {chosen.note}")
        if chosen.status == "changed":
            rmtree(folder, ignore_errors=True)
        if chosen.status in ("first", "changed"):
            keep_samples(folder, chosen.rows)
        return {"data": chosen.status, "removed_classes": chosen.n_removed_classes}

    def _check_consent(
        self, spec: Mapping[str, Any], describe: Callable[[], Mapping[str, Any]], policy: Policy
    ) -> None:
        """Refuse a request that people have not consented to, and keep it for them."""
        if not (spec["run"]["purpose"].strip() and spec["run"]["contact"].strip()):
            raise messages.RequestRefused("purpose")
        try:
            consent.check_consent(self.kit.folder, policy, consent.plan_hash(spec))
        except messages.RequestRefused as refusal:
            if refusal.code in ("consent", "consent ended"):
                facts = describe()
                if consent.store_request(self.kit.folder, spec, facts):
                    self.log_event("asks", plan=consent.plan_hash(spec), **facts)
            raise

    def _admit_tuning(self, spec: Mapping[str, Any], key: str, site_training: SiteTraining, policy: Policy) -> None:
        """Admit a whole tuning search when its first trial is opened, or none of it."""
        tuning = spec.get("tuning")
        if tuning is None or tuning["key"] in self.admitted_tunings or key in self.budget.trainings:
            return
        self.budget.admit_tuning(policy, tuning["trainings"], tuning["rounds"], site_training.upload_cost)
        self.admitted_tunings.add(tuning["key"])

    def _log_suppressed_classes(self, site_training: SiteTraining, policy: Policy) -> None:
        """Log which classes are too small to upload; the server is not told."""
        small = policy.small_classes(site_training.labels, site_training.groups)
        names = [site_training.world.frozen.classes[i] for i in small]
        if names and isinstance(site_training.world.method, ClassStatistics):
            self.log_text(f"these classes have too few samples, so nothing of them is uploaded: {', '.join(names)}")

    def _load_training(self, key: str, policy: Policy) -> ClientTraining:
        """Return an opened training; after a restart, load it from its folder."""
        folder = self._folder(key)
        if key not in self.handler.trainings:
            if not (folder / "training.json").exists():
                raise messages.ReportedError("closed")
            spec = read_json(folder / "training.json")
            sent, _ = read_tensors(folder / "reference.safetensors")
            site_training = load_site_training(self.kit, build(spec["identity"]), spec, sent.get("reference"), policy)
            _check_same_encoder(spec, site_training)
            self._register(key, site_training)
        training = self.handler.trainings[key]
        world = replace(training.world, method=policy.with_min_class_samples(training.world.method))
        self.handler.trainings[key] = replace(training, world=world)
        return self.handler.trainings[key]

    def _register(self, key: str, site_training: SiteTraining) -> None:
        self.site_trainings[key] = site_training
        self.handler.trainings[key] = ClientTraining(key, self.kit.name, site_training.world, self._folder(key))

    def _folder(self, key: str) -> Path:
        return self.kit.folder / "state" / key

    def on_adapted(self, training: ClientTraining, sent: Tensors, local: Tensors) -> None:
        """Save the site's own classifier; the run continues if that fails."""
        if self.site_trainings[training.key].is_trial:
            return
        try:
            self._save_classifier(training, sent, local)
        except Exception:
            self.log_text(f"the classifier cannot be saved:\n{traceback.format_exc()}")

    def _save_classifier(self, training: ClientTraining, sent: Tensors, local: Tensors) -> None:
        site_training, world = self.site_trainings[training.key], training.world
        place = self.kit.folder / "classifiers" / slug(site_training.title)
        # A classifier sends what it holds once more: most methods send all of it, as it is.
        if tensors.max_relative_difference(sent, world.method.send(sent, training.id)) > 0:
            self.log_text(f"{world.method.name} sends each client its own tensors; no classifier is saved")
            return
        id, encoder, novelty = training.id, site_training.encoder, fit_client_novelty(world, training.id)
        calibrated = fit_calibration(world, sent, local, id)
        classifier = Personalised(world.method, world.frozen, sent, local, id, encoder, calibrated, novelty=novelty)
        measured = measure(world, sent, local, training.id)
        counts = measured["test_rows"], measured["test_hits"]
        save_with_card(classifier, ClassifierOrigin(site_training.origin, site_training.title, *counts), place)
        self.log_event("classifier", place=str(place))
        self.log_event("gained", **compare_with_alone(world, training.id, measured))


def _check_same_encoder(stored_spec: Mapping[str, Any], site_training: SiteTraining) -> None:
    if messages.encoder_fingerprint(stored_spec["encoder"]) != messages.encoder_fingerprint(site_training.encoder):
        raise messages.ReportedError(
            "encoder",
            f"this site began this training with the encoder {stored_spec['encoder']}, and now has "
            f"{site_training.encoder}; use the first one again, or start another experiment",
        )


def _ledger_fields(fields: messages.Header | None) -> dict[str, Any]:
    return {name: getattr(fields, name, None) for name in ("kind", "training")}


def serve_site(kit: SiteKit, print_line: PrintLine, stop: Event | None = None) -> None:
    """Serve requests at a site until it is stopped."""
    certificate = read_own_certificate(kit.folder)
    site = Site(kit, print_line)
    stop = stop or Event()
    with exclusive_lock(kit.folder / ".lock", f"site {kit.name} is already running in {kit.folder}"):
        until = describe_validity(certificate.days_left, kit.folder)
        site.log_event("connecting", site=kit.name, address=kit.address, until=until)
        client = None
        try:
            if _wait_for_server(kit, site.log_event, stop):
                client = fleet.FleetClient(kit.address, kit.folder, stop)
                client.connect()
                fleet.serve_requests(client, site.answer, site.log_text)
        except FederationError as error:
            reason = describe_refusal(kit, error)
            site.log_text(reason)
            raise FederationError(reason) from error
        except fleet.Stopped:
            return
        finally:
            if client is not None:
                client.disconnect()


def _wait_for_server(kit: SiteKit, log_event: EventLogger, stop: Event) -> bool:
    """Wait for the server as long as it takes, and log why it cannot be reached."""
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


def describe_refusal(kit: SiteKit, error: Exception) -> str:
    """Explain why the server does not admit this site, with the remedy."""
    if not isinstance(error, fleet.NotAdmitted | fleet.CallRefused):
        return str(error)
    cause = (
        "its key is not known there, because it was revoked or renewed, has expired, or is of another federation: ask "
        "the server's people, who see it by `fedvlm deploy keys`"
    )
    if isinstance(error, fleet.NotAdmitted) and error.clock:
        cause = error.clock
    elif isinstance(error, fleet.CallRefused):
        cause = "a copy of the kit is connected, or was a minute ago: stop the copy, and start the site again"
    return f"site {kit.name} is not admitted at {kit.address}; {cause} ({error})"
