"""Every experiment runs on a small copy of its data, laid out as the real ones, with all its rows.

The demo's encoder takes the place of CLIP. Every row of every file gets as far as its clients and
its method's first state. One row of every method is also trained for a round, once for all files
of the same data, protocol and clients, and the last row of every file.
"""

import json
from dataclasses import fields, replace
from functools import cache
from itertools import count
from math import isfinite

import pytest
from plain_rows import make_rows
from small_copies import small_copy, small_store

from fedvlm.runner.experiments import runs
from fedvlm.runner.load import few, load, thin
from fedvlm.runner.named import experiments
from fedvlm.runner.prepare import check_rows, prepare
from fedvlm.runner.run import execute
from fedvlm.runner.settings import Settings, build, read_toml

FILES = experiments()
NUMBERS = count()
RAN: set[tuple[str, ...]] = set()  # what another file has run: data, protocol, clients, method


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("small")


@cache
def loaded(data: str, encoder: str, root: str, extra: str, tower: bool):
    """The rows of a small copy with all that methods need of them, once for all files."""
    source = json.loads(extra) | ({"root": root, "check": False} if root else {})
    values = {"data": data, "encoder": encoder, "source": source, "smoke": True}

    def rows(method: str):
        return load(build({**values, "method": method}), lambda *_: None)[0]

    if encoder.startswith("store"):
        return rows("fedavg")
    found = rows("fedotp")
    if not tower:
        return found
    other = rows("vpt")
    return replace(found, images=other.images, image_tower=other.image_tower)


def needed(rows, needs):
    """As a run loads them: with what its method needs, and no more."""
    if "image tower" not in needs:
        rows = replace(rows, images=None, image_tower=None)
    if "patches" not in needs:
        rows = replace(rows, patches=None)
    return rows if "text tower" in needs else replace(rows, text_tower=None)


def small(name: str, place) -> list[tuple[Settings, object]]:
    """The rows of an experiment as settings, with the embedded rows they run on."""
    out, every = [], runs(read_toml(FILES[name]))
    tower = any("image tower" in build(one).method.traits.needs for one in every)
    for values in every:
        source = dict(values.get("source", {}))
        encoder = "demo"
        root = source.pop("root", "")
        if values["encoder"].startswith("store:"):
            path = small_store(place, values["encoder"].removeprefix("store:"))
            encoder = f"store:{path}"
        elif root:
            root = str(small_copy(place, values["data"], root))
        rows = loaded(values.get("data", "demo"), encoder, root, json.dumps(source), tower)
        settings = build({**values, "encoder": "demo", "smoke": True, "source": {}})
        most = {"blocks": rows.x.shape[1], "depth": 3}  # of the demo's encoder
        own = {one.name for one in fields(settings.method)} & most.keys()
        sizes = {key: getattr(settings.method, key) for key in own}
        cut = {key: min(n, most[key]) for key, n in sizes.items() if isinstance(n, int)}
        if getattr(settings.method, "ctx_init", "") == "random":
            cut["n_ctx"] = 12 if hasattr(settings.method, "local_vectors") else 4
        method = replace(settings.method, **cut)
        out.append(thin(replace(settings, method=method), needed(rows, method.traits.needs)))
    return out


@pytest.mark.parametrize("name", FILES)
def test_every_row_of_an_experiment_has_its_clients_and_its_first_state(name, place):
    known = {}  # rows with the same clients are dealt once
    for settings, rows in small(name, place):
        check_rows(settings, rows)
        key = (settings.clients, settings.target)
        if key not in known:
            known[key] = prepare(settings, rows, settings.seeds[0])
        ready = replace(known[key], settings=settings)
        ready.check()
        assert ready.trainings
        for training in ready.trainings:
            assert training.train


# towers, and the largest federations: by hand, in `make test-long`
HEAVY = ("tofa-vitb16-", "tower-demo", "office-home", "modern-office", "fedotp-food101")
HEAVY += ("fedotp-rounds-",)  # rows of fedotp-DATA, with other numbers of rounds
WHEN = [
    pytest.param(name, marks=[pytest.mark.slow, *[pytest.mark.long] * name.startswith(HEAVY)])
    for name in FILES
]


@pytest.mark.parametrize("name", WHEN)
def test_an_experiment_runs(name, place):
    every = small(name, place)
    for number, (settings, rows) in enumerate(every, start=1):
        method = settings.method
        data = "" if "image tower" in method.traits.needs else rows.name
        key = (data, settings.protocol, settings.clients.partition, method.name)
        if key in RAN and number < len(every):  # the last row is run in any case
            continue
        RAN.add(key)
        short = {"rounds": min(2 if method.name == "auto" else 1, method.rounds), "local_epochs": 1}
        mine = {one.name for one in fields(method)} & short.keys()
        method = replace(method, **{key: short[key] for key in mine})
        done = execute(
            replace(settings, method=method, descriptions="", texts="", engine="single"),
            place / f"run-{next(NUMBERS)}",
            embedded=rows,
        )
        (table,) = done.tables
        assert any(value is not None for value in table.values())
        assert all(value is None or isfinite(value) for value in table.values())


def test_a_small_sample_keeps_every_class_where_classes_take_turns():
    table = make_rows(1000, classes=10, domains=1)  # a step of two would meet five of ten
    kept = few(table)
    assert set(table.labels[kept]) == set(range(10))
    assert len(set(kept)) == len(kept) < 1000
