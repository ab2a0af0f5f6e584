"""The security log: a fixed schema, rotation, and no way for an outsider to fill the disk."""

import asyncio
import json

import httpx
import pytest

from fedvlm.deploy.flower.access import NewMessages
from fedvlm.deploy.flower.server import create_superlink, guard_superlink
from fedvlm.deploy.identity.enrolment import admit_site, create_join_request, read_request, revoke_site
from fedvlm.deploy.kits import create_kits, read_server
from fedvlm.deploy.operations import events, security_log
from fedvlm.deploy.operations.security_log import RefusalLog, log_security
from fedvlm.deploy.site.service import UnsignedMessageError
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import FedVLMError

FIELDS = ["schema", "time", "event", "outcome", "actor", "source", "target", "reason", "count"]


def lines(folder, name="security.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_every_line_has_the_same_fields(tmp_path):
    log_security(tmp_path, "admission", "allowed", actor="north")
    log_security(tmp_path, "call", "refused", 3, source="192.0.2.1", target="/docs", reason="x\ny" * 500)
    first, second = lines(tmp_path)
    assert list(first) == list(second) == FIELDS
    assert first["schema"] == 1 and first["actor"] == "north" and first["reason"] == "" and first["count"] == 1
    assert "\n" not in second["reason"] and len(second["reason"]) == security_log.MAX_CHARS
    assert (tmp_path / "security.jsonl").stat().st_mode & 0o077 == 0


def test_full_files_rotate_and_the_oldest_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MAX_LOG_BYTES", 100)
    for number in range(12):
        log_security(tmp_path, "admission", "allowed", actor=f"site {number}")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [*(f"security.{number}.jsonl" for number in (1, 2, 3, 4)), "security.jsonl"]
    assert lines(tmp_path)[0]["actor"] == "site 11" and lines(tmp_path, "security.4.jsonl")[0]["actor"] == "site 7"


def test_repeated_refusals_are_one_line_a_minute_with_their_number(tmp_path):
    now = [0.0]
    log = RefusalLog(tmp_path, lambda: now[0])
    for _ in range(100):
        log("192.0.2.1", "/docs", "403")
    now[0] = 61.0
    log("192.0.2.1", "/docs", "403")
    assert [line["count"] for line in lines(tmp_path)] == [1, 100]


def test_a_flood_from_many_sources_fills_neither_disk_nor_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(security_log, "MAX_SOURCES", 10)
    log = RefusalLog(tmp_path, lambda: 0.0)
    for number in range(1000):
        log("192.0.2.1", f"/{number}", "403")
    assert len(lines(tmp_path)) == 11 and len(log.logged) <= 11 and len(log.pending) <= 11


@pytest.mark.parametrize("outcome", ["allowed", "refused"])
def test_a_full_disk_stops_nothing(tmp_path, monkeypatch, outcome):
    def full(*words, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(security_log, "append_line", full)
    log_security(tmp_path, "admission", outcome)
    assert not (tmp_path / "security.jsonl").exists()


def test_a_server_logs_outsiders_admissions_and_revocations(tmp_path):
    create_kits(tmp_path / "fed", [], "127.0.0.1", 8443)
    folder, site = tmp_path / "fed" / "server", tmp_path / "north"
    create_join_request(site, folder / "invitation.json", "north")
    request = read_request(read_server(folder), site / "request.json")
    admit_site(read_server(folder), request)
    with pytest.raises(FedVLMError, match="already admitted"):
        read_request(read_server(folder), site / "request.json")
    revoke_site(read_server(folder), "north")
    app = guard_superlink(create_superlink(folder), folder, NewMessages())

    async def call(path):
        transport = httpx.ASGITransport(app=app, client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="https://x") as client:
            return (await client.post(path)).status_code

    assert asyncio.run(call("/v1/control/start-run")) == 403 and asyncio.run(call("/v1/fleet/push-object")) == 401
    told = [(line["event"], line["outcome"], line["source"], line["target"]) for line in lines(folder)]
    assert told == [
        ("admission", "allowed", "", "north"),
        ("admission", "refused", "", "request.json"),
        ("revocation", "allowed", "", "north"),
        ("call", "refused", "192.0.2.7", "/v1/control/start-run"),
        ("call", "refused", "192.0.2.7", "/v1/fleet/push-object"),
    ]


def test_a_site_logs_what_it_refuses_and_what_nobody_signed(place):
    site = place.desks["art"]
    with pytest.raises(UnsignedMessageError):
        site.answer(Message({"kind": "open"}), Message({}))
    (site.kit.folder / "policy.toml").write_text("methods = []\n")
    place.run(place.settings())
    told = [(line["event"], line["outcome"], line["actor"]) for line in lines(site.kit.folder)]
    assert told[0] == ("message", "refused", "unknown") and told[1] == ("request", "refused", "the server")
    assert "fedot" in lines(site.kit.folder)[1]["reason"]
