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

from fedvlm.runner.experiment_files import experiments, read_toml
from fedvlm.runner.experiments import experiment_runs, tune_where_possible
from fedvlm.runner.load import load, shrink_for_smoke, smoke_subset
from fedvlm.runner.prepare import check_samples, prepare
from fedvlm.runner.run import execute
from fedvlm.runner.settings import Settings, build
from tests.helpers.plain_rows import make_rows
from tests.helpers.small_copies import small_copy, small_store

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
    embedded = rows("fedotp")
    if not tower:
        return embedded
    image_samples = rows("vpt")
    return replace(embedded, images=image_samples.images, image_tower=image_samples.image_tower)


def restricted_to(rows, needs):
    """As a run loads them: with what its method needs, and no more."""
    if "image tower" not in needs:
        rows = replace(rows, images=None, image_tower=None)
    if "patches" not in needs:
        rows = replace(rows, patches=None)
    return rows if "text tower" in needs else replace(rows, text_tower=None)


def small(name: str, place) -> list[tuple[Settings, object]]:
    """The rows of an experiment as settings, with the embedded rows they run on."""
    out, run_values = [], experiment_runs(read_toml(FILES[name]))
    tower = any("image tower" in build(entry).method.traits.needs for entry in run_values)
    for values in run_values:
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
        largest = {"blocks": rows.x.shape[1], "depth": 3}  # of the demo's encoder
        limited_names = {entry.name for entry in fields(settings.method)} & largest.keys()
        sizes = {key: getattr(settings.method, key) for key in limited_names}
        cut = {key: min(n, largest[key]) for key, n in sizes.items() if isinstance(n, int)}
        if getattr(settings.method, "ctx_init", "") == "random":
            cut["n_ctx"] = 12 if hasattr(settings.method, "local_vectors") else 4
        method = replace(settings.method, **cut)
        out.append(shrink_for_smoke(replace(settings, method=method), restricted_to(rows, method.traits.needs)))
    runs = tune_where_possible([settings for settings, _ in out])
    return [(settings, rows) for settings, (_, rows) in zip(runs, out, strict=True)]


@pytest.mark.parametrize("name", FILES)
def test_every_row_of_an_experiment_has_its_clients_and_its_first_state(name, place):
    prepared_by_clients = {}  # rows with the same clients are dealt once
    for settings, rows in small(name, place):
        check_samples(settings, rows)
        key = (settings.clients, settings.target)
        if key not in prepared_by_clients:
            prepared_by_clients[key] = prepare(settings, rows, settings.seeds[0])
        ready = replace(prepared_by_clients[key], settings=settings)
        ready.check()
        assert ready.trainings
        for training in ready.trainings:
            assert training.train


# towers, and the largest federations: by hand, in `make test-long`
HEAVY = ("tofa-vitb16-", "tower-demo", "office-home", "modern-office", "fedotp-food101")
HEAVY += ("fedotp-rounds-",)  # rows of fedotp-DATA, with other numbers of rounds
WHEN = [pytest.param(name, marks=[pytest.mark.slow, *[pytest.mark.long] * name.startswith(HEAVY)]) for name in FILES]


@pytest.mark.parametrize("name", WHEN)
def test_an_experiment_runs(name, place):
    run_settings = small(name, place)
    for number, (settings, rows) in enumerate(run_settings, start=1):
        method = settings.method
        data = "" if "image tower" in method.traits.needs else rows.name
        key = (data, settings.protocol, settings.clients.partition, method.name)
        if key in RAN and number < len(run_settings):  # the last row is run in any case
            continue
        RAN.add(key)
        short = {"rounds": min(2 if method.name == "auto" else 1, method.rounds), "local_epochs": 1}
        shortened_names = {field.name for field in fields(method)} & short.keys()
        method = replace(method, **{key: short[key] for key in shortened_names})
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
    subset = smoke_subset(table)
    assert set(table.labels[subset]) == set(range(10))
    assert len(set(subset)) == len(subset) < 1000
