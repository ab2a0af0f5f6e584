"""A key that ends while a run goes on: its site is out, and the others go on."""

import pytest

from fedvlm.deploy.identity.certificates import current_certificate, issue_certificate
from fedvlm.deploy.identity.enrolment import (
    accept_certificate,
    admit_site,
    create_join_request,
    read_request,
    revoke_site,
)
from fedvlm.deploy.kits import read_site
from fedvlm.deploy.site.service import Site
from fedvlm.engines.flower.engine import local_grid
from fedvlm.errors import FederationError

NAMES = ["art", "photo", "sketch"]


def watched(place, number, act, after=False):
    """A grid that acts once, before the messages of a round are sent, or after."""
    grid, done = local_grid(place.desks), []
    push = grid.push_messages

    def watch(messages):
        messages = list(messages)
        about = messages[0].metadata
        now = about.group_id == str(number) and about.message_type == "train" and not done
        if now and not after:
            done.append(act())
        sent = push(messages)
        if now and after:
            done.append(act())
        return sent

    grid.push_messages = watch
    return grid


def took_part(result):
    return [sorted(line["clients"]) for line in result.rounds]


def test_a_site_that_is_revoked_in_a_running_round_is_left_out_and_the_round_goes_on(place):
    """It has answered, with a key that was good when it was asked."""
    grid = watched(place, 1, lambda: revoke_site(place.kit, "art"), after=True)
    result = place.run(grid=grid)
    assert took_part(result) == [NAMES, NAMES[1:], NAMES[1:]]
    assert all("its key was revoked" in line["missing"]["art"] for line in result.rounds[1:])


def test_nobody_waits_for_a_revoked_site_that_does_not_answer(place, monkeypatch):
    grid = watched(place, 1, lambda: revoke_site(place.kit, "art"), after=True)
    pull, art = grid.pull_messages, grid.nodes["art"]

    def silent(ids):
        is_revoked = not (place.kit.folder / "sites" / "art.json").exists()
        return [reply for reply in pull(ids) if not is_revoked or reply.metadata.src_node_id != art]

    def waits(seconds):
        raise AssertionError("the server waits for a site that is out")

    grid.pull_messages = silent
    monkeypatch.setattr("fedvlm.engines.flower.messages.sleep", waits)
    result = place.run(grid=grid)
    assert took_part(result) == [NAMES, NAMES[1:], NAMES[1:]]
    assert result.rounds[1]["missing"]["art"] == "its key was revoked"


def test_what_flower_says_of_a_revoked_sites_node_is_said_as_what_it_is(place):
    class Unavailable:
        def answer(self, request, state):
            raise FederationError("Node Unavailable")

    def end():
        revoke_site(place.kit, "art")
        place.desks["art"] = Unavailable()

    result = place.run(grid=watched(place, 1, end, after=True))
    assert took_part(result) == [NAMES, NAMES[1:], NAMES[1:]]
    assert result.rounds[1]["missing"]["art"] == "client art, round 1: its key was revoked"


def test_a_revoked_site_is_sent_nothing_more(place):
    grid, sent = watched(place, 1, lambda: revoke_site(place.kit, "art"), after=True), []
    push, art = grid.push_messages, grid.nodes["art"]

    def record_push(messages):
        messages = list(messages)
        sent.extend(message.metadata.group_id for message in messages if message.metadata.dst_node_id == art)
        return push(messages)

    grid.push_messages = record_push
    place.run(grid=grid)
    assert sent == ["0", "0", "1"]  # the opening, and two rounds


def test_a_run_begins_without_a_site_whose_certificate_has_expired(place):
    key = current_certificate(place.kit.folder, "art").key.encode()
    issue_certificate(place.kit.folder, place.kit.address, "art", key, days=-1)
    result = place.run()
    assert took_part(result) == [NAMES[1:]] * 3
    assert "its certificate has expired" in result.rounds[0]["missing"]["art"]


def test_below_the_quorum_a_revocation_stops_the_run_and_says_so(place):
    place.rules(quorum=1.0)
    grid = watched(place, 1, lambda: revoke_site(place.kit, "art"))
    with pytest.raises(FederationError, match="art: .*its key was revoked"):
        place.run(grid=grid)


def test_a_site_with_a_renewed_key_goes_on_in_the_same_run(place):
    def renew():
        folder = place.site("art")
        accept_certificate(folder, admit_site(place.kit, read_request(place.kit, create_join_request(folder).path)))
        place.desks["art"] = Site(read_site(folder))

    result = place.run(grid=watched(place, 0, renew, after=True))
    assert took_part(result) == [NAMES] * 3


def test_a_reply_signed_by_the_old_key_does_not_count_after_a_renewal(place):
    def renew():
        folder = place.site("art")
        accept_certificate(folder, admit_site(place.kit, read_request(place.kit, create_join_request(folder).path)))

    result = place.run(grid=watched(place, 0, renew, after=True))
    assert took_part(result) == [NAMES[1:]] * 3
    assert "not signed by site art" in result.rounds[0]["missing"]["art"]
