"""The metrics of a server and of a site, as Prometheus reads them."""

import re
import shutil
import subprocess
from time import time

import pytest

from fedvlm.deploy.operations.events import EventLog
from fedvlm.deploy.operations.metrics import prometheus_metrics
from fedvlm.deploy.operations.security_log import log_security

PROMTOOL = shutil.which("promtool")


def values(folder):
    """Return the value of every sample, by its name and labels."""
    lines = [line for line in prometheus_metrics(folder).splitlines() if not line.startswith("#")]
    return {name.removeprefix("fedvlm_"): float(number) for name, _, number in (line.rpartition(" ") for line in lines)}


def test_a_server_has_its_run_sites_certificates_disk_and_refusals(place):
    result = place.run()
    log_security(place.kit.folder, "call", "refused", 7, source="192.0.2.1")
    log_security(place.kit.folder, "admission", "allowed", target="art")
    EventLog(place.kit.folder)("missing", round=3, site="art", why="it is late")
    found = values(place.kit.folder)
    assert found["round"] == found["rounds_planned"] == 3 and found["up"] == 0
    assert found["accuracy_ratio"] == result.rounds[-1]["accuracy"] and found["round_seconds"] >= 0
    moved = sum(
        client["bytes_up"] + client["bytes_down"] for line in result.rounds for client in line["clients"].values()
    )
    assert found["traffic_bytes_total"] == pytest.approx(moved, rel=0.05)  # the log has kB with one digit
    assert found['site_answers{site="art"}'] == 0 and found['site_answers{site="photo"}'] == 1
    assert found['site_missed_rounds{site="art"}'] == 1
    assert abs(found['last_contact_timestamp_seconds{site="art"}'] - time()) < 120
    for name in ("server", "art"):
        assert 360 < found[f'certificate_remaining_seconds{{name="{name}"}}'] / 86400 < 367
    assert found["disk_free_bytes"] > 1e6 and found['refusals_total{event="call"}'] == 7
    assert not any("admission" in name for name in found)


def test_a_site_has_what_left_it_and_whether_it_gained(place):
    place.run()
    found, site = values(place.site("art")), place.desks["art"]
    sent = sum(line["bytes"] for line in site.ledger.history().lines if line["direction"] == "out")
    assert found["sent_bytes_total"] == sent and found["consent_waiting"] == 0
    assert 0 < found["accuracy_ratio"] <= 1 and abs(found['last_contact_timestamp_seconds{site="art"}'] - time()) < 120
    assert 360 < found['certificate_remaining_seconds{name="art"}'] / 86400 < 367


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (make tools)")
@pytest.mark.parametrize("who", ["server", "site-art"])
@pytest.mark.parametrize("has_run", [False, True])
def test_promtool_has_no_complaint(place, who, has_run):
    if has_run:
        place.run()
        log_security(place.folder / "kits" / who, "call", "refused")
        EventLog(place.kit.folder)("missing", round=3, site="art", why="it is late")
    text = prometheus_metrics(place.folder / "kits" / who)
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stdout + done.stderr
    names = set(re.findall(r"^(\w+)[ {]", text, re.M))
    assert names == set(re.findall(r"^# HELP (\w+)", text, re.M)) == set(re.findall(r"^# TYPE (\w+)", text, re.M))
