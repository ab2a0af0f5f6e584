"""Real processes: a SuperLink and one process per site, TLS and keys, on loopback."""

import os
import shutil
import signal
import socket
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime

import psutil
import pytest

from fedvlm import tensors
from fedvlm.channel.settings import with_deployment_bound as bounded
from fedvlm.classifier.personalised import Personalised
from fedvlm.deploy.flower import processes
from fedvlm.deploy.identity.enrolment import (
    accept_certificate,
    admit_site,
    create_join_request,
    read_request,
    revoke_site,
)
from fedvlm.deploy.identity.keys import create_certificates
from fedvlm.deploy.kits import create_kits, read_server, read_site, write_site
from fedvlm.deploy.operations.live_page import create_app
from fedvlm.deploy.server.launch import evaluate_over_sites, run_over_sites, start_site
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.site.peers import read_peers
from fedvlm.deploy.site.policy import example_policy
from fedvlm.deploy.transcript import find_transcripts, verify_transcript
from fedvlm.engines.sequential import Sequential
from fedvlm.errors import FederationError
from fedvlm.storage.files import read_tensors
from tests.helpers.live_server import running
from tests.helpers.running import execute

pytestmark = [
    pytest.mark.deployed,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("federation"),  # one server and its sites for all of them
]
NAMES = ["art", "photo", "sketch"]
METHODS = [
    {"name": "faa-clip", "rounds": 1, "reference": "target"},
    {"name": "fedotp", "rounds": 1},
    {"name": "tofa"},
]


def saved(result):
    return read_tensors(result.folder / "trainings/0-all.safetensors")[0]


def shared(result):
    return {key: value for key, value in saved(result).items() if key.startswith("shared/")}


def check_as_alone(federation, settings, deployed, folder):
    """The table, the bytes and the tensors of a run in one process; `local` is at its site."""
    channel = bounded(settings.channel, settings.method)  # as a deployment has it by default
    alone = execute(replace(settings, engine="single", channel=channel), folder)
    for key, value in alone.tables[0].items():
        assert deployed.tables[0][key] == pytest.approx(value, abs=1e-6)
    assert shared(deployed).keys() == shared(alone).keys()
    assert tensors.max_relative_difference(shared(deployed), shared(alone)) < 1e-5
    for deployed_line, simulated_line in zip(deployed.rounds, alone.rounds, strict=True):
        for id in NAMES:
            for key in ("bytes_up", "bytes_down", "test_rows"):
                assert deployed_line["clients"][id][key] == simulated_line["clients"][id][key]
    local = alone.personalised("photo").local
    assert not {key.split("/")[-1] for key in saved(deployed)} & set(local)
    if local:
        place = federation.site("photo") / "classifiers" / f"{settings.method.name}-all-0"
        assert tensors.max_relative_difference(local, Personalised.from_pretrained(place).local) < 1e-5


@pytest.mark.parametrize(
    "method",
    [METHODS[0], *(pytest.param(method_case, marks=pytest.mark.slow) for method_case in METHODS[1:])],
    ids=lambda method_case: method_case["name"],
)
def test_a_method_gives_the_same_between_processes_as_in_one(federation, tmp_path, method):
    settings = federation.settings(method)
    deployed = run_over_sites(federation.kit, settings, tmp_path / "deployed")
    check_as_alone(federation, settings, deployed, tmp_path / "alone")
    done = evaluate_over_sites(federation.kit, [str(deployed.folder), "zero-shot"])
    for name, scores in deployed.trainings()["all"]["scores"].items():
        assert [found["test_rows"] for found in done["sites"][name]["scores"]] == [scores["test_rows"]] * 2


@pytest.mark.long  # a minute
def test_a_race_between_processes_chooses_as_in_one(federation, tmp_path):
    settings = federation.settings({"name": "fedavg", "rounds": 2, "lr": 1e-4}, tune=["lr"])
    deployed = run_over_sites(federation.kit, settings, tmp_path / "deployed")
    channel = bounded(settings.channel, settings.method)
    alone = execute(replace(settings, engine="single", channel=channel), tmp_path / "alone")
    deployed_tuning, theirs = deployed.manifest["tuned"], alone.manifest["tuned"]
    assert deployed_tuning["chosen"] == theirs["chosen"] and deployed_tuning["trials"] == theirs["trials"]
    assert deployed.tables[0] == pytest.approx(alone.tables[0])


def test_a_verified_sum_between_processes_survives_the_kill_of_a_site(federation, start_run, tmp_path):
    """The round waits for the killed site, and the sum is the plain mean of what nobody saw."""
    federation.rules(deadline=20.0)
    method = {"name": "fedavg", "rounds": 3, "lr": 1e-3}
    settings = federation.settings(method, channel={"clip": 0.5, "verified": True})
    run_thread = start_run(federation, settings, tmp_path / "hidden")
    run_thread.wait_for(lambda lines: len(lines) >= 1)
    federation.restart("photo")
    run_thread.join(240)
    assert run_thread.error is None and run_thread.result is not None, run_thread.error
    plain = federation.settings(method, channel={"clip": 0.5}, engine="single")
    assert tensors.max_relative_difference(shared(run_thread.result), shared(execute(plain, tmp_path / "plain"))) < 1e-6
    assert "cosine" not in run_thread.result.rounds[0]  # what only someone who has the uploads could tell
    [transcript] = find_transcripts(run_thread.result.folder)
    assert "12 masked uploads are signed" in "\n".join(
        verify_transcript(transcript, read_peers(federation.site("art")))
    )


def test_a_killed_site_goes_out_on_the_page_and_the_round_goes_on(federation, start_run, chrome, tmp_path):
    """Somebody looks at the server's page while a site's processes are killed."""
    federation.rules(deadline=10.0)
    settings = federation.settings({"name": "fedot", "rounds": 6, "lr": 4e-3})
    hosts = set()
    with running(create_app(federation.kit.folder, "word", hosts)) as url:
        hosts.add(url.removeprefix("http://"))
        chrome.get(f"{url}/?token=word")
        run_thread = start_run(federation, settings, tmp_path / "run")
        run_thread.wait_for(lambda lines: len(lines) >= 1)
        evaluate(chrome, count_states("takes part", 3))
        assert psutil.Process(federation.sites["photo"].child.pid).children(recursive=True) == []
        federation.kill(federation.sites["photo"])
        evaluate(chrome, count_states("late", 1))
        evaluate(chrome, "document.body.textContent.includes('2 of 3 sites')")
        run_thread.join(120)
        chrome.get("about:blank")
    since = federation.joined("photo")
    federation.sites["photo"] = federation.start("photo")
    federation.wait_for("photo", since)
    federation.rules(deadline=240.0)
    assert run_thread.error is None and len(run_thread.lines()) == 6
    assert sorted(run_thread.lines()[-1]["clients"]) == ["art", "sketch"]


def count_states(state, number):
    states = "[...document.querySelectorAll('.card .state')].filter(place => place.textContent.startsWith"
    return f"{states}('{state}')).length === {number}"


def evaluate(chrome, script):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(chrome, 120).until(lambda it: it.execute_script(f"return {script}"))


def test_a_waiting_site_is_one_process_without_a_port_in_420_mb(federation):
    for site in federation.sites.values():
        process = psutil.Process(site.child.pid)
        assert process.children(recursive=True) == []
        assert [link for link in process.net_connections() if link.status == psutil.CONN_LISTEN] == []
        assert process.memory_full_info().pss < 420e6


def test_a_killed_server_app_is_told_at_once_and_the_command_goes_on(federation, start_run, tmp_path):
    settings = federation.settings({"name": "fedot", "rounds": 3, "lr": 5e-3})
    with federation.busy("art") as received:
        run_thread = start_run(federation, settings, tmp_path / "run")
        received()
        [server_app] = psutil.Process(federation.link.child.pid).children()
        server_app.kill()
        run_thread.join(30)
    assert "the run ended without a result; repeat the command to resume" in str(run_thread.error)
    assert len(run_over_sites(federation.kit, settings, tmp_path / "run").rounds) == 3


def test_a_new_database_of_the_server_does_not_cost_a_site_its_place(federation, tmp_path):
    since = {name: federation.joined(name) for name in NAMES}
    federation.link.stop()
    for path in federation.kit.folder.glob("superlink.db*"):
        path.unlink()
    federation.start_link()
    for name in NAMES:
        federation.wait_for(name, since[name])
    settings = federation.settings({"name": "fedot", "rounds": 1, "lr": 6e-3})
    assert sorted(run_over_sites(federation.kit, settings, tmp_path / "run").rounds[0]["clients"]) == NAMES


@pytest.mark.slow
def test_each_round_lacks_another_third_of_the_sites(federation, start_run, tmp_path, monkeypatch):
    """One is killed in the middle of a round, one is late, one says no; all come back."""
    deadline = max(20.0, 2 * federation.joining)
    federation.rules(deadline=deadline)
    settings = federation.settings({"name": "fedot", "rounds": 5, "lr": 1e-3})
    run_thread = start_run(federation, settings, tmp_path / "run")
    run_thread.wait_for(lambda lines: len(lines) == 1)
    # Photo has the request of round 1 in its hands; and art keeps the round open for its return.
    with frozen(federation.sites["art"]):
        with federation.busy("photo") as received:
            received()
            since = federation.joined("photo")
            federation.kill(federation.sites["photo"])
        federation.sites["photo"] = federation.start("photo")
        federation.wait_for("photo", since)
    run_thread.wait_for(lambda lines: len(lines) == 2)
    with frozen(federation.sites["sketch"]):
        run_thread.wait_for(lambda lines: len(lines) == 3)
    policy = federation.site("art") / "policy.toml"
    policy.write_text(example_policy(("fedavg",), plain=True))
    run_thread.wait_for(lambda lines: len(lines) == 4)
    policy.write_text(example_policy(plain=True))
    run_thread.join(300)
    federation.rules(deadline=240.0)
    assert run_thread.error is None and run_thread.result is not None
    lines = run_thread.lines()
    assert [sorted(line.get("missing", {})) for line in lines] == [
        [],
        ["photo"],
        ["sketch"],
        ["art"],
        [],
    ]
    assert f"did not answer within {deadline:g} s" in lines[2]["missing"]["sketch"]
    assert "the method is not allowed here" in lines[3]["missing"]["art"]
    ledgers = {name: Ledger(federation.site(name)).read() for name in NAMES}
    assert not any(ledger.broken for ledger in ledgers.values())
    [refused] = [line for line in ledgers["art"].lines if line["direction"] == "refused"]
    assert refused["round"] == 3 and "fedot is not allowed here" in refused["error"]

    plain_round = Sequential.round

    def without(self, number, tasks):
        return plain_round(self, number, [task for task in tasks if task.id in lines[number]["clients"]])

    monkeypatch.setattr(Sequential, "round", without)
    alone = execute(replace(settings, engine="single"), tmp_path / "alone")
    assert tensors.max_relative_difference(shared(run_thread.result), shared(alone)) < 1e-5


@contextmanager
def frozen(site):
    """A site's process that stands still."""
    os.kill(site.child.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(site.child.pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_killed_server_is_resumed_to_the_same_tensors(federation, start_run, tmp_path):
    settings = federation.settings({"name": "fedot", "rounds": 2, "lr": 2e-3})
    run_thread = start_run(federation, settings, tmp_path / "run")
    saved = tmp_path / "run" / "trainings" / "0-all.checkpoint"
    run_thread.wait_for(lambda lines: saved.exists())  # a line that is not in it would come again
    federation.kill(federation.link)
    before = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    federation.start_link()
    result = run_over_sites(federation.kit, settings, tmp_path / "run")
    run_thread.join(60)
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes().startswith(before)
    check_as_alone(federation, settings, result, tmp_path / "alone")


@pytest.mark.slow
def test_a_site_revoked_in_a_running_round_is_out_and_comes_back_by_a_new_key(federation, start_run, tmp_path):
    """The server is not started anew, and nobody waits for the deadline of four minutes."""
    settings = federation.settings({"name": "fedot", "rounds": 2, "lr": 3e-3})
    run_thread = start_run(federation, settings, tmp_path / "run")
    run_thread.wait_for(lambda lines: len(lines) == 1)
    with federation.busy("sketch") as received:  # it has the request of round 1, and no answer yet
        received()
        revoke_site(federation.kit, "sketch")
        run_thread.join(200)
    assert run_thread.error is None and run_thread.lines()[1]["missing"].keys() == {"sketch"}
    assert "its key was revoked" in run_thread.lines()[1]["missing"]["sketch"]
    federation.sites["sketch"].child.wait(60)
    assert "site sketch is not admitted" in federation.sites["sketch"].tail(30)
    folder, since = federation.site("sketch"), federation.joined("sketch")
    request = read_request(federation.kit, create_join_request(folder).path)
    accept_certificate(folder, admit_site(federation.kit, request))
    federation.sites["sketch"] = federation.start("sketch")
    federation.wait_for("sketch", since)
    method = {"name": "fedot", "rounds": 1, "lr": 3e-3}
    result = run_over_sites(federation.kit, federation.settings(method), tmp_path / "again")
    assert sorted(result.rounds[0]["clients"]) == NAMES


def site_output(kit):
    """What a site that cannot join says before it ends."""
    site = start_site(kit)
    try:
        site.child.wait(120)
    finally:
        site.stop()
    return site.tail(20)


@pytest.mark.slow
def test_an_unregistered_key_cannot_join(federation, tmp_path):
    """The kit of another federation, whose own server would let it in."""
    _, kit = create_kits(tmp_path / "other", ["art"], "127.0.0.1", 8443)
    for name in ("ca.crt", "site.toml"):
        shutil.copy(federation.site("art") / name, kit / name)
    output = site_output(kit)
    assert "site art is not admitted" in output and "its key is not known" in output


@pytest.mark.slow
def test_a_server_with_a_foreign_certificate_is_refused(federation, tmp_path):
    kit = shutil.copytree(federation.site("art"), tmp_path / "site-art")
    (kit / "ca.crt").write_bytes(create_certificates("127.0.0.1")["ca.crt"])
    assert "it was made for another federation" in site_output(kit)


@pytest.mark.slow
def test_a_server_with_an_expired_certificate_is_refused(federation, tmp_path, monkeypatch):
    """By the server itself when it starts, and by a site that finds one that runs."""
    folder = shutil.copytree(federation.kit.folder, tmp_path / "server")
    site = shutil.copytree(federation.site("art"), tmp_path / "site-art")
    address = f"127.0.0.1:{processes.free_port()}"
    papers = create_certificates("127.0.0.1", datetime(2020, 1, 1, tzinfo=UTC), 30)
    for name, data in papers.items():
        (folder / name).write_bytes(data)
    (site / "ca.crt").write_bytes(papers["ca.crt"])
    write_site(replace(read_site(site), address=address))
    kit = replace(read_server(folder), address=address)
    with pytest.raises(FederationError, match="expired.*fedvlm deploy renew"):
        processes.start_superlink(kit)
    monkeypatch.setattr(processes, "_wait_until_up", lambda kit, link: None)
    link = processes.start_superlink(kit)
    try:
        output = site_output(site)
    finally:
        link.stop()
    assert "expired" in output and "fedvlm deploy renew" in output


@pytest.mark.slow
def test_plain_http_gets_no_answer_from_the_server(federation):
    host, _, port = federation.kit.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as stream:
        stream.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            answer = stream.recv(100)
        except ConnectionError:
            answer = b""
    assert not answer.startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_below_the_quorum_the_run_stops_and_names_the_missing(federation, tmp_path):
    federation.rules(wait=3.0, deadline=12.0)
    for name in ("photo", "sketch"):
        federation.sites[name].stop()
    with pytest.raises(FederationError, match="1 of 3 clients answered, and 2 must") as error:
        run_over_sites(federation.kit, federation.settings({"name": "fedavg", "rounds": 1}), tmp_path / "run")
    assert "photo: it is not connected" in str(error.value)
