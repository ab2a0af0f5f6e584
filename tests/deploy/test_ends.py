"""However a run ends, whoever waits for it is told, and nobody else."""

import os
from types import SimpleNamespace

import pytest

from fedvlm.deploy import events, follow
from fedvlm.deploy.flower import processes
from fedvlm.deploy.server import FAILED, REQUEST, STOPPED, conduct
from fedvlm.engines.flower.local import local_grid
from fedvlm.errors import FederationError, SettingsError
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
        conduct(grid, place.kit.folder, "1")
    assert not (place.kit.folder / FAILED).exists()


def test_a_process_that_begins_late_does_not_take_up_what_was_asked_for_since(place):
    """Two would work at one run, and the second would fail and end the wait for it."""
    request(place, id="2")
    with pytest.raises(FederationError, match="another run was asked for before this one began"):
        conduct(local_grid(place.desks), place.kit.folder, "1")
    assert not (place.kit.folder / FAILED).exists() and not (place.folder / "run").exists()


def following(monkeypatch, kit, answers, *lists):
    """How a waiting command ends that gets these answers from Flower's command line."""
    said = list(lists)
    monkeypatch.setattr(follow, "LOOK", -1.0)
    monkeypatch.setattr(follow, "sleep", lambda seconds: None)
    monkeypatch.setattr(follow, "answers", lambda kit: answers)
    monkeypatch.setattr(follow, "flwr", lambda kit, *words: said.pop(0))
    with pytest.raises(FederationError) as error:
        follow.follow(kit, "7", lambda: False, lambda: None)
    assert said == []
    return str(error.value)


RUNS, TROUBLE = {"runs": [{"status": "running"}]}, {"error-message": "timeout; is it running?"}


def test_a_server_that_went_away_is_named_to_whoever_waits(monkeypatch, place):
    told = following(monkeypatch, place.kit, False, RUNS, TROUBLE)
    assert "does not answer any more; start it: fedvlm deploy server" in told


def test_a_server_that_is_slow_for_once_is_not_taken_for_the_end_of_a_run(monkeypatch, place):
    lists = [RUNS, TROUBLE, TROUBLE, RUNS, {"runs": [{"status": "finished:failed"}]}]
    told = following(monkeypatch, place.kit, True, *lists)
    assert "ended without a result (finished:failed); run the same command again" in told


def test_a_server_that_never_says_how_a_run_is_is_not_asked_for_ever(monkeypatch, place):
    assert "is it running?" in following(monkeypatch, place.kit, True, *[TROUBLE] * follow.TRIES)


def test_a_run_that_a_server_has_forgotten_is_ended(monkeypatch, place):
    """Its database is a new one."""
    assert "(unknown)" in following(monkeypatch, place.kit, True, RUNS, {"runs": []})


def test_a_command_of_flower_that_never_ends_is_ended(monkeypatch, place):
    processes.connect(place.kit)
    monkeypatch.setattr(processes, "ANSWER", 0.01)
    assert "did not answer in 0.01 s" in processes.flwr(place.kit, "list")["error-message"]


def test_the_signal_that_ended_a_process_is_named(tmp_path):
    one = processes.Process("one", ["sleep", "60"], tmp_path / "log", {"PATH": os.environ["PATH"]})
    assert one.killed == ""
    one.child.kill()
    one.child.wait(60)
    assert one.killed == "SIGKILL" and "ended, by SIGKILL; start" in processes.ending(one)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("sqlite3.DatabaseError) file is not a database", "superlink.db is damaged: move it away"),
        ("sqlite3.OperationalError) disk I/O error", "look at the disk, and start the server"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_with_the_remedy(tmp_path, error, remedy):
    one = SimpleNamespace(killed="", log=tmp_path / "superlink.log", tail=lambda: f"x ({error}\n")
    assert remedy in processes.ending(one)


@pytest.mark.parametrize("content", [None, b"", b"rubbish"], ids=["missing", "empty", "rubbish"])
def test_a_folder_without_its_certificate_says_so(place, content):
    path = place.kit.folder / "ca.crt"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"ca\.crt is missing or no certificate"):
        processes.answers(place.kit)
