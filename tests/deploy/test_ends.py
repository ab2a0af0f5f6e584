"""However a run ends, whoever waits for it is told, and nobody else."""

import os
from types import SimpleNamespace

import pytest

from fedvlm.deploy.flower import processes
from fedvlm.deploy.operations import events
from fedvlm.deploy.server import launch
from fedvlm.deploy.server.run import ERROR_FILE, RUN_REQUEST_FILE, STOPPED_MESSAGE, run_request
from fedvlm.engines.flower.engine import local_grid
from fedvlm.errors import FederationError, SettingsError
from fedvlm.storage.files import write_json


def request(place, **overrides):
    words = {"out": str(place.folder / "run"), "identity": place.settings().identity()}
    write_json(place.kit.folder / RUN_REQUEST_FILE, {**words, **overrides})


def ending(place, error):
    """A grid that ends the ServerApp as it sends the first round, as a signal does."""
    grid = local_grid(place.desks)
    push = grid.push_messages

    def end(messages):
        if any(message.metadata.message_type == "train" for message in messages):
            raise error
        return push(messages)

    grid.push_messages = end
    return grid


@pytest.mark.parametrize("signal", [SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_a_run_that_is_ended_by_a_signal_says_so(place, signal):
    request(place)
    with pytest.raises(type(signal)):
        run_request(ending(place, signal), place.kit.folder)
    assert (place.kit.folder / ERROR_FILE).read_text() == STOPPED_MESSAGE
    assert events.read_events(place.kit.folder)[-1] | {"time": ""} == {
        "time": "",
        "kind": "failed",
        "why": STOPPED_MESSAGE,
    }
    run_request(local_grid(place.desks), place.kit.folder)  # and it goes on from there
    assert events.read_events(place.kit.folder)[-1]["kind"] == "ended"


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
        run_request(grid, place.kit.folder, "1")
    assert not (place.kit.folder / ERROR_FILE).exists()


def test_a_process_that_begins_late_does_not_take_up_what_was_asked_for_since(place):
    """Two would work at one run, and the second would fail and end the wait for it."""
    request(place, id="2")
    with pytest.raises(FederationError, match="another run was requested before this one started"):
        run_request(local_grid(place.desks), place.kit.folder, "1")
    assert not (place.kit.folder / ERROR_FILE).exists() and not (place.folder / "run").exists()


def following(monkeypatch, kit, answers, *states):
    """How a waiting command ends that finds these states of its run."""
    found = list(states)
    monkeypatch.setattr(launch, "STATUS_INTERVAL_SECONDS", -1.0)
    monkeypatch.setattr(launch, "sleep", lambda seconds: None)
    monkeypatch.setattr(launch.processes, "is_server_up", lambda kit: answers.pop(0))
    monkeypatch.setattr(launch, "run_states", lambda kit: {"7": state} if (state := found.pop(0)) else {})
    with pytest.raises(FederationError) as error:
        launch.wait_for_run(kit, "7", lambda: False, lambda: None)
    assert found == []
    return str(error.value)


def test_a_server_that_went_away_is_named_to_whoever_waits(monkeypatch, place):
    error = following(monkeypatch, place.kit, [True, False], "running", "running")
    assert "no longer answers; start it: fedvlm deploy server" in error


def test_a_run_that_ends_without_a_result_is_told(monkeypatch, place):
    error = following(monkeypatch, place.kit, [True] * 3, "", "running", "ended", "ended")
    assert "ended without a result; repeat the command" in error


def test_a_run_that_a_server_has_forgotten_is_ended(monkeypatch, place):
    """It was started again."""
    assert "was started again; repeat the command" in following(monkeypatch, place.kit, [True], "running", "")


def test_the_signal_that_ended_a_process_is_named(tmp_path):
    process = processes.Process("one", ["sleep", "60"], tmp_path / "log", {"PATH": os.environ["PATH"]})
    process.child.kill()
    process.child.wait(60)
    assert "ended, by SIGKILL; start" in processes.describe_exit(process)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("sqlite3.DatabaseError) file is not a database", "superlink.db is damaged: move it away"),
        ("sqlite3.OperationalError) disk I/O error", "check the disk, and start the server"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_with_the_remedy(tmp_path, error, remedy):
    ended = SimpleNamespace(poll=lambda: 1)
    process = SimpleNamespace(child=ended, log=tmp_path / "superlink.log", tail=lambda: f"x ({error}\n")
    assert remedy in processes.describe_exit(process)


@pytest.mark.parametrize("content", [None, b"", b"rubbish"], ids=["missing", "empty", "rubbish"])
def test_a_folder_without_its_certificate_says_so(place, content):
    path = place.kit.folder / "ca.crt"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"ca\.crt is missing or not a certificate"):
        processes.is_server_up(place.kit)
