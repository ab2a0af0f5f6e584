"""A federation of three sites without their processes, for tests that look at every message."""

from dataclasses import replace

import numpy as np
import pytest

from fedvlm.deploy.kits import init, keep_site, read_server, read_site
from fedvlm.deploy.policy import EXAMPLE
from fedvlm.deploy.server import Run, ready
from fedvlm.deploy.site import Site
from fedvlm.engines.flower_local import local_grid
from fedvlm.record import Record
from fedvlm.result import Result
from fedvlm.runner import execute
from fedvlm.settings import build

NAMES = ["art", "photo", "sketch"]
CLASSES = ["ant", "bee", "cat", "dog"]
METHOD = {"name": "fedot", "rounds": 3, "rate": 1e-3}


def store(path, rows, keep, **other):
    columns = {
        "x": rows.x[keep].numpy(),
        "y": rows.labels[keep],
        "classes": np.array(rows.classes),
        "content": np.array([rows.content[i] for i in np.flatnonzero(keep)]),
        "text": rows.text.numpy(),
        "scale": np.array(rows.scale),
        "encoder": np.array("toy@0"),
    }
    np.savez(path, **{**columns, **other})
    return path


class Place:
    """Kits of three sites whose rows are the domains of the toy data, in stores."""

    def __init__(self, folder, rows):
        self.folder, self.rows = folder, rows
        init(folder / "kits", NAMES, "127.0.0.1", 8443, deadline=60.0, wait=0.0)
        self.kit = read_server(folder / "kits" / "server")
        for name in NAMES:
            self.give(name, store(folder / f"{name}.npz", rows, rows.domains == name))
        self.desks = {name: Site(read_site(self.site(name))) for name in NAMES}

    def site(self, name):
        return self.folder / "kits" / f"site-{name}"

    def give(self, name, path):
        keep_site(read_site(self.site(name)), {"encoder": f"store:{path}"})

    def rules(self, **values):
        self.kit = replace(self.kit, **values)

    def settings(self, method=METHOD, **more):
        source = {"classes": CLASSES}
        return build({"method": method, "protocol": "own-test", "source": source, **more})

    def run(self, settings=None, out="run", grid=None):
        settings = settings or self.settings()
        ready(self.kit, settings)
        record = Record(self.folder / out)
        grid = grid or local_grid(self.desks)
        Run(grid, self.kit, settings, record, lambda *words: None).all()
        return Result(record.folder)

    def change(self, name, keep=True, **columns):
        """Another store for a site, from its next process on."""
        keep = (self.rows.domains == name) & keep
        self.give(name, store(self.folder / f"other-{name}.npz", self.rows, keep, **columns))
        self.desks[name] = Site(read_site(self.site(name)))

    def asks_for_consent(self, name):
        text = EXAMPLE.replace("consent = false", "consent = true")
        (self.site(name) / "policy.toml").write_text(text)

    def alone(self, settings=None):
        settings = settings or self.settings()
        return execute(
            replace(settings, engine="single", source={}), self.folder / "alone", embedded=self.rows
        )


@pytest.fixture
def place(tmp_path, rows):
    return Place(tmp_path, rows)
