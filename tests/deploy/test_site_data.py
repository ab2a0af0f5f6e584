"""Sites describe their data before a training: sums of all, and of each site what its policy allows."""

import json

import numpy as np
import pytest
import torch

from fedvlm.deploy.operations.events import EventLog
from fedvlm.deploy.server.run import describe_sites
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.policy import example_policy
from fedvlm.engines.flower.engine import local_grid
from fedvlm.errors import FederationError
from fedvlm.report.data_report import distances_to_rest, report_of_sites, write_report
from tests.deploy.conftest import CLASSES, NAMES

RULES = {"art": {"plain": True}, "photo": {}, "sketch": {"plain": True, "scores": "none"}}


def set_policy(place, name, **rules):
    text = example_policy(("ridge",))
    for key, value in rules.items():
        [line] = [line for line in text.splitlines() if line.startswith(f"{key} = ")]
        text = text.replace(line, f"{key} = {json.dumps(value)}")
    (place.site(name) / "policy.toml").write_text(text)


def describe(place, **rules):
    for name in NAMES:
        set_policy(place, name, min_class_samples=4, **{**RULES[name], **rules.get(name, {})})
    settings = place.settings({"name": "ridge"}, channel={"verified": True}, allow_small=True)
    place.run(settings, "kits/server/runs/data")
    log_event = EventLog(place.kit.folder)
    return describe_sites(local_grid(place.desks), place.kit, place.kit.folder / "runs" / "data", log_event)


def worlds(place):
    return {name: next(iter(place.desks[name].handler.trainings.values())).world for name in NAMES}


def test_distances_at_a_site_are_those_of_the_pooled_samples(place):
    done, sums, counts, sizes = describe(place), {}, {}, {}
    for name, world in worlds(place).items():
        rows = world.members[name].train
        sums[name], sizes[name] = world.read(rows).double().sum(0), len(rows)
        counts[name] = np.bincount(world.y[torch.from_numpy(rows)], minlength=len(CLASSES))
    assert done["counts"] == sum(counts.values()).tolist() and done["members"] == [3] * 4
    expected = distances_to_rest("art", counts, sums, sizes)._asdict()
    assert {key: done["sites"]["art"][key] for key in expected} == pytest.approx(expected, rel=1e-4)
    exact, coarse = distances_to_rest("photo", counts, sums, sizes), done["sites"]["photo"]
    assert coarse["embeddings"] <= exact.embeddings < coarse["embeddings"] + 0.05
    assert coarse["by_chance"] - 0.05 < exact.by_chance <= coarse["by_chance"]


def test_each_site_tells_what_its_policy_allows(place, tmp_path):
    done = describe(place)
    art, photo = done["sites"]["art"], done["sites"]["photo"]
    assert done["sites"]["sketch"] == {}
    assert art["count 0"] > 0 and {"duplicates", "samples", "federated", "alone", "min_count"} <= art.keys()
    assert {"federated", "alone", "helps", "embeddings", "by_chance", "classes"} == photo.keys()
    assert all(round(20 * value, 9) % 1 == 0 for value in photo.values())
    report = report_of_sites(done, "toy@0", CLASSES)
    html = write_report(report, tmp_path / "page.html").read_text()
    assert html.count("only in the sum") == 2 and '<th scope="row">all</th>' in html and "http://" not in html
    for name in NAMES:
        last = Ledger(place.site(name)).read().lines[-1]
        assert (last["kind"], last["direction"], last["fields"]) == ("describe", "out", {})


def test_a_suppressed_class_and_what_would_reveal_it_stay_at_the_site(place):
    own = np.flatnonzero(place.rows.domains == "art")
    dogs = own[place.rows.labels[own] == 3]
    place.change("art", ~np.isin(np.arange(len(place.rows.labels)), dogs[5:]))
    done = describe(place)
    art = done["sites"]["art"]
    assert "count 3" not in art and "count 0" in art and "samples" not in art
    assert done["members"][3] == 2  # so its sum is not shown either
    assert report_of_sites(done, "toy@0", CLASSES).total[3] is None


def test_a_policy_that_does_not_name_ridge_describes_nothing(place):
    with pytest.raises(FederationError, match="the method is not allowed here"):
        describe(place, art={"methods": ["tofa"]})
