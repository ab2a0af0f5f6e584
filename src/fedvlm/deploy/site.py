"""A site: its own rows, its policy and ledger, and a process that answers the server's requests."""

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from fedvlm import tensors
from fedvlm.classifier.card import Story, save
from fedvlm.classifier.personalised import Personalised
from fedvlm.core import Tensors
from fedvlm.deploy.flower.client_app import DESK, receive, send_all
from fedvlm.deploy.flower.gate import NAME as CONTROL
from fedvlm.deploy.flower.gate import PASS, new_secret
from fedvlm.deploy.flower.processes import Process, Unreachable, knock, supernode
from fedvlm.deploy.keys import Signer, Verifier
from fedvlm.deploy.kits import SiteKit, secret
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.policy import Refused, read_policy
from fedvlm.deploy.rows import Own, own_rows
from fedvlm.engines.client import measure
from fedvlm.engines.flower.client import Desk, OwnTraining, arrays, unpack
from fedvlm.engines.flower.wire import Parcel, to_bytes
from fedvlm.errors import FederationError, FedVLMError
from fedvlm.runner.calibrate import calibration
from fedvlm.runner.prepare import template_of
from fedvlm.runner.settings import build
from fedvlm.storage.files import alone, slug
from fedvlm.storage.sealed import read_json, read_tensors, write_json, write_tensors

Say = Callable[[str], None]


class Site:
    """Answers requests that its server has signed, as far as its policy allows."""

    def __init__(self, kit: SiteKit, say: Say = lambda text: None) -> None:
        self.kit, self.say = kit, say
        self.sign = Signer(kit.folder / "key")
        self.check = Verifier(kit.folder / "server.pub")
        self.ledger = Ledger(kit.folder)
        self.desk = Desk(guard=self)
        self.rows: dict[str, Own] = {}  # by training
        read_policy(kit.folder)  # a mistake in it is found now, not in the first round

    def answer(self, request: Parcel, state: Parcel) -> tuple[Parcel, Parcel]:
        """The signed reply, also of an error or a refusal, and the new state."""
        about = request.about
        number = about.get("round", -1)
        same = {key: about.get(key) for key in ("kind", "training", "round", "nonce")}
        words: dict[str, Any] = {**same, "client": self.kit.name}
        kind: Any = "out"
        try:
            self.check(request, "the server")
            self.ledger.add("in", number, unpack(request.arrays), to_bytes(request), **_notes(same))
            if about["kind"] == "open":
                reply = self.open(about, unpack(request.arrays))
            else:
                self._reopen(about["training"])
                reply, state = self.desk.answer(request, state)
            read_policy(self.kit.folder).release(sum(one.nbytes for one in reply.arrays.values()))
        except Refused as refusal:
            kind, reply = "refused", Parcel({**words, "error": f"refused by its policy: {refusal}"})
        except FedVLMError as error:
            reply = Parcel({**words, "error": str(error)})
        except Exception:
            reply = Parcel({**words, "error": traceback.format_exc()})
        reply = self.sign(reply)
        why = {"error": reply.about["error"]} if "error" in reply.about else {}
        data = to_bytes(reply)
        self.ledger.add(kind, number, unpack(reply.arrays), data, **_notes({**same, **why}))
        self.say(_line(about, reply))
        return reply, state

    def open(self, about: Mapping[str, Any], sent: Tensors) -> Parcel:
        """Makes a training known here, and tells the server what it has to know to start it."""
        spec = about["spec"]
        key = key_of(spec)
        settings = build(spec["identity"])
        policy = read_policy(self.kit.folder)
        own = own_rows(self.kit, settings, spec, sent.get("reference"), self.say)
        policy.admit(self.kit.folder, settings.method.name, settings.channel, own.labels)
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
            **{name: about[name] for name in ("kind", "training", "round", "nonce")},
            "client": self.kit.name,
            "opened": key,
            "encoder": own.encoder,
            "classes": list(own.world.frozen.classes),
            "dim": own.world.frozen.dim,
            "scale": own.world.frozen.scale,
            "local": sorted(local),
            "rows": {part: len(getattr(member, part)) for part in ("train", "validation", "test")},
        } | template_of(own.world.frozen)
        first = {f"shared/{name}": value for name, value in shared.items()}
        return Parcel(words, arrays({**first, **text}))

    def _reopen(self, key: str) -> None:
        """After a restart, from what was noted when the training was opened."""
        if key in self.desk.trainings or not set(key) <= set("0123456789abcdef"):
            return
        folder = self._folder(key)
        if (folder / "training.json").exists():
            spec = read_json(folder / "training.json")
            sent, _ = read_tensors(folder / "reference.safetensors")
            settings = build(spec["identity"])
            own = own_rows(self.kit, settings, spec, sent.get("reference"), self.say)
            _same_encoder(spec, own)
            self._know(key, own)

    def _know(self, key: str, own: Own) -> None:
        self.rows[key] = own
        training = OwnTraining(key, self.kit.name, own.world, self._folder(key))
        self.desk.trainings[key] = training

    def _folder(self, key: str) -> Path:
        return self.kit.folder / "state" / key

    def admit(self, training: OwnTraining, about: Mapping[str, Any], sent: Tensors) -> None:
        """The policy is read anew for each round: it is the site's, and may change."""
        world = training.world
        labels = self.rows[training.key].labels
        policy = read_policy(self.kit.folder)
        policy.admit(self.kit.folder, world.method.name, world.channel, labels)

    def adapted(self, training: OwnTraining, sent: Tensors, local: Tensors) -> None:
        """The site's own classifier, which is what all this was for."""
        own, world = self.rows[training.key], training.world
        place = self.kit.folder / "classifiers" / slug(own.title)
        # A classifier sends what it holds once more: most methods send all of it, as it is.
        if tensors.difference(sent, world.method.send(sent, training.id)) > 0:
            self.say(f"{world.method.name} sends each client tensors of its own; none is kept")
            return
        known = calibration(world, sent, local, training.id)
        one = Personalised(world.method, world.frozen, sent, local, training.id, own.encoder, known)
        measured = measure(world, sent, local, training.id)
        save(one, Story(own.told, own.title, measured["test_rows"], measured["test_hits"]), place)
        self.say(f"its classifier is in {place}")


def key_of(spec: Mapping[str, Any]) -> str:
    """One training of one experiment, whoever asks for it: its file names at a site."""
    return sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:24]


def fingerprint(encoder: str) -> str:
    """What counts of an encoder: machines may know the same one by different names."""
    return encoder.rpartition("@")[2]


def _same_encoder(noted: Mapping[str, Any], own: Own) -> None:
    if fingerprint(noted["encoder"]) != fingerprint(own.encoder):
        raise FederationError(
            f"this site began this training with the encoder {noted['encoder']}, and now has "
            f"{own.encoder}; give it the first one again, or start another experiment"
        )


def _notes(words: Mapping[str, Any]) -> dict[str, str | int | float | None]:
    return {name: value for name, value in words.items() if name not in ("round", "nonce")}


def _line(about: Mapping[str, Any], reply: Parcel) -> str:
    what = {"open": "opened a training", "adapt": "adapted"}.get(about.get("kind", ""), "")
    what = what or f"round {about.get('round')}"
    if "error" in reply.about:
        return f"{what}: {reply.about['error'].strip().splitlines()[-1]}"
    sent = sum(one.nbytes for one in reply.arrays.values())
    return f"{what}: {sent} bytes left this site ({', '.join(reply.arrays) or 'scores only'})"


def serve(kit: SiteKit, say: Say, stop: Event | None = None) -> None:
    """The life of a site's process: answers what its SuperNode brings, until it is stopped."""
    site = Site(kit, say)
    stop = stop or Event()
    with (
        alone(kit.folder / ".lock", f"site {kit.name} is already running in {kit.folder}"),
        TemporaryDirectory(prefix="fedvlm-") as place,
        socket.socket(socket.AF_UNIX) as door,
    ):
        bin = Path(place) / "bin"
        bin.mkdir()
        _script(bin / "flwr-clientapp", "client_app", "main")
        _script(bin / "flower-superexec", "superexec", "at_site")
        secret(Path(place) / CONTROL, new_secret())
        door.bind(str(Path(place) / "desk"))
        door.listen(8)
        door.settimeout(0.5)
        say(f"site {kit.name} is connecting to {kit.address}; stop it with Ctrl-C")
        if not _reach(kit, say, stop):
            return
        node = _node(kit, bin, place)
        try:
            while not stop.is_set():
                if not node.alive:
                    raise FederationError(refusal(kit, node))
                try:
                    stream, _ = door.accept()
                except TimeoutError:
                    continue
                with stream:
                    answer_one(site, stream, say)
        finally:
            node.stop()


def answer_one(site: Site, stream: socket.socket, say: Say) -> None:
    """Whatever comes in, and whatever comes of it, the site goes on."""
    stream.settimeout(60)
    try:
        send_all(stream, site.answer(receive(stream), receive(stream)))
    except Exception as error:
        say(f"a request was not answered ({type(error).__name__}: {error})")


def _reach(kit: SiteKit, say: Say, stop: Event) -> bool:
    """Waits for the server as long as it takes, and says why it is not reached."""
    said = ""
    while not stop.is_set():
        try:
            knock(kit.address, kit.folder / "ca.crt")
            return True
        except Unreachable as error:
            if said != (said := str(error)):
                say(f"{said}; trying again every second")
        stop.wait(1.0)
    return False


def _node(kit: SiteKit, bin: Path, place: str) -> Process:
    source = str(Path(__file__).resolve().parents[2])  # as this process found fedvlm
    paths = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    told = {DESK: str(Path(place) / "desk"), PASS: place, "PYTHONPATH": paths}
    return supernode(kit, bin, told)


def _script(path: Path, module: str, main: str) -> None:
    """A program of this name, to be found before Flower's own."""
    named = f"from fedvlm.deploy.flower.{module} import {main}"
    path.write_text(f"#!{sys.executable}\n{named}\n{main}()\n")
    path.chmod(0o700)


def refusal(kit: SiteKit, node: Process) -> str:
    """Why a SuperNode ended, in words that help."""
    return (
        f"site {kit.name} cannot join {kit.address}; either its key is not known there, because "
        "the kit is of another `fedvlm deploy init` than the server's folder, or a copy of the kit "
        f"is connected (or was, a minute ago). Flower says:\n{node.tail()}"
    )
