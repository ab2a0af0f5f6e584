"""The live page: who may see it, what it says, and what a person can answer there."""

import asyncio
import json

import httpx
import pytest

from fedvlm.deploy.kits import read_site
from fedvlm.deploy.operations.events import EventLog
from fedvlm.deploy.operations.live_page import create_app, live_page, live_view, prometheus_metrics
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.policy import CONSENT_FILE
from fedvlm.deploy.site.service import Site
from fedvlm.errors import FederationError

HOST = "127.0.0.1:9"
TOKEN = "a token"


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


def test_metrics_have_the_numbers_of_the_status(place):
    place.run()
    text = prometheus_metrics(place.kit.folder)
    assert "\nfedvlm_round 3\n" in text and 'fedvlm_site_answers{site="art"} 1' in text
    state = call_page(place.site("art"), "/state").json()
    assert f"\nfedvlm_bytes_out {state['bytes out']}\n" in prometheus_metrics(place.site("art"))


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
    [first, second] = live_view(folder)["pending"]
    assert first == "The server asks for fedot, 3 rounds." and "head [4, " in second
    sent = answered(folder, json={"by": "A. Person", "days": 2})
    assert sent.status_code == 200 and "A. Person consents" in sent.json()["detail"]
    assert live_view(folder)["pending"] == []


def test_a_person_refuses_and_the_server_is_not_told_why(place):
    folder = waiting(place)
    words = {"by": "A. Person", "refuse": True, "reason": "not on a Sunday", "days": 1}
    assert answered(folder, json=words).status_code == 200
    with pytest.raises(FederationError) as caught:
        place.run(out="again")
    assert "a person at this site has refused" in str(caught.value)
    assert "Sunday" not in str(caught.value)
    assert live_view(folder)["pending"]


@pytest.mark.parametrize("origin", [None, "http://evil.example", "null"])
def test_no_other_page_can_consent(place, origin):
    folder = place.site("art")
    sent = answered(folder, origin, json={"by": "A. Person", "days": 1})
    assert sent.status_code == 403 and not (folder / CONSENT_FILE).exists()


@pytest.mark.parametrize("body", [b"", b"[]", b'{"by": ""}', b'{"by": "x", "days": "no"}', b"x" * 5000])
def test_an_odd_answer_changes_nothing(place, body):
    folder = place.site("art")
    sent = answered(folder, content=body)
    assert sent.status_code in (413, 422) and not (folder / CONSENT_FILE).exists()
    assert json.loads(sent.text)["detail"] is not None


def test_a_site_sees_nothing_of_other_sites(place):
    place.run()
    text = live_page(place.site("art"))[0]
    assert "photo" not in text and "sketch" not in text


def test_the_page_of_a_site_reads_its_ledger_again_only_when_it_has_changed(place, monkeypatch):
    place.run()
    folder, reads, read = place.site("art"), [], Ledger.read
    monkeypatch.setattr(Ledger, "read", lambda self: reads.append(self.path) or read(self))
    facts = [live_view(folder)["facts"] for _ in range(3)]
    assert len(reads) <= 1 and facts[0] == facts[1] == facts[2]
    head = Ledger(folder).add("dropped", -1)
    assert any(head[:16] in fact for fact in live_view(folder)["facts"])
