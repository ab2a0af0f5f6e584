"""The live page: who may see it, what it says, and what a person can answer there."""

import asyncio
import json

import httpx
import pytest

from fedvlm.deploy.kits import read_site
from fedvlm.deploy.operations.events import EventLog
from fedvlm.deploy.operations.live_page import create_app, live_page, live_view
from fedvlm.deploy.site import ledger as ledger_module
from fedvlm.deploy.site import people
from fedvlm.deploy.site.consent import waiting_requests
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.people import add_person
from fedvlm.deploy.site.service import Site
from fedvlm.errors import FederationError

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


@pytest.mark.parametrize("path", ["/", "/state", "/events", "/report", "/health", "/metrics"])
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


def test_lights_follow_the_run(place):
    place.run()
    lights = {light["text"].split(":")[0]: light["state"] for light in live_view(place.kit.folder)["lights"]}
    assert set(lights.values()) == {"answers"}
    place.desks.pop("photo")
    place.run(out="second")
    lights = {light["text"].split(":")[0]: light["state"] for light in live_view(place.kit.folder)["lights"]}
    assert lights["photo"] == "missing" and lights["art"] == "answers"


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
    assert "What for: a test of consent" in live_view(folder)["pending"]
    answer = {"by": "A. Person", "secret": token, "plan": request.plan, "days": 2}
    for wrong in ({"secret": "another"}, {"by": "B. Person"}):
        assert answered(folder, json=answer | wrong).status_code == 403 and waiting_requests(folder)
    sent = answered(folder, json=answer)
    assert sent.status_code == 200 and "A. Person consents" in sent.json()["detail"]
    assert live_view(folder)["pending"] == []


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
    assert live_view(folder)["pending"] == []


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
    text = live_page(place.site("art"))[0]
    assert "photo" not in text and "sketch" not in text


def test_the_page_of_a_site_reads_only_what_is_new_in_its_ledger(place, monkeypatch):
    place.run()
    folder, hashed = place.site("art"), []
    facts = [live_view(folder)["facts"] for _ in range(2)]
    hash_line = ledger_module._hash_line
    monkeypatch.setattr(ledger_module, "_hash_line", lambda line: hashed.append(line) or hash_line(line))
    assert live_view(folder)["facts"] == facts[0] == facts[1] and hashed == []
    head = Ledger(folder).add("dropped", -1)
    hashed.clear()
    assert any(head[:16] in fact for fact in live_view(folder)["facts"]) and len(hashed) == 1
