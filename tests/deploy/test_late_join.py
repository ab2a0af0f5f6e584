"""A site that comes after the last round gets its classifier alone."""

import numpy as np
import pytest

from fedvlm.classifier.personalised import Personalised
from fedvlm.deploy.operations.events import EventLog, read_events
from fedvlm.deploy.operations.status import status
from fedvlm.deploy.server.run import join_late
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.policy import example_policy
from fedvlm.engines.flower.engine import local_grid
from fedvlm.errors import FederationError, FedVLMError, SettingsError
from fedvlm.result import Result
from fedvlm.tensors import max_relative_difference

TOFA = {"name": "tofa"}


def ran(place, method=TOFA, late_site="sketch"):
    """A run without one site; the grid on which it comes later."""
    settings = place.settings(method, allow_small=True)
    handler = place.desks.pop(late_site)
    place.run(settings, "kits/server/runs/one")
    place.desks[late_site] = handler
    return local_grid(place.desks)


def join_site(place, grid, site="sketch", run="one"):
    log_event = EventLog(place.kit.folder)
    return join_late(grid, place.kit, place.kit.folder / "runs" / run, site, log_event)


@pytest.mark.parametrize("method", [TOFA, {"name": "fedot", "rounds": 2}], ids=["tofa", "fedot"])
def test_a_late_site_has_the_classifier_that_the_record_gives_a_newcomer(place, method):
    grid = ran(place, method)
    heads = {name: len(Ledger(place.site(name)).read().lines) for name in ("art", "photo")}
    scores = join_site(place, grid)
    [place_of] = (place.site("sketch") / "classifiers").iterdir()
    classifier = Personalised.from_pretrained(place_of)
    record = Result(place.kit.folder / "runs" / "one")
    assert max_relative_difference(classifier.shared, record.outcome("all")[0]) == 0
    world = next(iter(place.desks["sketch"].handler.trainings.values())).world
    rows = world.members["sketch"].test
    predicted = (classifier.method.predict(world.frozen, classifier.shared, classifier.local, world.x[rows])).argmax(1)
    assert int((predicted == world.y[rows]).sum()) == scores["0-all"]["test_hits"]
    if method is TOFA:
        assert classifier.local["weight change"].abs().max() > 0  # made of its own rows
    # the others are sent nothing, and their ledgers do not grow
    for name, lines in heads.items():
        assert len(Ledger(place.site(name)).read().lines) == lines
    [line] = Ledger(place.kit.folder).read().lines
    assert (line["kind"], line["site"]) == ("join", "sketch")
    kinds = [
        (ledger_line["kind"], ledger_line["direction"]) for ledger_line in Ledger(place.site("sketch")).read().lines
    ]
    assert kinds == [("open", "in"), ("open", "out"), ("adapt", "in"), ("adapt", "out")]


def test_a_late_site_uploads_nothing(place):
    grid = ran(place)
    join_site(place, grid)
    out = [line for line in Ledger(place.site("sketch")).read().lines if line["direction"] == "out"]
    assert out[-1]["fields"] == {} and out[-1]["costs"] == "measurement"


def test_no_run_begins_when_a_site_joins_late(place):
    grid = ran(place)
    before = status(place.kit.folder)
    join_site(place, grid)
    assert status(place.kit.folder)["run"] == before["run"]
    assert [event["site"] for event in read_events(place.kit.folder) if event["kind"] == "joined"] == ["sketch"]


def test_the_policy_of_a_late_site_is_in_force(place):
    grid = ran(place)
    (place.site("sketch") / "policy.toml").write_text(example_policy(("fedavg",), plain=True))
    with pytest.raises(FederationError, match="the method is not allowed here"):
        join_site(place, grid)
    assert not (place.site("sketch") / "classifiers").exists()


def test_a_late_site_with_another_encoder_is_refused(place):
    ran(place)
    place.change("sketch", encoder=np.array("toy@1"))
    with pytest.raises(FederationError, match="sketch cannot join.*the same encoder"):
        join_site(place, local_grid(place.desks))


def test_a_site_that_was_killed_before_the_end_goes_on_from_its_own_tensors(place):
    """TOFA weighs a site's rows otherwise if the prior has them, too."""
    settings = place.settings(TOFA, allow_small=True)
    grid = local_grid(place.desks)
    push, nodes = grid.push_messages, grid.nodes

    def lost(messages):
        messages_kept = [m for m in messages if m.metadata.dst_node_id != nodes["sketch"] or not adapts(m)]
        return push(messages_kept) + [None] * (len(messages) - len(messages_kept))

    def adapts(message):
        return message.metadata.group_id == "1"

    grid.push_messages = lost
    uninterrupted = place.run(settings, "kits/server/runs/whole")
    place.rules(quorum=0.5)
    result = place.run(settings, "kits/server/runs/one", grid)
    assert "sketch" in uninterrupted.trainings()["all"]["scores"]
    assert "sketch" not in result.trainings()["all"]["scores"]
    scores = join_site(place, local_grid(place.desks))
    expected = uninterrupted.trainings()["all"]["scores"]["sketch"]
    assert scores["0-all"]["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("site", "run", "error"),
    [
        ("nobody", "one", "no certificate"),
        ("sketch", "none", "not a finished run"),
    ],
)
def test_a_mistake_is_said(place, site, run, error):
    grid = ran(place)
    with pytest.raises(SettingsError, match=error):
        join_site(place, grid, site, run)


def test_a_site_that_is_not_there_is_named(place):
    ran(place)
    place.desks.pop("sketch")
    with pytest.raises(FedVLMError, match="sketch: it is not connected"):
        join_site(place, local_grid(place.desks))
