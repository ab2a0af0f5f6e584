"""The live page: who may see it, what it says, and what a person can answer there."""

import asyncio
import json
import os
from io import BytesIO
from zipfile import ZipFile

import httpx
import pytest

import fedvlm
from fedvlm.classifier.personalised import Personalised
from fedvlm.deploy.identity.certificates import record_contact
from fedvlm.deploy.kits import read_site
from fedvlm.deploy.operations.events import EventLog, read_events
from fedvlm.deploy.operations.live_page import create_app, render_live_page
from fedvlm.deploy.operations.live_view import live_view, training_card
from fedvlm.deploy.site import ledger as ledger_module
from fedvlm.deploy.site import people
from fedvlm.deploy.site.consent import waiting_requests
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.people import add_person
from fedvlm.deploy.site.service import Site
from fedvlm.errors import FederationError
from fedvlm.storage.files import exclusive_lock

HOST = "127.0.0.1:9"
TOKEN = "a token"


@pytest.fixture(autouse=True)
def quick_logins(monkeypatch):
    monkeypatch.setattr(people, "FAILURE_SECONDS", 0.0)
    monkeypatch.setattr(people, "SCRYPT_COST", (1 << 10, 8, 1))


def call_page(folder, path="/", token=TOKEN, method="GET", **options):
    async def send_call():
        way = httpx.ASGITransport(create_app(folder, TOKEN, {HOST}))
        async with httpx.AsyncClient(transport=way, base_url=f"http://{HOST}") as client:
            return await client.request(method, path, params={"token": token}, **options)

    return asyncio.run(send_call())


def answered(folder, origin=f"http://{HOST}", **body):
    headers = {} if origin is None else {"origin": origin}
    return call_page(folder, "/consent", method="POST", headers=headers, **body)


@pytest.mark.parametrize(
    "path", ["/", "/state", "/events", "/report", "/health", "/metrics", "/consent", "/classifiers/x"]
)
def test_every_route_wants_the_token_and_our_name(place, path):
    folder = place.kit.folder
    assert call_page(folder, path, token="").status_code == 401
    assert call_page(folder, path, token="another").status_code == 401
    assert call_page(folder, path, headers={"host": "evil.example"}).status_code == 421
    assert call_page(folder, path, headers={"origin": "http://evil.example"}).status_code == 403


def test_the_page_lets_no_other_script_in_and_shows_odd_names_as_text(place):
    EventLog(place.kit.folder)("refused", site="art", why="<script>alert(1)</script>")
    reply = call_page(place.kit.folder)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "connect-src 'self'" in policy and reply.headers["x-frame-options"] == "DENY"
    assert "<script>alert" not in reply.text and "&lt;script&gt;alert" in reply.text


def cards(folder):
    return {card["title"]: card for card in live_view(folder)["cards"]}


def test_cards_follow_the_run(place):
    before = cards(place.kit.folder)
    assert before["Run"]["state"] == "none yet" and before["Site art"]["state"] == "not connected"
    record_contact(place.kit.folder, "art")
    assert cards(place.kit.folder)["Site art"]["state"] == "connected"  # also before the first run
    place.run()
    shown = cards(place.kit.folder)
    assert {shown[f"Site {name}"]["state"] for name in place.desks} == {"takes part"}
    facts = dict(shown["Site art"]["facts"])
    assert facts["version"] == fedvlm.__version__ and facts["result"].endswith("% of validation samples")
    assert facts["certificate"] == "364 days left" and facts["last contact"] == "less than a minute ago"
    run = dict(shown["Run"]["facts"])
    assert run["round"] == "3 of 3" and run["moved"].endswith("kB") and run["accuracy so far"].endswith("%")
    assert dict(shown["Server"]["facts"])["free disk"].endswith("B")
    place.desks.pop("photo")
    place.run(out="second")
    shown = cards(place.kit.folder)
    assert shown["Site photo"]["state"] == "late" and shown["Site art"]["state"] == "takes part"
    assert dict(shown["Site photo"]["facts"])["rounds missed"] == "3" and shown["Site photo"]["note"]


def test_a_site_that_has_gone_is_not_connected(place):
    place.run()
    record_contact(place.kit.folder, "art")
    path = place.kit.folder / "contacts" / ".art"
    os.utime(path, (0, path.stat().st_mtime - 600))
    shown = cards(place.kit.folder)["Site art"]
    assert shown["state"] == "not connected" and dict(shown["facts"])["last contact"] == "10 min ago"


def test_the_time_left_is_that_of_the_last_rounds(place):
    log_event = EventLog(place.kit.folder)
    log_event("begun", method="fedot", training="all", rounds=103, sites=["art"])
    for number in range(1, 4):
        log_event("round", round=number, rounds=103, there=["art"], share=0.5, kB=2.0, seconds=3.0)
    run = dict(cards(place.kit.folder)["Run"]["facts"])
    assert run["time left"] == "about 5 min" and run["moved"] == "6 kB"


def test_a_row_of_rounds_is_short_in_the_timeline(place):
    log_event = EventLog(place.kit.folder)
    log_event("begun", method="fedot", training="all", rounds=20, sites=["art"])
    for number in range(1, 11):
        log_event("round", round=number, rounds=20, answered=1, asked=1, there=["art"], kB=2.0, seconds=3.0)
    log_event("missing", round=11, site="art", why="late")
    entries = [entry["text"] for entry in live_view(place.kit.folder)["timeline"]]
    assert "art is missing" in entries[0] and entries[1].startswith("round 10 of 20")
    assert entries[6] == "5 earlier lines of rounds since then" and len(entries) == 8


def test_trends_are_of_the_present_run(place):
    assert live_view(place.kit.folder)["trends"] == []
    place.run()
    accuracy, traffic = live_view(place.kit.folder)["trends"]
    assert [x for x, _ in accuracy.series[0].points] == [1, 2, 3] and traffic.y_label == "kB"
    own_accuracy, own_traffic = live_view(place.site("art"))["trends"]
    sent = [event for event in read_events(place.site("art")) if event["kind"] == "sent" and event.get("round")]
    assert [y for _, y in own_traffic.series[0].points] == [event["bytes"] / 1000 for event in sent]
    assert len(own_accuracy.series[0].points) == 3


def test_a_site_sees_its_own_cards_and_downloads_its_classifier(place):
    place.run()
    folder = place.site("art")
    shown = cards(folder)
    assert list(shown) == ["Site", "Training", "What left this site", "Consent", "Classifier"]
    assert dict(shown["Training"]["facts"])["round"] == "3 of 3"
    [(_, path)] = shown["Classifier"]["links"]
    reply = call_page(folder, f"/{path}")
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/zip"
    with ZipFile(BytesIO(reply.content)) as archive:
        archive.extractall(place.folder / "downloaded")
    [saved] = (place.folder / "downloaded").iterdir()
    assert Personalised.from_pretrained(saved).client == "art"
    assert "correct with the federation" in live_view(folder)["headline"]


def test_a_site_knows_its_connection_and_the_time_left(place):
    folder = place.site("art")
    with exclusive_lock(folder / ".lock", ""):  # as the site's process has it
        for kind, state in (
            ("connecting", "connecting"),
            ("unreachable", "the server cannot be reached"),
            ("reached", "connected"),
        ):
            EventLog(folder)(kind, site="art", address="x", why="y", until="z")
            assert cards(folder)["Site"]["state"] == state
    assert cards(folder)["Site"]["state"] == "not running"
    opened = {"kind": "opened", "method": "fedot", "rounds": 10, "samples": 5, "classes": 2}
    rounds = [{"kind": "sent", "round": n, "time": f"2026-01-01T00:00:{10 * n:02}+00:00"} for n in (1, 2, 3)]
    assert ("time left", "about 70 s") in training_card(opened, rounds).facts
    assert training_card(opened, []).facts[0] == ("round", "0 of 10")


@pytest.mark.parametrize("name", ["%2e%2e", "..%2fkey", "nothing", "key"])
def test_nothing_but_a_classifier_can_be_downloaded(place, name):
    place.run()
    assert call_page(place.site("art"), f"/classifiers/{name}").status_code == 404
    assert call_page(place.kit.folder, f"/classifiers/{name}").status_code == 404


def test_a_run_that_ended_leads_to_its_report(place):
    assert call_page(place.kit.folder, "/report").status_code == 404
    result = place.run()
    EventLog(place.kit.folder)("ended", record=str(result.folder))
    assert live_view(place.kit.folder)["report"]
    reply = call_page(place.kit.folder, "/report")
    assert reply.status_code == 200 and "fedot" in reply.text


def waiting(place):
    """A request that waits for a person at one site."""
    for name in place.desks:
        place.asks_for_consent(name)
        place.desks[name] = Site(read_site(place.site(name)))
    with pytest.raises(FederationError, match="consented"):
        place.run()
    return place.site("art")


def test_a_request_is_told_in_plain_words_and_a_person_accepts_it(place):
    folder = waiting(place)
    token, [request] = add_person(folder, "A. Person", "approver"), waiting_requests(folder)
    assert live_view(folder)["waiting"] == 1 and cards(folder)["Consent"]["state"] == "1 waiting"
    page = call_page(folder, "/consent").text
    assert "a test of consent" in page and request.plan in page and "no bound: sent without noise" in page
    answer = {"by": "A. Person", "secret": token, "plan": request.plan, "days": 2}
    for wrong in ({"secret": "another"}, {"by": "B. Person"}):
        assert answered(folder, json=answer | wrong).status_code == 403 and waiting_requests(folder)
    sent = answered(folder, json=answer)
    assert sent.status_code == 200 and "A. Person consents" in sent.json()["detail"]
    assert live_view(folder)["waiting"] == 0
    assert "No request waits" in call_page(folder, "/consent").text


def test_a_person_refuses_and_the_server_is_not_told_why(place):
    folder = waiting(place)
    token, [request] = add_person(folder, "A. Person", "operator"), waiting_requests(folder)
    answer = {"by": "A. Person", "secret": token, "plan": request.plan, "days": 1}
    assert answered(folder, json=answer).status_code == 422  # an operator does not consent
    assert answered(folder, json=answer | {"refuse": True, "reason": "not on a Sunday"}).status_code == 200
    with pytest.raises(FederationError) as caught:
        place.run(out="again")
    assert "a person at this site has refused" in str(caught.value)
    assert "Sunday" not in str(caught.value)
    assert live_view(folder)["waiting"] == 0
    assert "No request waits" in call_page(folder, "/consent").text


def has_answers(folder):
    return any(line["direction"] == "consent" for line in Ledger(folder).history().lines)


@pytest.mark.parametrize("origin", [None, "http://evil.example", "null"])
def test_no_other_page_can_consent(place, origin):
    folder = waiting(place)
    token, [request] = add_person(folder, "A. Person", "approver"), waiting_requests(folder)
    answer = {"by": "A. Person", "secret": token, "plan": request.plan, "days": 2}
    assert answered(folder, origin, json=answer).status_code == 403 and not has_answers(folder)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"by": ""}', b'{"by": "x", "days": "no"}', b"x" * 5000])
def test_an_odd_answer_changes_nothing(place, body):
    folder = place.site("art")
    sent = answered(folder, content=body)
    assert sent.status_code in (413, 422) and not has_answers(folder)
    assert json.loads(sent.text)["detail"] is not None


def test_a_site_sees_nothing_of_other_sites(place):
    place.run()
    text = render_live_page(place.site("art"))[0]
    assert "photo" not in text and "sketch" not in text


def test_the_page_of_a_site_reads_only_what_is_new_in_its_ledger(place, monkeypatch):
    place.run()
    folder, hashed = place.site("art"), []
    before = live_view(folder)
    hash_line = ledger_module._hash_line
    monkeypatch.setattr(ledger_module, "_hash_line", lambda line: hashed.append(line) or hash_line(line))
    assert live_view(folder)["cards"] == before["cards"] and hashed == []
    head = Ledger(folder).add("dropped", -1)
    hashed.clear()
    assert dict(cards(folder)["What left this site"]["facts"])["head of the ledger"] == head[:16] and len(hashed) == 1


def test_consent_is_given_at_a_site_only(place):
    assert call_page(place.kit.folder, "/consent").status_code == 404
    assert answered(place.kit.folder, json={}).status_code == 404
    assert "Nobody is on this site" not in call_page(place.site("art"), "/consent").text
    assert "Nobody is on this site" in call_page(waiting(place), "/consent").text
