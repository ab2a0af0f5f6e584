"""Records are found wherever they are, and what is wrong is named as what it is."""

import json
import socket
import sqlite3
from contextlib import closing
from threading import Event, Thread

import pytest

from fedvlm.deploy.flower import processes
from fedvlm.deploy.flower.fleet import NotAdmitted
from fedvlm.deploy.identity.certificates import record_contact
from fedvlm.deploy.kits import (
    create_kits,
    read_server,
    read_site,
    record_folders,
    register_record,
    restore_backup,
    write_backup,
)
from fedvlm.deploy.operations.events import read_events
from fedvlm.deploy.operations.status import format_status, list_runs, server_status
from fedvlm.deploy.server import launch
from fedvlm.deploy.server.run import run_request
from fedvlm.deploy.site import service
from fedvlm.deploy.site.ledger import Ledger
from fedvlm.deploy.withdrawal import apply_withdrawal, withdraw
from fedvlm.engines.flower.engine import local_grid
from fedvlm.errors import DataError, FederationError, FedVLMError, SettingsError
from fedvlm.record import Record
from fedvlm.report.tables import compare_table
from fedvlm.result import Result
from fedvlm.storage.files import exclusive_lock, write_json
from fedvlm.tensors import max_relative_difference


@pytest.fixture
def served(place, monkeypatch):
    """A server whose ServerApp carries out requests in this process."""
    monkeypatch.setattr(launch.processes, "is_server_up", lambda kit: True)

    def carry_out(kit, id, done, on_poll):
        run_request(local_grid(place.desks), kit.folder, id)

    monkeypatch.setattr(launch, "wait_for_run", carry_out)
    return place


def test_a_run_with_an_output_folder_is_found_by_runs_and_resume(served, tmp_path):
    out = tmp_path / "elsewhere" / "run"
    launch.run_over_sites(served.kit, served.settings(), out)
    assert [(run["name"], run["state"]) for run in list_runs(served.kit.folder)] == [(str(out.resolve()), "finished")]
    assert launch.resume_run(served.kit, str(out), None, print).folder == out.resolve()
    launch.run_over_sites(served.kit, served.settings(), out)  # it is listed once
    launch.run_over_sites(served.kit, served.settings({"name": "fedavg", "rounds": 1}))
    assert len(record_folders(served.kit.folder)) == 2
    register_record(served.kit.folder, tmp_path / "gone")
    assert len(record_folders(served.kit.folder)) == 2  # one that is gone is not listed
    with pytest.raises(SettingsError, match="elsewhere"):
        launch.resume_run(served.kit, "nowhere", None, print)


def test_status_shows_the_numbers_of_the_table(served):
    result = launch.run_over_sites(served.kit, served.settings())
    [line] = [line for line in format_status(server_status(served.kit.folder)) if line.startswith("fedot, all")]
    cell = compare_table([result]).splitlines()[-1].split()[-2]
    assert f"ended, round 3 of 3, own {cell}" in line


def shared(folder):
    return Record(folder).outcome("all", 0)[0]


def test_a_withdrawal_reaches_records_elsewhere_and_later_ones(place, tmp_path):
    settings = place.settings({"name": "tofa"}, allow_small=True)
    listed, later = tmp_path / "listed", tmp_path / "later"
    for out in (listed, later):
        place.run(settings, out)
    before = shared(later)
    register_record(place.kit.folder, listed)
    file = withdraw(place.site("photo"), "A. Person")
    site, results = apply_withdrawal(place.kit, file)
    assert site == "photo" and [(result.run, result.removed) for result in results] == [("listed", True)]
    assert max_relative_difference(shared(later), before) == 0
    with pytest.raises(SettingsError, match="its key was revoked"):
        apply_withdrawal(place.kit, file)
    site, results = apply_withdrawal(place.kit, file, [later])
    assert site == "photo" and [(result.run, result.removed) for result in results] == [("later", True)]
    assert max_relative_difference(shared(later), shared(listed)) == 0
    assert apply_withdrawal(place.kit, file, [later])[1] == []
    changed = tmp_path / "changed"
    changed.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(FedVLMError):
        apply_withdrawal(place.kit, changed, [later])


@pytest.fixture
def kits(tmp_path):
    create_kits(tmp_path / "kits", ["a"], "127.0.0.1", 9000)
    return tmp_path / "kits"


def test_a_running_server_is_backed_up_whole(kits, tmp_path):
    """While lines are written and files replaced."""
    folder, stop = kits / "server", Event()
    with closing(sqlite3.connect(folder / "superlink.db")) as base:
        base.execute("create table node (id int)")
        base.commit()

    Ledger(folder).add("out", 0)

    def work():
        while not stop.is_set():
            Ledger(folder).add("out", 0)
            write_json(folder / "run-states.json", {"a": "running"})
            (folder / "run-states.json").unlink()

    worker = Thread(target=work)
    with exclusive_lock(folder / ".lock", "busy"):
        worker.start()
        try:
            for number in range(5):
                write_backup(folder, tmp_path / f"{number}.tar")
        finally:
            stop.set()
            worker.join()
    for number in range(5):
        restore_backup(tmp_path / f"{number}.tar", tmp_path / f"back-{number}")
        assert Ledger(tmp_path / f"back-{number}").read().broken == ()
    assert read_server(tmp_path / "back-4").sites == ("a",)


def test_a_line_that_is_being_written_is_not_in_a_backup(kits, tmp_path):
    path = kits / "server" / "events.jsonl"
    path.write_text('{"a": 1}\n{"b"')
    write_backup(kits / "server", tmp_path / "kept.tar")
    restore_backup(tmp_path / "kept.tar", tmp_path / "back")
    assert (tmp_path / "back" / "events.jsonl").read_text() == '{"a": 1}\n'


def test_errors_of_backup_and_restore_name_what_is_wrong(kits, tmp_path):
    site = kits / "site-a"
    with exclusive_lock(site / ".lock", "busy"), pytest.raises(DataError, match="site .*site-a is running"):
        write_backup(site, tmp_path / "x.tar")
    (tmp_path / "there").write_text("x")
    with pytest.raises(SettingsError, match="there exists already and is not overwritten"):
        write_backup(site, tmp_path / "there")
    with pytest.raises(SettingsError, match="is inside .*site-a, which it is a backup of"):
        write_backup(site, site / "x.tar")
    with pytest.raises(SettingsError, match="there is no folder .*nowhere for the backup"):
        write_backup(site, tmp_path / "nowhere" / "x.tar")
    with pytest.raises(SettingsError, match=r"there is no backup .*none\.tar"):
        restore_backup(tmp_path / "none.tar", tmp_path / "back")
    write_backup(site, tmp_path / "x.tar")
    with pytest.raises(SettingsError, match="there is no folder .*nowhere to restore into"):
        restore_backup(tmp_path / "x.tar", tmp_path / "nowhere" / "back")


def test_a_site_that_is_locked_out_writes_why_into_its_log(place, monkeypatch):
    class Client:
        def __init__(self, *words):
            pass

        def connect(self):
            raise NotAdmitted("activate-node: HTTP status 401")

        def disconnect(self):
            pass

    monkeypatch.setattr(service.fleet, "FleetClient", Client)
    monkeypatch.setattr(service, "check_server", lambda address, ca: None)
    printed = []
    with pytest.raises(FederationError, match="site art is not admitted"):
        service.serve_site(read_site(place.site("art")), printed.append)
    last = read_events(place.site("art"))[-1]
    assert "site art is not admitted" in last["text"] and "its key is not known there" in last["text"]
    assert "its key is not known there" in printed[-1]


def test_a_taken_port_is_named(kits):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        path = kits / "server" / "server.toml"
        path.write_text(path.read_text().replace("127.0.0.1:9000", f"127.0.0.1:{port}"))
        with pytest.raises(FederationError, match=rf"cannot listen on port {port} \(Address already in use\)"):
            processes.start_superlink(read_server(kits / "server"))


def test_a_connected_site_is_not_unknown_before_the_first_run(kits):
    folder = kits / "server"
    assert server_status(folder)["sites"]["a"]["state"] == "not seen"
    record_contact(folder, "a")
    assert server_status(folder)["sites"]["a"]["state"] == "connected"
    assert json.dumps(server_status(folder), default=str)


def test_a_finished_run_is_a_result(served):
    assert isinstance(launch.run_over_sites(served.kit, served.settings()), Result)
