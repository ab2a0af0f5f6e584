"""A site renews its key and leaves, a server renews its own; and the commands for all of it."""

import sys
from datetime import UTC, datetime, timedelta

import pytest

from fedvlm.cli import main
from fedvlm.deploy.identity.certificates import (
    ENDED_FOLDER,
    certificate_path,
    current_certificate,
    read_own_certificate,
)
from fedvlm.deploy.identity.enrolment import (
    JOIN_REQUEST_FILE,
    NEXT_KEY_FILE,
    accept_certificate,
    admit_site,
    certificate_statuses,
    create_join_request,
    describe_server_expiry,
    read_request,
    renew_server_certificate,
    revoke_site,
    server_days_left,
)
from fedvlm.deploy.identity.keys import certificate_expiry, create_certificates
from fedvlm.deploy.kits import INVITATION_FILE, create_kits, read_server
from fedvlm.errors import DataError, FederationError, SettingsError
from tests.helpers.joining import Joining


@pytest.fixture
def fed(tmp_path):
    return Joining(tmp_path)


def test_a_renewed_site_has_a_new_key_under_its_name_and_the_old_one_ends(fed):
    folder = fed.joins("north")
    (folder / "policy.toml").write_text("# ours\n")
    old, before = (folder / "key").read_bytes(), current_certificate(fed.server, "north")
    request = create_join_request(folder)
    assert read_own_certificate(folder) == before  # until the server has answered, it goes on with the old one
    assert read_request(fed.kit, request.path).remark == "north renews its key; the old one is revoked"
    accept_certificate(folder, fed.admits(request))
    assert (folder / "key").read_bytes() != old and not (folder / NEXT_KEY_FILE).exists()
    assert read_own_certificate(folder).key == current_certificate(fed.server, "north").key == request.key != before.key
    assert (folder / "policy.toml").read_text() == "# ours\n" and fed.kit.sites == ("north",)
    assert [status.remark for status in certificate_statuses(fed.server)] == ["", "", "revoked or replaced"]


def test_an_older_renewal_cannot_be_replayed(fed):
    folder = fed.joins("north")
    first = create_join_request(folder)
    older_request = first.path.read_bytes()
    first.path.unlink()
    (folder / NEXT_KEY_FILE).unlink()  # lost; the site asks once more
    accept_certificate(folder, fed.admits(create_join_request(folder)))
    path = fed.folder / "kept.json"
    path.write_bytes(older_request)
    with pytest.raises(FederationError, match="the name north is taken"):
        read_request(fed.kit, path)


def test_a_stop_while_a_certificate_is_put_in_is_made_good_by_the_same_command(fed, monkeypatch):
    folder = fed.joins("north")
    sent = fed.admits(create_join_request(folder))

    def stop(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(folder), "replace", stop)  # which is how the key is moved
    with pytest.raises(KeyboardInterrupt):
        accept_certificate(folder, sent)
    monkeypatch.undo()
    with pytest.raises(SettingsError, match="is for another key than.*deploy accept"):
        read_own_certificate(folder)
    accept_certificate(folder, sent)
    assert read_own_certificate(folder).key == current_certificate(fed.server, "north").key


def test_a_request_that_changes_after_it_was_compared_is_not_admitted(fed):
    request = read_request(fed.kit, fed.request_join("north").path)
    request.path.write_bytes(fed.request_join("north", folder="thief").path.read_bytes())
    with pytest.raises(FederationError, match="was changed meanwhile"):
        admit_site(fed.kit, request)


def test_only_a_site_can_be_revoked(fed):
    fed.joins("north")
    with pytest.raises(SettingsError, match="'nort'; did you mean 'north'"):
        revoke_site(fed.kit, "nort")


def test_a_damaged_certificate_holds_its_name_until_it_is_revoked(fed):
    fed.joins("north")
    certificate_path(fed.server, "north").write_bytes(b"{")
    with pytest.raises(FederationError, match="the name north is taken"):
        fed.admits(fed.request_join("north", folder="new"))
    assert certificate_statuses(fed.server)[1].remark == "its certificate is damaged; revoke it"
    revoke_site(fed.kit, "north")
    fed.admits(create_join_request(fed.folder / "new"))
    assert not list((fed.server / ENDED_FOLDER).glob("*"))


def test_a_certificate_under_another_name_is_nobodys(fed):
    fed.joins("north")
    certificate_path(fed.server, "south").write_bytes(certificate_path(fed.server, "north").read_bytes())
    with pytest.raises(DataError, match="is the certificate of north"):
        current_certificate(fed.server, "south")


def test_the_server_renews_its_certificate_under_the_root_that_sites_know(fed):
    root, old = (fed.server / "ca.crt").read_bytes(), (fed.server / "server.pem").read_bytes()
    for name, data in create_certificates("127.0.0.1", datetime.now(UTC), 5).items():
        (fed.server / name).write_bytes(data)
    assert server_days_left(fed.server) == 4
    assert "renew it soon: fedvlm deploy renew" in describe_server_expiry(fed.kit)[0]
    root = (fed.server / "ca.crt").read_bytes()
    assert renew_server_certificate(fed.kit) == 364
    assert (fed.server / "ca.crt").read_bytes() == root
    assert (fed.server / "server.pem").read_bytes() != old
    assert certificate_expiry(fed.server / "ca.crt") > datetime.now(UTC) + timedelta(days=3000)


def test_a_server_without_its_root_key_cannot_renew(fed):
    (fed.server / "ca.key").unlink()
    with pytest.raises(SettingsError, match="there is no .*ca.key.*make new kits"):
        renew_server_certificate(fed.kit)


def run(monkeypatch, capsys, *words, answer=""):
    monkeypatch.setattr(sys, "argv", ["fedvlm", "deploy", *(str(word) for word in words)])
    monkeypatch.setattr("typer.confirm", lambda text: answer == "y")
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    out = capsys.readouterr()
    return code, out.out + out.err


def test_the_commands_take_a_site_from_its_request_to_its_end(tmp_path, monkeypatch, capsys):
    def invoke(*words, answer=""):
        return run(monkeypatch, capsys, *words, answer=answer)

    server, north = tmp_path / "fed" / "server", tmp_path / "north"
    code, text = invoke("init", tmp_path / "fed")
    assert code == 0 and "invitation.json: send this to each site" in text and "rehears" not in text
    invitation = server / INVITATION_FILE
    code, text = invoke("join-request", north, "--name", "north", "--invitation", invitation)
    fingerprint = text.strip().rpartition(": ")[2]
    assert code == 0 and "the private key stays at this site" in text
    code, text = invoke("admit", server, north / JOIN_REQUEST_FILE, answer="n")
    assert code == 2 and fingerprint in text and "north is not admitted" in text
    assert read_server(server).sites == ()
    code, text = invoke("admit", server, north / JOIN_REQUEST_FILE, answer="y")
    assert code == 0 and fingerprint in text and "north is new here" in text
    code, text = invoke("accept", north, server / "sites" / "north.json")
    assert code == 0 and fingerprint in text and "more days" in text
    code, text = invoke("renew", north)
    assert code == 0 and fingerprint not in text
    code, text = invoke("admit", server, north / JOIN_REQUEST_FILE, "--yes")
    assert code == 0 and "north renews its key" in text
    code, text = invoke("accept", north, server / "sites" / "north.json")
    assert code == 0
    for folder in (server, north):
        code, text = invoke("keys", folder)
        assert code == 0 and "days left" in text and "north" in text
    code, text = invoke("revoke", server, "north")
    assert code == 0 and "revoked from its next message on" in text
    code, text = invoke("renew", server)
    assert code == 0 and "after the next start" in text
    code, text = invoke("keys", tmp_path)
    assert code == 2 and "neither a server's folder nor a site's" in text


def test_ready_kits_are_said_to_be_for_rehearsals(tmp_path, monkeypatch, capsys):
    code, text = run(monkeypatch, capsys, "init", tmp_path / "fed", "--sites", "a,b")
    assert code == 0 and "ready kits are for rehearsals" in text


def test_a_site_of_a_ready_kit_can_make_a_key_of_its_own(tmp_path):
    server, kit = create_kits(tmp_path / "fed", ["a"], "127.0.0.1", 8443)
    original_key = (kit / "key").read_bytes()
    server_kit = read_server(server)
    accept_certificate(kit, admit_site(server_kit, read_request(server_kit, create_join_request(kit).path)))
    assert (kit / "key").read_bytes() != original_key and read_own_certificate(kit).site == "a"
