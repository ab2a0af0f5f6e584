"""However a run ends, whoever waits for it is told, and nobody else."""

import pytest

from fedvlm.deploy import events
from fedvlm.deploy.server import FAILED, REQUEST, STOPPED, conduct
from fedvlm.engines.flower.local import local_grid
from fedvlm.storage.sealed import write_json


def request(place, **more):
    words = {"out": str(place.folder / "run"), "identity": place.settings().identity()}
    write_json(place.kit.folder / REQUEST, {**words, **more})


def ending(place, error):
    """A grid that ends the ServerApp as it sends the first round, as a signal does."""
    grid = local_grid(place.desks)
    push = grid.push_messages

    def end(messages):
        if any(one.metadata.message_type == "train" for one in messages):
            raise error
        return push(messages)

    grid.push_messages = end
    return grid


@pytest.mark.parametrize("signal", [SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_a_run_that_is_ended_by_a_signal_says_so(place, signal):
    request(place)
    with pytest.raises(type(signal)):
        conduct(ending(place, signal), place.kit.folder)
    assert (place.kit.folder / FAILED).read_text() == STOPPED
    assert events.read(place.kit.folder)[-1] | {"time": ""} == {
        "time": "",
        "kind": "failed",
        "why": STOPPED,
    }
    conduct(local_grid(place.desks), place.kit.folder)  # and it goes on from there
    assert events.read(place.kit.folder)[-1]["kind"] == "ended"


def test_the_end_of_an_older_run_is_not_told_to_whoever_waits_for_a_newer_one(place):
    request(place, id="1")

    class Ends(Exception):
        pass

    grid = ending(place, Ends())
    push = grid.push_messages

    def asked_anew(messages):
        request(place, id="2")
        return push(messages)

    grid.push_messages = asked_anew
    with pytest.raises(Ends):
        conduct(grid, place.kit.folder)
    assert not (place.kit.folder / FAILED).exists()
