"""Federations of three sites: one without processes, to look at every message, and a real one."""

import os
import signal
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Thread
from time import monotonic, sleep

import numpy as np
import pytest
from PIL import Image

from fedvlm.deploy.flower.processes import start_superlink
from fedvlm.deploy.kits import create_kits, read_server, read_site, write_site
from fedvlm.deploy.operations.events import EventLog, round_logger
from fedvlm.deploy.server.launch import prepare_rehearsal, run_over_sites, running_processes, start_site
from fedvlm.deploy.server.run import DeployedRun, check_deployable
from fedvlm.deploy.site.consent import accept_request, waiting_requests
from fedvlm.deploy.site.people import Person
from fedvlm.deploy.site.policy import example_policy
from fedvlm.deploy.site.service import Site
from fedvlm.engines.flower.engine import local_grid
from fedvlm.errors import FederationError
from fedvlm.record import Record
from fedvlm.result import Result
from fedvlm.runner.settings import build
from tests.helpers.browser import chrome  # noqa: F401
from tests.helpers.running import execute

NAMES = ["art", "photo", "sketch"]
CLASSES = ["ant", "bee", "cat", "dog"]
METHOD = {"name": "fedot", "rounds": 3, "lr": 1e-3}


def store(path, rows, keep, **options):
    columns = {
        "x": rows.x[keep].numpy(),
        "y": rows.labels[keep],
        "classes": np.array(rows.classes),
        "content": np.array([rows.content[i] for i in np.flatnonzero(keep)]),
        "text": rows.text.numpy(),
        "scale": np.array(rows.scale),
        "encoder": np.array("toy@0"),
    }
    np.savez(path, **{**columns, **options})
    return path


class Place:
    """Kits of three sites whose rows are the domains of the toy data, in stores."""

    def __init__(self, folder, rows):
        self.folder, self.rows = folder, rows
        create_kits(folder / "kits", NAMES, "127.0.0.1", 8443, deadline=60.0, wait=0.0, plain=True)
        self.kit = read_server(folder / "kits" / "server")
        for name in NAMES:
            self.set_data(name, store(folder / f"{name}.npz", rows, rows.domains == name))
        self.desks = {name: Site(read_site(self.site(name))) for name in NAMES}

    def site(self, name):
        return self.folder / "kits" / f"site-{name}"

    def set_data(self, name, path):
        write_site(replace(read_site(self.site(name)), encoder=f"store:{path}"))

    def rules(self, **values):
        self.kit = replace(self.kit, **values)

    def settings(self, method=METHOD, **overrides):
        statement = {"purpose": "a test of consent", "contact": "tests@example.org"}
        common = {"protocol": "own-test", "source": {"classes": CLASSES}, **statement}
        return build({"method": method, **common, **overrides})

    def run(self, settings=None, out="run", grid=None):
        settings = settings or self.settings()
        check_deployable(self.kit, settings)
        log_event = EventLog(self.kit.folder)
        record = Record(self.folder / out, round_logger(log_event, settings.method.rounds))
        grid = grid or local_grid(self.desks)
        DeployedRun(grid, self.kit, settings, record, lambda *words: None, log_event=log_event).run_all()
        return Result(record.folder)

    def change(self, name, keep=True, **columns):
        """Another store for a site, from its next process on."""
        keep = (self.rows.domains == name) & keep
        self.set_data(name, store(self.folder / f"other-{name}.npz", self.rows, keep, **columns))
        self.desks[name] = Site(read_site(self.site(name)))

    def asks_for_consent(self, name, approvers=1):
        text = example_policy(plain=True).replace("consent = false", "consent = true")
        text = text.replace("approvers = 1", f"approvers = {approvers}")
        (self.site(name) / "policy.toml").write_text(text)

    def consents(self, name, days=1.0):
        """Accepts every request that waits at a site."""
        for request in waiting_requests(self.site(name)):
            accept_request(self.site(name), Person("A. Person", "approver"), request.plan, days)

    def alone(self, settings=None, out="alone"):
        settings = settings or self.settings()
        return execute(replace(settings, engine="single", source={}), self.folder / out, embedded=self.rows)


@pytest.fixture
def place(tmp_path, rows):
    return Place(tmp_path, rows)


@pytest.fixture(scope="session")
def place_of():
    return Place


class Federation:
    """A SuperLink, and three sites that play the domains of one small folder of images."""

    def __init__(self, place, data, running):
        self.place, self.data, self.running = place, data, running
        rules = {"quorum": 0.6, "deadline": 240.0, "wait": 240.0}
        self.kit = prepare_rehearsal(self.settings({"name": "fedot"}), place, lambda *words: None, **rules)
        self.start_link()
        started = monotonic()
        self.sites = {name: self.start(name) for name in NAMES}
        for name in NAMES:
            self.wait_for(name)
        self.joining = monotonic() - started  # seconds three sites take on this machine

    def settings(self, method, **overrides):
        settings_table = {"data": str(self.data), "encoder": "demo", "protocol": "own-test"}
        return build({**settings_table, "method": method, **overrides})

    def site(self, name):
        return self.place / f"site-{name}"

    def start_link(self):
        self.link = start_superlink(self.kit)
        self.running.append(self.link)

    def start(self, name):
        self.running.append(start_site(self.site(name)))
        return self.running[-1]

    def joined(self, name):
        """When the server has let a site in the last time."""
        node_file = self.site(name) / ".node"
        return node_file.stat().st_mtime_ns if node_file.exists() else 0

    def wait_for(self, name, since=0, seconds=120.0):
        end = monotonic() + seconds
        while self.joined(name) <= since:
            assert self.sites[name].alive and monotonic() < end, self.sites[name].tail()
            sleep(0.05)

    @contextmanager
    def busy(self, name):
        """Keeps a site at work: it waits for its policy, which somebody has yet to write into a pipe."""
        policy = self.site(name) / "policy.toml"
        text = policy.read_bytes()
        policy.unlink()
        os.mkfifo(policy)

        def await_reader(seconds=120.0):
            end = monotonic() + seconds
            while monotonic() < end:
                with suppress(OSError):  # nobody reads yet
                    pipe = os.open(policy, os.O_WRONLY | os.O_NONBLOCK)
                    pipes.append(pipe)
                    return
                sleep(0.02)
            raise AssertionError(f"{name} took no request")

        pipes = []
        try:
            yield await_reader
        finally:
            policy.unlink()
            policy.write_bytes(text)
            for pipe in pipes:
                with suppress(OSError):  # its reader was killed
                    os.write(pipe, text)
                os.close(pipe)

    def restart(self, name):
        """Kills a site and starts it again, and waits until it is back."""
        since = self.joined(name)
        self.kill(self.sites[name])
        self.sites[name] = self.start(name)
        self.wait_for(name, since)

    def kill(self, process):
        os.killpg(process.child.pid, signal.SIGKILL)
        process.child.wait()

    def rules(self, **values):
        """Other rules, from the next run on."""
        path = self.place / "server" / "server.toml"
        lines = [line for line in path.read_text().splitlines() if line.split(" ")[0] not in values]
        lines += [f"{key} = {value}" for key, value in values.items()]
        path.write_text("\n".join(lines) + "\n")
        self.kit = read_server(self.place / "server")


class BackgroundRun(Thread):
    """A run in the background, so that a test can disturb it."""

    def __init__(self, federation, settings, out):
        super().__init__(daemon=True)
        self.all, self.error, self.result = (federation.kit, settings, out), None, None
        self.start()

    def run(self):
        try:
            self.result = run_over_sites(*self.all)
        except FederationError as error:
            self.error = error

    def lines(self):
        return Record(self.all[2]).lines()

    def wait_for(self, condition, seconds=300.0):
        """The lines of the rounds so far, once `what` holds of them."""
        end = monotonic() + seconds
        while not condition(lines := self.lines()):
            assert self.is_alive() and monotonic() < end, (self.error, lines)
            sleep(0.05)
        return lines


def images(root):
    """DOMAIN/CLASS/PICTURE: a class is a colour, a domain a brightness, and all differ a little."""
    for d, domain in enumerate(NAMES):
        for c, name in enumerate(CLASSES):
            for row in range(10):
                colour = [20 + 40 * d + 3 * row] * 3
                colour[c % 3] += 90 + c
                path = root / domain / name / f"{row}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), tuple(colour)).save(path)
    return root


@pytest.fixture
def small_images(tmp_path):
    return images(tmp_path / "images")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    place = tmp_path_factory.mktemp("fed")
    with pytest.MonkeyPatch.context() as patch, running_processes() as running:
        # As every test has it; here before the first, because the sites' processes inherit it.
        patch.setenv("FEDVLM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        # As after `git clone`: a folder that Flower could take for its app.
        (place / "fedvlm").mkdir()
        (place / "fedvlm" / "pyproject.toml").write_text("[project]\nname = 'fedvlm'\n")
        patch.chdir(place)
        yield Federation(place / "kits", images(place / "images"), running)


@pytest.fixture
def start_run():
    return BackgroundRun
