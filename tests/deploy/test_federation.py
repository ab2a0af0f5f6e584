"""Real processes: a SuperLink, a SuperNode and a process per site, TLS and keys, on loopback."""

import json
import os
import shutil
import signal
import socket
from dataclasses import replace
from threading import Thread
from time import monotonic, sleep

import pytest
import torch
from PIL import Image

from fedvlm import tensors
from fedvlm.deploy.keys import key_pair
from fedvlm.deploy.kits import read_server
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.policy import EXAMPLE
from fedvlm.deploy.processes import superlink
from fedvlm.deploy.runs import processes, run, stage, start_site
from fedvlm.errors import FederationError
from fedvlm.record import Record, read_tensors
from fedvlm.result import Personalised
from fedvlm.runner import execute
from fedvlm.settings import build

pytestmark = [pytest.mark.deployed, pytest.mark.timeout(900)]
SITES = ["art", "photo", "sketch"]
METHODS = [
    {"name": "fedot", "rounds": 2, "rate": 1e-3},
    {"name": "faa-clip", "rounds": 1, "reference": "target"},
    {"name": "fedotp", "rounds": 1},
    {"name": "tofa"},
]


class Federation:
    """Three sites that play the domains of one small folder of pictures."""

    def __init__(self, place, data, running):
        self.place, self.data, self.running = place, data, running
        rules = {"quorum": 0.6, "deadline": 240.0, "wait": 240.0}
        self.kit = stage(self.settings({"name": "fedot"}), place, lambda *words: None, **rules)
        self.link = superlink(self.kit)
        running.append(self.link)
        self.sites = {name: self.start(name) for name in SITES}
        self.pace = 0.0  # seconds of a round on this machine, as long as nothing is disturbed

    def run(self, settings, out):
        result = run(self.kit, settings, out)
        self.pace = max([self.pace, *(line["seconds"] for line in result.rounds)])
        return result

    def settings(self, method, **more):
        told = {"data": str(self.data), "encoder": "demo", "protocol": "own-test"}
        return build({**told, "method": method, **more})

    def start(self, name):
        site = start_site(self.place / f"site-{name}")
        self.running.append(site)
        return site

    def rules(self, **values):
        """Other rules, from the next run on."""
        path = self.place / "server" / "server.toml"
        lines = [line for line in path.read_text().splitlines() if line.split(" ")[0] not in values]
        lines += [f"{key} = {value}" for key, value in values.items()]
        path.write_text("\n".join(lines) + "\n")
        self.kit = read_server(self.place / "server")


def pictures(root):
    """DOMAIN/CLASS/PICTURE: a class is a colour, a domain a brightness, and all differ a little."""
    for d, domain in enumerate(SITES):
        for c, name in enumerate(["ant", "bee", "cat", "dog"]):
            for row in range(10):
                colour = [20 + 40 * d + 3 * row] * 3
                colour[c % 3] += 90 + c
                path = root / domain / name / f"{row}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), tuple(colour)).save(path)
    return root


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    place = tmp_path_factory.mktemp("fed")
    cache = os.environ.get("FEDVLM_CACHE")
    os.environ["FEDVLM_CACHE"] = str(place / "cache")
    data = pictures(place / "pictures")
    try:
        with processes() as running:
            yield Federation(place / "kits", data, running)
    finally:
        os.environ.pop("FEDVLM_CACHE")
        if cache is not None:
            os.environ["FEDVLM_CACHE"] = cache


@pytest.fixture(autouse=True)
def own_cache():
    """The sites' cache is the module's: what one test embeds is there for the next."""


def lines(folder):
    return Record(folder).lines()


def wait_for(what, seconds=600.0):
    end = monotonic() + seconds
    while not what():
        assert monotonic() < end, "it did not happen in time"
        sleep(0.05)


class Running(Thread):
    """A run in the background, so that a test can disturb it."""

    def __init__(self, federation, settings, out):
        super().__init__(daemon=True)
        self.all, self.error, self.result = (federation.kit, settings, out), None, None
        self.start()

    def run(self):
        try:
            self.result = run(*self.all)
        except FederationError as error:
            self.error = error


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one["name"])
def test_a_method_gives_the_same_between_processes_as_in_one(federation, tmp_path, method):
    settings = federation.settings(method)
    deployed = federation.run(settings, tmp_path / "deployed")
    alone = execute(replace(settings, engine="single"), tmp_path / "alone")
    for key, value in alone.tables[0].items():
        assert deployed.tables[0][key] == pytest.approx(value, abs=1e-6)
    ours, theirs = (
        read_tensors(one.folder / "jobs/0-all.safetensors")[0] for one in (deployed, alone)
    )
    shared = {key: value for key, value in theirs.items() if key.startswith("shared/")}
    assert set(shared) == {key for key in ours if key.startswith("shared/")}
    assert tensors.difference(shared, ours) < 1e-5
    for here, there in zip(deployed.rounds, alone.rounds, strict=True):
        for id in SITES:
            for key in ("bytes_up", "bytes_down", "test_rows"):
                assert here["clients"][id][key] == there["clients"][id][key]
    local = alone.personalised("photo").local
    names = {key.split("/")[-1] for key in ours if key.startswith("local/")}
    assert not names & set(local)  # they stayed at their sites
    if local:
        kept = Personalised.from_pretrained(
            federation.place / "site-photo" / "classifiers" / f"{method['name']}-all-0"
        )
        assert tensors.difference(local, kept.local) < 1e-5


def test_a_killed_site_and_a_straggler_are_left_out_and_come_back(federation, tmp_path):
    """More than 30 % of the sites are missing in several rounds, and the run goes on."""
    if not federation.pace:
        federation.run(federation.settings({"name": "fedavg", "rounds": 2}), tmp_path / "first")
    federation.rules(deadline=max(12.0, 2 * federation.pace))
    out = tmp_path / "run"
    going = Running(federation, federation.settings({"name": "fedot", "rounds": 25}), out)
    wait_for(lambda: lines(out))
    os.killpg(federation.sites["photo"].child.pid, signal.SIGKILL)
    wait_for(lambda: any("photo" in line.get("missing", {}) for line in lines(out)))
    federation.sites["photo"] = federation.start("photo")
    straggler = federation.sites["sketch"].child.pid
    done = len(lines(out))
    wait_for(lambda: "photo" in lines(out)[-1]["clients"] and len(lines(out)) > done)
    os.kill(straggler, signal.SIGSTOP)
    try:
        wait_for(lambda: any("sketch" in line.get("missing", {}) for line in lines(out)))
    finally:
        os.kill(straggler, signal.SIGCONT)
    going.join(600)
    assert going.error is None and going.result is not None
    told = lines(out)
    late = [line["missing"]["sketch"] for line in told if "sketch" in line.get("missing", {})]
    assert "did not answer within" in late[0]
    assert [line["round"] for line in told] == list(range(25))
    for name in SITES:
        ledger = Ledger(federation.place / f"site-{name}").read()
        assert not ledger.broken and ledger.lines
    federation.rules(deadline=240.0)


def test_a_killed_server_is_resumed_to_the_same_tensors(federation, tmp_path):
    settings = federation.settings({"name": "fedot", "rounds": 4, "rate": 2e-3})
    out = tmp_path / "run"
    going = Running(federation, settings, out)
    wait_for(lambda: len(lines(out)) == 2)
    os.killpg(federation.link.child.pid, signal.SIGKILL)
    before = (out / "rounds.jsonl").read_bytes()
    federation.link.child.wait()
    federation.link = superlink(federation.kit)
    federation.running.append(federation.link)
    result = run(federation.kit, settings, out)
    going.join(60)
    assert (out / "rounds.jsonl").read_bytes().startswith(before)
    alone = execute(replace(settings, engine="single"), tmp_path / "alone")
    ours, theirs = (
        read_tensors(one.folder / "jobs/0-all.safetensors")[0] for one in (result, alone)
    )
    assert tensors.difference({"": ours["shared/head"]}, {"": theirs["shared/head"]}) < 1e-6
    assert torch.isfinite(ours["shared/head"]).all()


def test_a_site_refuses_what_its_policy_forbids_and_says_why(federation, tmp_path):
    path = federation.place / "site-art" / "policy.toml"
    path.write_text(EXAMPLE.replace("methods = []", 'methods = ["fedavg"]'))
    try:
        out = tmp_path / "run"
        run(federation.kit, federation.settings({"name": "fedot", "rounds": 1}), out)
        assert sorted(lines(out)[0]["clients"]) == ["photo", "sketch"]
    finally:
        path.write_text(EXAMPLE)
    refused = Ledger(federation.place / "site-art").read().lines[-1]
    assert refused["direction"] == "refused" and "fedot is not allowed here" in refused["error"]


def test_an_unregistered_key_cannot_join(federation, tmp_path):
    kit = shutil.copytree(federation.place / "site-art", tmp_path / "site-art")
    private, public = key_pair()
    (kit / "key").write_bytes(private)
    (kit / "key.pub").write_bytes(public)
    stranger = start_site(kit)
    try:
        stranger.child.wait(120)
    finally:
        stranger.stop()
    assert "site art cannot join" in stranger.tail(20) and "its key is not known" in stranger.tail(
        20
    )


def test_plain_http_gets_no_answer_from_the_server(federation):
    host, _, port = federation.kit.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as stream:
        stream.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            said = stream.recv(100)
        except ConnectionError:
            said = b""
    assert not said.startswith(b"HTTP/1.1 200")


def test_below_the_quorum_the_run_stops_and_names_the_missing(federation, tmp_path):
    federation.rules(wait=3.0, deadline=12.0)
    for name in ("photo", "sketch"):
        federation.sites[name].stop()
    with pytest.raises(FederationError, match="1 of 3 clients answered, and 2 must") as error:
        run(federation.kit, federation.settings({"name": "fedavg", "rounds": 1}), tmp_path / "run")
    assert "photo: it is not connected" in str(error.value)
    assert json.loads((federation.place / "server" / "request.json").read_text())["out"]
