"""What people are told while a federation runs: words, status, doctor."""

import json
import os
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedvlm.cli import app
from fedvlm.core import make
from fedvlm.deploy.operations import events
from fedvlm.deploy.operations.events import EventLog, EventTail, format_event
from fedvlm.deploy.operations.status import check_folder, format_status, list_runs, status
from fedvlm.deploy.server.run import ERROR_FILE, RUN_REQUEST_FILE, run_request, with_rules
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.training import compare_with_alone
from fedvlm.engines.flower.engine import local_grid
from fedvlm.errors import FederationError, SettingsError
from fedvlm.storage.files import write_json
from fedvlm.testing import toy_world


def invoke(*words):
    return CliRunner().invoke(app, ["deploy", *map(str, words)])


def kinds(folder):
    return [event["kind"] for event in events.read_events(folder)]


def test_a_run_is_told_at_the_server_and_at_each_site(place):
    place.run()
    server = place.kit.folder
    assert kinds(server) == ["begun", *["connected"] * 3, *["round"] * 3]
    last = events.read_events(server)[-1]
    assert (last["round"], last["rounds"], last["answered"]) == (3, 3, 3)
    assert "round 3 of 3: 3 of 3 sites, accuracy so far " in format_event(last)
    at_site = place.site("art")
    assert kinds(at_site)[0] == "opened" and kinds(at_site)[-1] == "sent"
    assert {"gained", "classifier"} <= set(kinds(at_site))


def test_the_words_and_the_ledger_have_the_same_bytes(place):
    place.run()
    sizes = [event["bytes"] for event in events.read_events(place.site("art")) if event["kind"] == "sent"]
    lines = Ledger(place.site("art")).read().lines
    assert sizes and sizes == [event["bytes"] for event in lines if event["direction"] == "out"]


def test_a_site_learns_whether_it_gained(place):
    place.run()
    [gain] = [event for event in events.read_events(place.site("art")) if event["kind"] == "gained"]
    assert 0 <= gain["alone"] <= gain["samples"] and 0 <= gain["federated"] <= gain["samples"]
    sentence = f"{gain['federated']} of {gain['samples']} correct with the federation, {gain['alone']} of "
    assert sentence in format_event(gain) and gain["advice"] in format_event(gain)


def test_who_is_missing_is_said_with_the_reason(place):
    place.desks.pop("photo")
    place.run()
    missing_events = [event for event in events.read_events(place.kit.folder) if event["kind"] == "missing"]
    assert {event["site"] for event in missing_events} == {"photo"} and len(missing_events) == 3
    state = status(place.kit.folder)
    assert state["sites"]["photo"]["state"] == "missing" and state["sites"]["photo"]["why"]
    assert state["sites"]["art"]["state"] == "answers"
    assert state["run"]["round"] == 3
    assert any(line.startswith("  photo: missing") for line in format_status(state))


def test_status_of_a_site_counts_what_has_left(place):
    place.run()
    state = status(place.site("art"))
    out = [line for line in Ledger(place.site("art")).read().lines if line["direction"] == "out"]
    assert state["bytes out"] == sum(line["bytes"] for line in out)
    assert state["rounds"].startswith("3 of ") and state["classifiers"]
    done = invoke("status", place.site("art"), "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["bytes out"] == state["bytes out"]


def test_lines_are_private_and_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MAX_LOG_BYTES", 300)
    log_event, tail = EventLog(tmp_path), EventTail(tmp_path)
    events_seen = []
    for number in range(20):
        log_event("said", text=f"line {number}")
        events_seen += tail.read_new()
    assert [event["text"] for event in events_seen] == [f"line {number}" for number in range(20)]
    assert (tmp_path / events.LOG_FILE).stat().st_mode & 0o077 == 0
    assert (tmp_path / events.ROTATED_LOG_FILE).exists() and len(events.read_events(tmp_path)) < 20
    assert (tmp_path / events.LOG_FILE).stat().st_size < 500


def test_a_torn_line_and_odd_words_do_no_harm(tmp_path):
    EventLog(tmp_path)("refused", site="a\x1b[31m\nb", why="x" * 9000)
    with open(tmp_path / events.LOG_FILE, "ab") as file:
        file.write(b'{"time": "2026')
    [event] = events.read_events(tmp_path)
    text = format_event(event)
    assert "\x1b" not in text and "\n" not in text and len(text) < 1200


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path):
    printed = []
    EventLog(tmp_path / "not there", printed.append)("said", text="on")
    assert printed[0].endswith(" on")


def test_a_run_may_have_its_own_deadline_and_no_odd_one(place):
    assert with_rules(place.kit, {"deadline": 5.0, "quorum": 1.0}).deadline == 5.0
    for rules in ({"quorum": 0.0}, {"quorum": 2.0}, {"wait": -1.0}, {"deadline": float("nan")}):
        with pytest.raises(SettingsError, match=next(iter(rules))):
            with_rules(place.kit, rules)
    with pytest.raises(SettingsError, match="deadlin"):
        with_rules(place.kit, {"deadlin": 5.0})


def test_the_doctor_says_what_to_do(place):
    findings = {finding.check: finding for finding in check_folder(place.kit.folder)}
    assert findings["versions"].ok and findings["sites"].detail == "art, photo, sketch"
    assert not findings["from outside"].ok and "start the server" in findings["from outside"].detail
    findings = {finding.check: finding for finding in check_folder(place.site("art"))}
    assert findings["encoder"].ok and findings["certificate"].ok and findings["policy"].ok
    os.chmod(place.site("art"), 0o755)
    done = invoke("doctor", place.site("art"), "--json")
    findings_json = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert done.exit_code == 1 and "chmod 700" in findings_json["folder"]["detail"]


def test_a_folder_of_nobody_is_named(tmp_path):
    for command in ("doctor", "status", "log"):
        done = invoke(command, tmp_path)
        assert done.exit_code != 0 and "neither a server's folder" in str(done.exception)


def test_runs_of_a_server_are_listed(place):
    assert list_runs(place.kit.folder) == []
    assert "no runs yet" in invoke("runs", place.kit.folder).output
    place.run(out="kits/server/runs/fedot-sites")
    [run_info] = list_runs(place.kit.folder)
    assert run_info == {"name": "fedot-sites", "method": "fedot", "state": "finished", "rounds": 3}
    done = invoke("runs", place.kit.folder, "--resume", "fedot-site")
    assert "did you mean 'fedot-sites'" in str(done.exception)


def test_where_rows_are_no_embeddings_a_site_is_told_of_the_federation_alone():
    world = toy_world(make("fedavg"))
    id, measured = next(iter(world.members)), {"validation_rows": 8, "validation_hits": 5}
    assert isinstance(compare_with_alone(world, id, measured)["alone"], int)
    facts = {"samples": 8, "federated": 5}
    patches = replace(world, x=world.x[:, None].expand(-1, 4, -1))
    assert compare_with_alone(patches, id, measured) == {**facts, "alone": "?", "advice": "not compared"}


def test_a_damaged_line_is_passed_over_by_those_who_follow(tmp_path):
    log_event, tail = EventLog(tmp_path), EventTail(tmp_path)
    log_event("said", text="one")
    with open(tmp_path / events.LOG_FILE, "ab") as file:
        file.write(b'{"time": 1}\n[]\n')
    log_event("said", text="two")
    assert [event["text"] for event in tail.read_new()] == ["one", "two"]


@pytest.mark.parametrize("name", ["auto", "tofa", "fedavg"])
def test_what_a_person_is_told_would_leave_is_what_leaves(place, name):
    for site in place.desks:
        place.asks_for_consent(site)
    settings = place.settings({"name": name, "rounds": 1 if name == "tofa" else 2})
    with pytest.raises(FederationError, match="nobody at this site has consented"):
        place.run(settings)
    for site in place.desks:
        place.consents(site)
    place.run(settings)
    [request_event] = [event for event in events.read_events(place.site("art")) if event["kind"] == "asks"]
    out = [event for event in Ledger(place.site("art")).read().lines if event["direction"] == "out"]
    first = next(event["fields"] for event in out if event["kind"] == "round" and event["fields"])
    assert set(request_event["leaves"]) == set(first)


@pytest.mark.parametrize("rule", ["mean", "krum"])
def test_an_aggregate_that_fails_under_a_robust_rule_ends_the_run_in_words(place, monkeypatch, rule):
    """Of what a rule has made of all uploads nobody's can be left out: the run ends in words."""
    settings = place.settings({"name": "fedavg", "rounds": 2}, channel={"aggregation": rule})

    def fails(*words):
        raise FederationError("not enough clients are left")

    monkeypatch.setattr("fedvlm.engines.aggregate._check_finite", fails)
    out = place.folder / "run"
    write_json(place.kit.folder / RUN_REQUEST_FILE, {"out": str(out), "identity": settings.identity()})
    with pytest.raises(FederationError, match="not enough clients"):
        run_request(local_grid(place.desks), place.kit.folder)
    last = events.read_events(place.kit.folder)[-1]
    assert last["kind"] == "failed" and "not enough clients are left" in last["why"]
    assert "not enough clients" in (place.kit.folder / ERROR_FILE).read_text()
    monkeypatch.undo()
    run_request(local_grid(place.desks), place.kit.folder)  # and it goes on from there
    assert events.read_events(place.kit.folder)[-1]["kind"] == "ended"
