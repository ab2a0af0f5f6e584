"""A site: its own rows, its policy and ledger, and its answers to the server's requests."""

import json
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from fedvlm import tensors
from fedvlm.classifier.card import Story, save
from fedvlm.classifier.personalised import Personalised
from fedvlm.core import Telling, Tensors
from fedvlm.deploy.account import Account, Given, cost, what
from fedvlm.deploy.events import Events
from fedvlm.deploy.gained import gained
from fedvlm.deploy.keys import Signer, Verifier
from fedvlm.deploy.kits import SiteKit
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.pending import request
from fedvlm.deploy.policy import Policy, policy_now, read_policy
from fedvlm.deploy.reasons import Refused, Said, word
from fedvlm.deploy.rows import Own, own_rows
from fedvlm.deploy.withdrawn import check_withdrawn
from fedvlm.deploy.words import SCORES, check_request
from fedvlm.engines.client import measure
from fedvlm.engines.flower.client import Desk, OwnTraining, arrays, unpack
from fedvlm.engines.flower.wire import Parcel, to_bytes
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.runner.calibrate import calibration
from fedvlm.runner.prepare import template_of
from fedvlm.runner.settings import build
from fedvlm.storage.files import slug
from fedvlm.storage.sealed import read_json, read_tensors, write_json, write_tensors

Say = Callable[[str], None]
PLAIN = re.compile(r"\w[\w.+-]{0,63}")  # an encoder's name that is no path and no address
SAME = ("kind", "training", "round", "nonce")  # what a reply repeats of its request
QUIET = 60.0  # seconds between two lines of the ledger about strangers


class Stranger(FederationError):
    """A message that the server did not sign; it gets no answer."""


class Site:
    """Answers requests that its server has signed, as far as its policy allows."""

    def __init__(self, kit: SiteKit, say: Say = lambda text: None) -> None:
        self.kit, self.note = kit, Events(kit.folder, say)
        self.sign = Signer(kit.folder / "key")
        self.check = Verifier(kit.folder / "server.pub")
        self.ledger = Ledger(kit.folder)
        self.account = Account(self.ledger)
        self.desk = Desk(guard=self)
        self.rows: dict[str, Own] = {}  # by training
        self.races: set[str] = set()  # that were admitted
        self.strangers, self.heard = 0, -QUIET  # messages of others since a line, and its time
        read_policy(kit.folder)  # a mistake in it is found now, not in the first round

    def say(self, text: str) -> None:
        """To the people here, on the terminal and in the site's log."""
        self.note("said", text=text)

    def answer(self, request: Parcel, state: Parcel) -> tuple[Parcel, Parcel]:
        """The signed reply, also of an error or a refusal, and the new state.

        Whoever is not the server gets none: nothing of its message is looked at.
        """
        try:
            self.check(request, "the server")
        except Exception as error:  # whatever a stranger's words make of a checksum
            self._dropped()
            raise Stranger("a message that the server did not sign was dropped") from error
        try:
            check_request(request.about)
            about = dict(request.about)
        except FederationError as error:  # signed, so the server may hear of it
            return self._reply({}, Said("words", str(error))), state
        try:
            self.ledger.add(
                "in", about["round"], unpack(request.arrays), to_bytes(request), **_notes(about)
            )
            check_withdrawn(self.kit.folder, self.sign.public)
            policy = policy_now(self.kit.folder)
            reply, state, costs = self._answered(request, about, state, policy)
            policy.release(sum(one.nbytes for one in reply.arrays.values()))
        except Exception as error:
            return self._reply(about, error), state
        sent = self._sent("out", about, self.sign(reply), **costs)
        if "spends" in costs:  # after it was counted: what is given again costs nothing
            Given(self._folder(about["training"])).keep(request, reply, state)
        return sent, state

    def _answered(
        self, request: Parcel, about: Mapping[str, Any], state: Parcel, policy: Policy
    ) -> tuple[Parcel, Parcel, dict[str, Any]]:
        """The reply, the new state, and what it costs by the site's account."""
        kind, key = what(about), about["training"]
        costs: dict[str, Any] = {"costs": kind}
        if kind == "training":
            self.account.admit(policy, kind, key, 0.0)
            return self.open(about, unpack(request.arrays), policy), state, costs
        training = self._known(key, policy)
        own, world = self.rows[key], training.world
        policy.admit(self.kit.folder, world.method, world.channel, own.labels)
        if (again := Given(self._folder(key)).read(request)) is not None:
            return again[0], training.back(again[1]) if about["trains"] else state, {}
        spends = cost(world.method, world.channel, len(own.labels)) if kind == "upload" else 0.0
        self.account.admit(policy, kind, key, spends)
        reply, state = self.desk.answer(request, state)
        scores = policy.allowed_scores(reply.about["scores"])
        if own.trial:  # of which hits on validation rows are enough
            scores = {name: scores[name] for name in SCORES}
        words = {
            "scores": scores,
            "described": {} if policy.how == "none" or own.trial else reply.about["described"],
            "releases": self.account.rounds[key] + (kind == "upload"),
        }
        return Parcel({**reply.about, **words}, reply.arrays), state, {**costs, "spends": spends}

    def _reply(self, about: Mapping[str, Any], error: Exception) -> Parcel:
        """A kind and its numbers for the server; all else for the people of the site."""
        known = isinstance(error, FedVLMError)
        detail = str(error) if known else "".join(traceback.format_exception(error))
        self.say(detail)
        words = {**{name: about.get(name) for name in SAME}, "client": self.kit.name}
        reply = self.sign(Parcel({**words, "error": word(error)}))
        kind: Any = "refused" if isinstance(error, Refused) else "out"
        return self._sent(kind, about, reply, error=detail[-2000:])

    def _sent(self, direction: Any, about: Mapping[str, Any], reply: Parcel, **more: Any) -> Parcel:
        """Noted and counted before it leaves."""
        number, data = about.get("round", -1), to_bytes(reply)
        noted = {**_notes(about), **more}
        self.ledger.add(direction, number, unpack(reply.arrays), data, **noted)
        self.account.note(noted)
        if "error" not in more:
            fields = list(reply.arrays) or ["scores only"]
            self.note("sent", what=_what(about), bytes=len(data), fields=fields)
        return reply

    def _dropped(self) -> None:
        """A short line, and not more than one a minute: a stranger cannot fill the disk."""
        self.strangers += 1
        if monotonic() - self.heard >= QUIET:
            self.heard = monotonic()
            self.ledger.add("dropped", -1, strangers=self.strangers)
            self.strangers = 0

    def open(self, about: Mapping[str, Any], sent: Tensors, policy: Policy) -> Parcel:
        """Makes a training known here, and tells the server what it has to know to start it."""
        spec = about["spec"]
        key = key_of(spec)
        settings = build(spec["identity"])
        if key != about["training"]:
            raise Said("words", "the training is not that of its settings")
        own = own_rows(self.kit, settings, spec, sent.get("reference"), policy)
        if policy.consent:
            self.note("asks", **request(settings, own, self.account, policy))
        policy.admit(self.kit.folder, settings.method, settings.channel, own.labels)
        self._race(spec, key, own, policy)
        self._tell_withheld(own, policy)
        folder = self._folder(key)
        if (folder / "training.json").exists():
            _same_encoder(read_json(folder / "training.json"), own)
        write_json(folder / "training.json", {**spec, "encoder": own.encoder})
        write_tensors(folder / "reference.safetensors", sent, {})
        self._know(key, own)
        shared, local = settings.method.init(own.world.frozen)
        member = own.world.members[self.kit.name]
        text = {} if own.world.frozen.text is None else {"text": own.world.frozen.text}
        words = {
            **{name: about[name] for name in SAME},
            "client": self.kit.name,
            "opened": key,
            "encoder": public(own.encoder),
            "classes": list(own.world.frozen.classes),
            "dim": own.world.frozen.dim,
            "scale": own.world.frozen.scale,
            "local": sorted(local),
            "rows": {part: len(getattr(member, part)) for part in ("train", "validation", "test")},
        } | template_of(own.world.frozen)
        first = {f"shared/{name}": value for name, value in shared.items()}
        self.note(
            "opened",
            method=settings.method.name,
            rows=len(member.train),
            validation=len(member.validation),
            classes=len(set(own.labels.tolist())),
        )
        return Parcel(words, arrays({**first, **text}))

    def _race(self, spec: Mapping[str, Any], key: str, own: Own, policy: Policy) -> None:
        """All of a race is admitted when its first trial is opened, or none of it."""
        race = spec.get("race")
        if race is None or race["race"] in self.races or key in self.account.trainings:
            return
        each = cost(own.world.method, own.world.channel, len(own.labels))
        self.account.admit_race(policy, race["trainings"], race["rounds"], each)
        self.races.add(race["race"])

    def _tell_withheld(self, own: Own, policy: Policy) -> None:
        """To the people here; the server is not told which classes are small."""
        names = [own.world.frozen.classes[i] for i in policy.small(own.labels)]
        if names and isinstance(own.world.method, Telling):
            self.say(f"of these classes there are few rows; nothing leaves: {', '.join(names)}")

    def _known(self, key: str, policy: Policy) -> OwnTraining:
        """A training that was opened; after a restart from what was noted then."""
        folder = self._folder(key)
        if key not in self.desk.trainings:
            if not (folder / "training.json").exists():
                raise Said("closed")
            spec = read_json(folder / "training.json")
            sent, _ = read_tensors(folder / "reference.safetensors")
            own = own_rows(self.kit, build(spec["identity"]), spec, sent.get("reference"), policy)
            _same_encoder(spec, own)
            self._know(key, own)
        training = self.desk.trainings[key]
        world = replace(training.world, method=policy.floored(training.world.method))
        self.desk.trainings[key] = replace(training, world=world)
        return self.desk.trainings[key]

    def _know(self, key: str, own: Own) -> None:
        self.rows[key] = own
        training = OwnTraining(key, self.kit.name, own.world, self._folder(key))
        self.desk.trainings[key] = training

    def _folder(self, key: str) -> Path:
        return self.kit.folder / "state" / key

    def adapted(self, training: OwnTraining, sent: Tensors, local: Tensors) -> None:
        """The site's own classifier, which is what all this was for; without it the run goes on."""
        if self.rows[training.key].trial:
            return
        try:
            self._keep(training, sent, local)
        except Exception:
            self.say(f"its classifier cannot be kept:\n{traceback.format_exc()}")

    def _keep(self, training: OwnTraining, sent: Tensors, local: Tensors) -> None:
        own, world = self.rows[training.key], training.world
        place = self.kit.folder / "classifiers" / slug(own.title)
        # A classifier sends what it holds once more: most methods send all of it, as it is.
        if tensors.difference(sent, world.method.send(sent, training.id)) > 0:
            self.say(f"{world.method.name} sends each client tensors of its own; none is kept")
            return
        known = calibration(world, sent, local, training.id)
        one = Personalised(world.method, world.frozen, sent, local, training.id, own.encoder, known)
        measured = measure(world, sent, local, training.id)
        save(one, Story(own.about, own.title, measured["test_rows"], measured["test_hits"]), place)
        self.note("classifier", place=str(place))
        self.note("gained", **gained(world, training.id, measured))


def key_of(spec: Mapping[str, Any]) -> str:
    """One training of one experiment, whoever asks for it: its file names at a site."""
    return sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:24]


def fingerprint(encoder: str) -> str:
    """What counts of an encoder: machines may know the same one by different names."""
    return encoder.rpartition("@")[2]


def public(encoder: str) -> str:
    """An encoder as the server may know it: its fingerprint, and its name if that is a mere word;
    a path or an address may tell of folders, hosts or passwords."""
    name, _, fingerprint = encoder.rpartition("@")
    return encoder if PLAIN.fullmatch(name) else fingerprint


def _same_encoder(noted: Mapping[str, Any], own: Own) -> None:
    if fingerprint(noted["encoder"]) != fingerprint(own.encoder):
        raise Said(
            "encoder",
            f"this site began this training with the encoder {noted['encoder']}, and now has "
            f"{own.encoder}; give it the first one again, or start another experiment",
        )


def _notes(about: Mapping[str, Any]) -> dict[str, str | int | float | None]:
    return {name: about.get(name) for name in ("kind", "training")}


def _what(about: Mapping[str, Any]) -> str:
    what = {"open": "opened a training", "adapt": "adapted"}.get(about["kind"], "")
    return what or f"round {about['round']}"
