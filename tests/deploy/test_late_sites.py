"""Sites that come late, come back changed, or are nobody's."""

from dataclasses import replace

import numpy as np
import pytest

from fedvlm.channel.settings import with_deployment_bound
from fedvlm.deploy.server.launch import describe_absences
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.sequential import Sequential
from fedvlm.errors import FederationError
from fedvlm.maths.privacy import epsilon
from fedvlm.result import Result
from fedvlm.storage.files import read_tensors
from fedvlm.tensors import max_relative_difference

NAMES = ["art", "photo", "sketch"]


def at_round(grid, number, act):
    """Calls `act` before the messages of a round are sent."""
    push = grid.push_messages

    def watch(messages):
        messages = list(messages)
        about = messages[0].metadata
        if about.group_id == str(number) and about.message_type == "train":
            act()
        return push(messages)

    grid.push_messages = watch
    return grid


def test_a_site_whose_people_consent_later_is_let_in_later(place, monkeypatch):
    monkeypatch.setattr("fedvlm.deploy.server.engine.RETRY_SECONDS", 0.0)
    place.asks_for_consent("art")
    grid = at_round(local_grid(place.desks), 0, lambda: place.consents("art"))
    rounds = place.run(grid=grid).rounds
    assert "nobody at this site has consented" in rounds[0]["missing"]["art"]
    assert [sorted(line["clients"]) for line in rounds] == [NAMES[1:], NAMES, NAMES]
    [warning] = describe_absences(Result(place.folder / "run"))
    assert warning.startswith("art was missing in 1 of 3 rounds; the last reason: refused by")


@pytest.mark.parametrize("late_site", ["art", "sketch"])
def test_a_site_that_comes_later_with_another_encoder_is_left_out_by_name(place, monkeypatch, late_site):
    monkeypatch.setattr("fedvlm.deploy.server.engine.RETRY_SECONDS", 0.0)
    place.change(late_site, encoder=np.array("toy@1"))
    place.asks_for_consent(late_site)
    grid = at_round(local_grid(place.desks), 0, lambda: place.consents(late_site))
    rounds = place.run(grid=grid).rounds
    assert all(sorted([*line["clients"], late_site]) == NAMES for line in rounds)
    assert all("do not have the same encoder" in line["missing"][late_site] for line in rounds[1:])


def test_a_site_cannot_go_on_with_another_encoder_than_it_began_with(place):
    """Its own `local` tensors are of the first one, also if all sites have changed."""
    grid = at_round(local_grid(place.desks), 1, stop)
    with pytest.raises(KeyboardInterrupt):
        place.run(grid=grid)
    for name in NAMES:
        place.change(name, encoder=np.array("toy@1"))
    with pytest.raises(FederationError, match="began this training with another encoder"):
        place.run()


def stop():
    raise KeyboardInterrupt


def test_a_node_that_is_nobodys_and_never_answers_does_not_hold_a_run_up(place, monkeypatch):
    grid = local_grid({**place.desks, "ghost": place.desks["art"]})
    pull, ghost = grid.pull_messages, grid.nodes["ghost"]
    grid.pull_messages = lambda ids: [reply for reply in pull(ids) if reply.metadata.src_node_id != ghost]

    def waits(seconds):
        raise AssertionError("the server waits for a node that is no site's")

    monkeypatch.setattr("fedvlm.engines.flower.messages.sleep", waits)
    assert all(sorted(line["clients"]) == NAMES for line in place.run(grid=grid).rounds)


def held_back(grid, name, number):
    """The site answers the round, but its answer comes when the time is over."""
    pull, node = grid.pull_messages, grid.nodes[name]

    def pulled(ids):
        return [
            reply for reply in pull(ids) if reply.metadata.src_node_id != node or reply.metadata.group_id != str(number)
        ]

    grid.pull_messages = pulled
    return grid


def test_a_straggler_past_the_deadline_is_missing_by_name_and_goes_on_in_the_next_round(place, monkeypatch):
    """It has trained, and its next round starts from where the server says, not from there."""
    place.rules(deadline=0.0, quorum=0.6)
    settings = place.settings({"name": "fedot", "rounds": 4, "lr": 1e-3})
    delayed = place.run(settings, grid=held_back(local_grid(place.desks), "photo", 1))
    lines = delayed.rounds
    assert [sorted(line.get("missing", {})) for line in lines] == [[], ["photo"], [], []]
    assert lines[1]["missing"]["photo"] == "it did not answer within 0 s"
    plain_round = Sequential.round

    def without(self, number, tasks):
        return plain_round(self, number, [task for task in tasks if task.id in lines[number]["clients"]])

    monkeypatch.setattr(Sequential, "round", without)
    settings = replace(settings, channel=with_deployment_bound(settings.channel, settings.method))
    alone = place.alone(settings)
    name = "trainings/0-all.safetensors"
    delayed_tensors, simulated_tensors = (read_tensors(result.folder / name)[0] for result in (delayed, alone))
    assert max_relative_difference(delayed_tensors, {key: simulated_tensors[key] for key in delayed_tensors}) < 1e-5


def test_what_a_straggler_has_released_counts_though_it_came_too_late(place):
    place.rules(deadline=0.0, quorum=0.6)
    noise = {"clip": 0.1, "noise_multiplier": 2.0}
    settings = place.settings({"name": "fedavg", "rounds": 3, "lr": 1e-3}, channel=noise)
    delayed = place.run(settings, grid=held_back(local_grid(place.desks), "photo", 1))
    assert list(delayed.rounds[1]["missing"]) == ["photo"]
    assert delayed.rounds[2]["epsilon"] == pytest.approx(epsilon(2.0, 3), rel=1e-3)


def test_too_many_stragglers_stop_the_run_and_it_goes_on_when_they_are_quick(place):
    place.rules(deadline=0.0, quorum=0.6)
    grid = held_back(held_back(local_grid(place.desks), "photo", 1), "art", 1)
    with pytest.raises(FederationError, match="round 1: 1 of 3 clients answered, and 2 must") as e:
        place.run(grid=grid)
    assert "photo: it did not answer within 0 s" in str(e.value)
    assert [sorted(line["clients"]) for line in place.run().rounds] == [NAMES] * 3
