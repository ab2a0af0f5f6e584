"""A site joins with a key of its own, renews it and leaves; nobody gets in by another's name."""

import json
import stat

import pytest

from fedvlm.deploy.identity import certificates, enrolment
from fedvlm.deploy.identity.certificates import (
    certificate_path,
    current_certificate,
    issue_certificate,
    read_own_certificate,
)
from fedvlm.deploy.identity.enrolment import (
    JOIN_REQUEST_FILE,
    NEXT_KEY_FILE,
    accept_certificate,
    certificate_statuses,
    create_join_request,
    describe_server_expiry,
    read_request,
    revoke_site,
)
from fedvlm.deploy.identity.keys import Signer, create_certificates, create_key_pair
from fedvlm.deploy.kits import INVITATION_FILE, read_site
from fedvlm.deploy.site.service import serve_site
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import DataError, FederationError, SettingsError
from tests.helpers.joining import ADDRESS, Joining


@pytest.fixture
def fed(tmp_path):
    return Joining(tmp_path)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_site_joins_in_three_steps_and_its_private_key_never_leaves(fed):
    request = fed.request_join("north")
    hidden = (fed.folder / "north" / NEXT_KEY_FILE).read_bytes()
    assert b"PRIVATE" in hidden and b"PRIVATE" not in request.path.read_bytes()
    sent = fed.admits(request)
    assert b"PRIVATE" not in sent.read_bytes() and fed.kit.sites == ("north",)
    certificate = accept_certificate(fed.folder / "north", sent)
    assert (fed.folder / "north" / "key").read_bytes() == hidden
    assert not any(hidden in data for data in files(fed.server).values())
    assert read_own_certificate(fed.folder / "north") == certificate and certificate.days_left in (364, 365)
    site = read_site(fed.folder / "north")
    assert (site.name, site.address) == ("north", ADDRESS)
    assert (site.folder / "policy.toml").exists() and not (site.folder / JOIN_REQUEST_FILE).exists()


def test_a_kit_from_admit_says_certificate_root_address_and_names_only(fed):
    words = json.loads(fed.admits(fed.request_join("north")).read_text())
    assert set(words) == {*certificates.CERTIFICATE_FIELDS, "kind", "checksum", "signature"}


def test_both_sides_read_out_the_same_fingerprint_and_nobody_else_has_it(fed):
    north, south = fed.request_join("north"), fed.request_join("south")
    server_fingerprint = read_request(fed.kit, north.path).fingerprint
    assert server_fingerprint == north.fingerprint != south.fingerprint
    assert [len(word) for word in server_fingerprint.split()] == [4] * 6
    certificate = accept_certificate(fed.folder / "north", fed.admits(north))
    [_, server_status], [site_status] = certificate_statuses(fed.server), certificate_statuses(fed.folder / "north")
    assert certificate.fingerprint == server_status.fingerprint == site_status.fingerprint == server_fingerprint


def test_a_false_invitation_shows_in_the_fingerprint(fed):
    """Whoever changes the root or the server's key on the way cannot keep what is read out."""
    words = json.loads((fed.server / INVITATION_FILE).read_text())
    fingerprints = set()
    for change in (
        {},
        {"ca": create_certificates("127.0.0.1")["ca.crt"].decode()},
        {"server": create_key_pair()[1].decode()},
    ):
        path = fed.folder / "sent.json"
        path.write_text(json.dumps({**words, **change}))
        request = create_join_request(fed.folder / f"site{len(fingerprints)}", path, "north")
        fingerprints.add(certificates.key_fingerprint(request.federation, "north", "the same key"))
    assert len(fingerprints) == 3


def test_what_holds_keys_and_certificates_is_its_owners(fed):
    fed.request_join("south")
    folder = fed.joins("north")
    names = [folder / "key", folder / certificates.CERTIFICATE_FILE, fed.folder / "south" / NEXT_KEY_FILE]
    names += [fed.folder / "south" / JOIN_REQUEST_FILE, certificate_path(fed.server, "north"), fed.server / "ca.key"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in names)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (folder, fed.server))


def test_asking_again_is_the_same_request(fed):
    first = fed.request_join("north")
    assert create_join_request(fed.folder / "north") == first
    with pytest.raises(SettingsError, match="asks for north already"):
        fed.request_join("south", folder="north")


def test_a_name_and_an_invitation_are_needed_to_join(fed):
    with pytest.raises(SettingsError, match="--name NAME --invitation"):
        create_join_request(fed.folder / "north")
    with pytest.raises(SettingsError, match="'a/b' is invalid"):
        fed.request_join("a/b", folder="x")
    with pytest.raises(DataError, match="is not a valid invitation"):
        create_join_request(fed.folder / "north", fed.request_join("south").path, "north")
    assert not (fed.folder / "north").exists()


# Three adversaries.


def test_an_outsider_cannot_send_a_request_that_its_key_did_not_sign(fed):
    """Nor one for a key that somebody else holds."""
    words = json.loads(fed.request_join("north").path.read_text())
    path = fed.folder / "sent.json"
    foreign_key = create_key_pair()[1].decode()
    for change in ({"signature": ""}, {"site": "south"}, {"key": foreign_key}, {"signature": "AAAA"}):
        path.write_text(json.dumps({**words, **change}))
        with pytest.raises(DataError, match="not signed by the key that it names.*send it again"):
            read_request(fed.kit, path)
    assert fed.kit.sites == ()


def test_a_site_cannot_get_anothers_name(fed):
    """Neither with a request of its own, nor with one that its valid key vouches for."""
    fed.joins("north")
    south = fed.joins("south")
    before = current_certificate(fed.server, "north")
    with pytest.raises(FederationError, match="the name north is taken.*deploy revoke"):
        fed.admits(fed.request_join("north", folder="thief"))
    with pytest.raises(FederationError, match="the name north is taken"):
        fed.admits(fed.request_join("NORTH", folder="thief2"))
    request = create_join_request(south)
    words = {"federation": request.federation, "site": "north", "key": request.key}
    vouched = Signer(south / "key", enrolment.RENEWAL_PREFIX)(Message(words)).header["signature"]
    sign = Signer(south / NEXT_KEY_FILE, enrolment.REQUEST_PREFIX)
    about = sign(Message({**words, "renewal": vouched, "kind": "request"})).header
    certificates.write_document(request.path, "request", about)
    with pytest.raises(FederationError, match="the name north is taken"):
        read_request(fed.kit, request.path)
    assert current_certificate(fed.server, "north") == before


def test_a_revoked_site_does_not_come_back_by_what_it_has(fed):
    request = fed.request_join("north")
    old = request.path.read_bytes()
    accept_certificate(fed.folder / "north", fed.admits(request))
    revoke_site(fed.kit, "north")
    assert fed.kit.sites == () and certificates.exclusion_reason(fed.server, "north") == "its key was revoked"
    request.path.write_bytes(old)  # it sends its first request once more
    with pytest.raises(FederationError, match="was revoked or replaced, and is never admitted again"):
        read_request(fed.kit, request.path)
    request.path.unlink()
    again = read_request(fed.kit, create_join_request(fed.folder / "north").path)
    assert again.remark.startswith("north had a key that was revoked here")  # so people decide


# Bad input.


def test_a_request_for_another_federation_is_refused(fed, tmp_path):
    (tmp_path / "two").mkdir()
    second_federation = Joining(tmp_path / "two")
    with pytest.raises(FederationError, match="is for another federation.*invitation.json"):
        read_request(fed.kit, second_federation.request_join("north").path)
    fed.request_join("north")
    sent = second_federation.admits(create_join_request(second_federation.folder / "north"))
    with pytest.raises(FederationError, match="another federation than the one"):
        accept_certificate(fed.folder / "north", sent)


def test_a_request_is_admitted_once(fed):
    request = fed.request_join("north")
    sent = fed.admits(request)
    with pytest.raises(FederationError, match="this key is already admitted as north") as error:
        fed.admits(request)
    assert str(sent) in str(error.value)


def test_a_certificate_of_another_site_is_not_taken(fed):
    fed.request_join("south")
    with pytest.raises(FederationError, match="for site north with a key that is not in"):
        accept_certificate(fed.folder / "south", fed.admits(fed.request_join("north")))
    with pytest.raises(SettingsError, match="has not asked to join"):
        accept_certificate(fed.folder / "nobody", certificate_path(fed.server, "north"))


@pytest.mark.parametrize("name", [*certificates.CERTIFICATE_FIELDS, "signature"])
def test_no_word_of_a_certificate_can_be_changed(fed, name):
    sent = fed.admits(fed.request_join("north"))
    words = json.loads(sent.read_text())
    changes = {"valid_until": "2100-01-01T00:00:00+00:00", "key": create_key_pair()[1].decode()}
    sent.write_text(json.dumps({**words, name: changes.get(name, words[name][:-2])}))
    with pytest.raises(DataError, match="not signed by this federation's server"):
        accept_certificate(fed.folder / "north", sent)
    with pytest.raises(DataError, match="not signed by this federation's server"):
        current_certificate(fed.server, "north")
    assert not (fed.folder / "north" / "key").exists()


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"{}", b"\xff" * 9, b"[" * 60_000, b" " * 70_000])
def test_a_file_that_is_no_request_or_certificate_is_named(fed, data):
    path = fed.folder / "sent.json"
    path.write_bytes(data)
    fed.request_join("north")
    for read in (
        lambda: read_request(fed.kit, path),
        lambda: accept_certificate(fed.folder / "north", path),
        lambda: create_join_request(fed.folder / "new", path, "new"),
    ):
        with pytest.raises(DataError, match="sent.json"):
            read()


def test_an_expired_certificate_is_refused_with_the_remedy(fed):
    folder = fed.joins("north")
    fed.expires("north")
    with pytest.raises(FederationError, match=r"has expired on .*fedvlm deploy renew"):
        serve_site(read_site(folder), print)
    assert "has expired" in certificates.exclusion_reason(fed.server, "north")
    assert any("north: its certificate has expired" in line for line in describe_server_expiry(fed.kit))
    request = create_join_request(folder)
    assert request.renewal == ""  # an expired key vouches for nobody
    with pytest.raises(FederationError, match="let it expire, end that: fedvlm deploy revoke"):
        fed.admits(request)
    revoke_site(fed.kit, "north")
    accept_certificate(folder, fed.admits(request))
    assert read_own_certificate(folder).days_left in (364, 365)


def test_an_expired_certificate_is_not_taken(fed):
    request = fed.request_join("north")
    sent = fed.admits(request)
    issue_certificate(fed.server, ADDRESS, "north", request.key.encode(), days=-1)
    with pytest.raises(FederationError, match="has expired.*have the server admit a new request"):
        accept_certificate(fed.folder / "north", sent)


def test_a_kit_without_a_certificate_is_told_how_to_get_one(fed):
    fed.request_join("north")
    with pytest.raises(SettingsError, match="no server has admitted this site.*join-request"):
        read_own_certificate(fed.folder / "north")
