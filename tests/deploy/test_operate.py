"""What people are told while a federation runs: words, status, doctor."""

import json
import os
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedvlm.cli import app
from fedvlm.core import make
from fedvlm.deploy import events
from fedvlm.deploy.consent import give_consent
from fedvlm.deploy.doctor import examine
from fedvlm.deploy.events import Events, Tail, sentence
from fedvlm.deploy.gained import gained
from fedvlm.deploy.ledger import Ledger
from fedvlm.deploy.server import FAILED, REQUEST, conduct, ruled
from fedvlm.deploy.status import in_words, runs, status
from fedvlm.engines.flower.local import local_grid
from fedvlm.errors import FederationError, SettingsError
from fedvlm.storage.sealed import write_json
from fedvlm.testing import toy_world


def asked(*words):
    return CliRunner().invoke(app, ["deploy", *map(str, words)])


def kinds(folder):
    return [event["kind"] for event in events.read(folder)]


def test_a_run_is_told_at_the_server_and_at_each_site(place):
    place.run()
    server = place.kit.folder
    assert kinds(server) == ["begun", *["connected"] * 3, *["round"] * 3]
    last = events.read(server)[-1]
    assert (last["round"], last["rounds"], last["answered"]) == (3, 3, 3)
    assert "round 3 of 3: 3 of 3 sites, accuracy so far " in sentence(last)
    at_site = place.site("art")
    assert kinds(at_site)[0] == "opened" and kinds(at_site)[-1] == "sent"
    assert {"gained", "classifier"} <= set(kinds(at_site))


def test_the_words_and_the_ledger_have_the_same_bytes(place):
    place.run()
    said = [one["bytes"] for one in events.read(place.site("art")) if one["kind"] == "sent"]
    lines = Ledger(place.site("art")).read().lines
    assert said and said == [one["bytes"] for one in lines if one["direction"] == "out"]


def test_a_site_learns_whether_it_gained(place):
    place.run()
    [gained] = [one for one in events.read(place.site("art")) if one["kind"] == "gained"]
    assert 0 <= gained["alone"] <= gained["rows"] and 0 <= gained["federated"] <= gained["rows"]
    assert f"on its {gained['rows']} validation rows" in sentence(gained)


def test_who_is_missing_is_said_with_the_reason(place):
    place.desks.pop("photo")
    place.run()
    told = [one for one in events.read(place.kit.folder) if one["kind"] == "missing"]
    assert {one["site"] for one in told} == {"photo"} and len(told) == 3
    state = status(place.kit.folder)
    assert state["sites"]["photo"]["state"] == "missing" and state["sites"]["photo"]["why"]
    assert state["sites"]["art"]["state"] == "answers"
    assert state["run"]["round"] == 3
    assert any(line.startswith("  photo: missing") for line in in_words(state))


def test_status_of_a_site_counts_what_has_left(place):
    place.run()
    state = status(place.site("art"))
    out = [one for one in Ledger(place.site("art")).read().lines if one["direction"] == "out"]
    assert state["bytes out"] == sum(one["bytes"] for one in out)
    assert state["rounds"].startswith("3 of ") and state["classifiers"]
    done = asked("status", place.site("art"), "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["bytes out"] == state["bytes out"]


def test_lines_are_private_and_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MOST", 300)
    note, tail = Events(tmp_path), Tail(tmp_path)
    seen = []
    for number in range(20):
        note("said", text=f"line {number}")
        seen += tail.new()
    assert [one["text"] for one in seen] == [f"line {number}" for number in range(20)]
    assert (tmp_path / events.NAME).stat().st_mode & 0o077 == 0
    assert (tmp_path / events.OLD).exists() and len(events.read(tmp_path)) < 20
    assert (tmp_path / events.NAME).stat().st_size < 500


def test_a_torn_line_and_odd_words_do_no_harm(tmp_path):
    Events(tmp_path)("refused", site="a\x1b[31m\nb", why="x" * 9000)
    with open(tmp_path / events.NAME, "ab") as file:
        file.write(b'{"time": "2026')
    [event] = events.read(tmp_path)
    text = sentence(event)
    assert "\x1b" not in text and "\n" not in text and len(text) < 1200


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path):
    said = []
    Events(tmp_path / "not there", said.append)("said", text="on")
    assert said[0].endswith(" on")


def test_a_run_may_have_its_own_deadline_and_no_odd_one(place):
    assert ruled(place.kit, {"deadline": 5.0, "quorum": 1.0}).deadline == 5.0
    for rules in ({"quorum": 0.0}, {"quorum": 2.0}, {"wait": -1.0}, {"deadline": float("nan")}):
        with pytest.raises(SettingsError, match=next(iter(rules))):
            ruled(place.kit, rules)
    with pytest.raises(SettingsError, match="deadlin"):
        ruled(place.kit, {"deadlin": 5.0})


def test_the_doctor_says_what_to_do(place):
    found = {one.what: one for one in examine(place.kit.folder)}
    assert found["versions"].well and found["sites"].said == "art, photo, sketch"
    assert not found["from outside"].well and "start the server" in found["from outside"].said
    found = {one.what: one for one in examine(place.site("art"))}
    assert found["encoder"].well and found["certificate"].well and found["policy"].well
    os.chmod(place.site("art"), 0o755)
    done = asked("doctor", place.site("art"), "--json")
    told = {one["what"]: one for one in json.loads(done.stdout)}
    assert done.exit_code == 1 and "chmod 700" in told["folder"]["said"]


def test_a_folder_of_nobody_is_named(tmp_path):
    for command in ("doctor", "status", "log"):
        done = asked(command, tmp_path)
        assert done.exit_code != 0 and "no server's folder" in str(done.exception)


def test_runs_of_a_server_are_listed(place):
    assert runs(place.kit.folder) == []
    assert "no run yet" in asked("runs", place.kit.folder).output
    place.run(out="kits/server/runs/fedot-sites")
    [one] = runs(place.kit.folder)
    assert one == {"name": "fedot-sites", "method": "fedot", "state": "finished", "rounds": 3}
    done = asked("runs", place.kit.folder, "--resume", "fedot-site")
    assert "did you mean 'fedot-sites'" in str(done.exception)


def test_where_rows_are_no_embeddings_a_site_is_told_of_the_federation_alone():
    world = toy_world(make("fedavg"))
    id, measured = next(iter(world.members)), {"validation_rows": 8, "validation_hits": 5}
    assert isinstance(gained(world, id, measured)["alone"], int)
    patches = replace(world, x=world.x[:, None].expand(-1, 4, -1))
    assert gained(patches, id, measured) == {"rows": 8, "federated": 5, "alone": "?"}


def test_a_damaged_line_is_passed_over_by_those_who_follow(tmp_path):
    note, tail = Events(tmp_path), Tail(tmp_path)
    note("said", text="one")
    with open(tmp_path / events.NAME, "ab") as file:
        file.write(b'{"time": 1}\n[]\n')
    note("said", text="two")
    assert [one["text"] for one in tail.new()] == ["one", "two"]


@pytest.mark.parametrize("name", ["auto", "tofa", "fedavg"])
def test_what_a_person_is_told_would_leave_is_what_leaves(place, name):
    for site in place.desks:
        place.asks_for_consent(site)
        give_consent(place.site(site), "A. Person")
    place.run(place.settings({"name": name, "rounds": 1 if name == "tofa" else 2}))
    [asks] = [one for one in events.read(place.site("art")) if one["kind"] == "asks"]
    out = [one for one in Ledger(place.site("art")).read().lines if one["direction"] == "out"]
    first = next(one["fields"] for one in out if one["kind"] == "round" and one["fields"])
    assert {one.split(" [")[0] for one in asks["leaves"]} == set(first)


@pytest.mark.parametrize("rule", ["mean", "krum"])
def test_an_aggregate_that_fails_under_a_robust_rule_ends_the_run_in_words(
    place, monkeypatch, rule
):
    """Of what a rule has made of all uploads nobody's can be left out: the run ends in words."""
    settings = place.settings({"name": "fedavg", "rounds": 2}, channel={"aggregation": rule})

    def fails(*words):
        raise FederationError("not enough clients are left")

    monkeypatch.setattr("fedvlm.engines.aggregate._check_finite", fails)
    out = place.folder / "run"
    write_json(place.kit.folder / REQUEST, {"out": str(out), "identity": settings.identity()})
    with pytest.raises(FederationError, match="not enough clients"):
        conduct(local_grid(place.desks), place.kit.folder)
    last = events.read(place.kit.folder)[-1]
    assert last["kind"] == "failed" and "not enough clients are left" in last["why"]
    assert "not enough clients" in (place.kit.folder / FAILED).read_text()
    monkeypatch.undo()
    conduct(local_grid(place.desks), place.kit.folder)  # and it goes on from there
    assert events.read(place.kit.folder)[-1]["kind"] == "ended"
