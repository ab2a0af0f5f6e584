"""A site joins with a key of its own, renews it and leaves; nobody gets in by another's name."""

import json
import stat

import pytest
from joining import ADDRESS, Joining

from fedvlm.deploy import admission, membership
from fedvlm.deploy.admission import NEXT, REQUEST, accept, join_request, read_request, revoke
from fedvlm.deploy.keys import Signer, certificates, key_pair
from fedvlm.deploy.kits import INVITATION, read_site
from fedvlm.deploy.membership import issue, member, own, place
from fedvlm.deploy.serve import serve
from fedvlm.deploy.standing import server_days_in_words, standings
from fedvlm.engines.flower.wire import Parcel
from fedvlm.errors import DataError, FederationError, SettingsError


@pytest.fixture
def fed(tmp_path):
    return Joining(tmp_path)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_site_joins_in_three_steps_and_its_private_key_never_leaves(fed):
    request = fed.asks("north")
    hidden = (fed.folder / "north" / NEXT).read_bytes()
    assert b"PRIVATE" in hidden and b"PRIVATE" not in request.path.read_bytes()
    sent = fed.admits(request)
    assert b"PRIVATE" not in sent.read_bytes() and fed.kit.sites == ("north",)
    one = accept(fed.folder / "north", sent)
    assert (fed.folder / "north" / "key").read_bytes() == hidden
    assert not any(hidden in data for data in files(fed.server).values())
    assert own(fed.folder / "north") == one and one.days in (364, 365)
    site = read_site(fed.folder / "north")
    assert (site.name, site.address) == ("north", ADDRESS)
    assert (site.folder / "policy.toml").exists() and not (site.folder / REQUEST).exists()


def test_a_kit_from_admit_says_certificate_root_address_and_names_only(fed):
    words = json.loads(fed.admits(fed.asks("north")).read_text())
    assert set(words) == {*membership.WORDS, "kind", "checksum", "signature"}


def test_both_sides_read_out_the_same_fingerheardand_nobody_else_has_it(fed):
    north, south = fed.asks("north"), fed.asks("south")
    shown = read_request(fed.kit, north.path).fingerprint
    assert shown == north.fingerprint != south.fingerprint
    assert [len(word) for word in shown.split()] == [4] * 6
    one = accept(fed.folder / "north", fed.admits(north))
    [_, there], [here] = standings(fed.server), standings(fed.folder / "north")
    assert one.fingerprint == there.fingerprint == here.fingerprint == shown


def test_a_false_invitation_shows_in_the_fingerprint(fed):
    """Whoever changes the root or the server's key on the way cannot keep what is read out."""
    words = json.loads((fed.server / INVITATION).read_text())
    seen = set()
    for change in (
        {},
        {"ca": certificates("127.0.0.1")["ca.crt"].decode()},
        {"server": key_pair()[1].decode()},
    ):
        path = fed.folder / "sent.json"
        path.write_text(json.dumps({**words, **change}))
        one = join_request(fed.folder / f"site{len(seen)}", path, "north")
        seen.add(membership.fingerprint(one.federation, "north", "the same key"))
    assert len(seen) == 3


def test_what_holds_keys_and_certificates_is_its_owners(fed):
    fed.asks("south")
    folder = fed.joins("north")
    names = [folder / "key", folder / membership.NAME, fed.folder / "south" / NEXT]
    names += [fed.folder / "south" / REQUEST, place(fed.server, "north"), fed.server / "ca.key"]
    assert all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in names)
    assert all(stat.S_IMODE(one.stat().st_mode) == 0o700 for one in (folder, fed.server))


def test_asking_again_is_the_same_request(fed):
    first = fed.asks("north")
    assert join_request(fed.folder / "north") == first
    with pytest.raises(SettingsError, match="asks for north already"):
        fed.asks("south", folder="north")


def test_a_name_and_an_invitation_are_needed_to_join(fed):
    with pytest.raises(SettingsError, match="--name NAME --invitation"):
        join_request(fed.folder / "north")
    with pytest.raises(SettingsError, match="'a/b' does not fit"):
        fed.asks("a/b", folder="x")
    with pytest.raises(DataError, match="is no invitation"):
        join_request(fed.folder / "north", fed.asks("south").path, "north")
    assert not (fed.folder / "north").exists()


# Three adversaries.


def test_an_outsider_cannot_send_a_request_that_its_key_did_not_sign(fed):
    """Nor one for a key that somebody else holds."""
    words = json.loads(fed.asks("north").path.read_text())
    path = fed.folder / "sent.json"
    other = key_pair()[1].decode()
    for change in ({"signature": ""}, {"site": "south"}, {"key": other}, {"signature": "AAAA"}):
        path.write_text(json.dumps({**words, **change}))
        with pytest.raises(DataError, match="not signed by the key that it names.*send it again"):
            read_request(fed.kit, path)
    assert fed.kit.sites == ()


def test_a_site_cannot_get_anothers_name(fed):
    """Neither with a request of its own, nor with one that its valid key vouches for."""
    fed.joins("north")
    south = fed.joins("south")
    before = member(fed.server, "north")
    with pytest.raises(FederationError, match="the name north is taken.*deploy revoke"):
        fed.admits(fed.asks("north", folder="thief"))
    with pytest.raises(FederationError, match="the name north is taken"):
        fed.admits(fed.asks("NORTH", folder="thief2"))
    request = join_request(south)
    words = {"federation": request.federation, "site": "north", "key": request.key}
    vouched = Signer(south / "key", admission.RENEWAL)(Parcel(words)).about["signature"]
    sign = Signer(south / NEXT, admission.PREFIX)
    about = sign(Parcel({**words, "renewal": vouched, "kind": "request"})).about
    membership.write_words(request.path, "request", about)
    with pytest.raises(FederationError, match="the name north is taken"):
        read_request(fed.kit, request.path)
    assert member(fed.server, "north") == before


def test_a_revoked_site_does_not_come_back_by_what_it_has(fed):
    request = fed.asks("north")
    old = request.path.read_bytes()
    accept(fed.folder / "north", fed.admits(request))
    revoke(fed.kit, "north")
    assert fed.kit.sites == () and membership.why_out(fed.server, "north") == "its key was revoked"
    request.path.write_bytes(old)  # it sends its first request once more
    with pytest.raises(FederationError, match="was revoked or replaced, and does not come back"):
        read_request(fed.kit, request.path)
    request.path.unlink()
    again = read_request(fed.kit, join_request(fed.folder / "north").path)
    assert again.note.startswith("north had a key that was revoked here")  # so people decide


# Bad input.


def test_a_request_for_another_federation_is_refused(fed, tmp_path):
    (tmp_path / "two").mkdir()
    other = Joining(tmp_path / "two")
    with pytest.raises(FederationError, match="is for another federation.*invitation.json"):
        read_request(fed.kit, other.asks("north").path)
    fed.asks("north")
    sent = other.admits(join_request(other.folder / "north"))
    with pytest.raises(FederationError, match="of another federation than the one"):
        accept(fed.folder / "north", sent)


def test_a_request_is_admitted_once(fed):
    request = fed.asks("north")
    sent = fed.admits(request)
    with pytest.raises(FederationError, match="this very key was admitted as north") as error:
        fed.admits(request)
    assert str(sent) in str(error.value)


def test_a_certificate_of_another_site_is_not_taken(fed):
    fed.asks("south")
    with pytest.raises(FederationError, match="for site north with a key that is not in"):
        accept(fed.folder / "south", fed.admits(fed.asks("north")))
    with pytest.raises(SettingsError, match="has not asked to join"):
        accept(fed.folder / "nobody", place(fed.server, "north"))


@pytest.mark.parametrize("name", [*membership.WORDS, "signature"])
def test_no_word_of_a_certificate_can_be_changed(fed, name):
    sent = fed.admits(fed.asks("north"))
    words = json.loads(sent.read_text())
    other = {"until": "2100-01-01T00:00:00+00:00", "key": key_pair()[1].decode()}
    sent.write_text(json.dumps({**words, name: other.get(name, words[name][:-2])}))
    with pytest.raises(DataError, match="not signed by this federation's server"):
        accept(fed.folder / "north", sent)
    with pytest.raises(DataError, match="not signed by this federation's server"):
        member(fed.server, "north")
    assert not (fed.folder / "north" / "key").exists()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"{}", b"\xff" * 9, b"[" * 60_000, b" " * 70_000]
)
def test_a_file_that_is_no_request_or_certificate_is_named(fed, data):
    path = fed.folder / "sent.json"
    path.write_bytes(data)
    fed.asks("north")
    for read in (
        lambda: read_request(fed.kit, path),
        lambda: accept(fed.folder / "north", path),
        lambda: join_request(fed.folder / "new", path, "new"),
    ):
        with pytest.raises(DataError, match="sent.json"):
            read()


def test_an_expired_certificate_is_refused_with_the_remedy(fed):
    folder = fed.joins("north")
    fed.expires("north")
    with pytest.raises(FederationError, match=r"has expired on .*fedvlm deploy renew"):
        serve(read_site(folder), print)
    assert "has expired" in membership.why_out(fed.server, "north")
    assert any("north: its certificate has expired" in one for one in server_days_in_words(fed.kit))
    request = join_request(folder)
    assert request.renewal == ""  # an expired key vouches for nobody
    with pytest.raises(FederationError, match="let it expire, end that: fedvlm deploy revoke"):
        fed.admits(request)
    revoke(fed.kit, "north")
    accept(folder, fed.admits(request))
    assert own(folder).days in (364, 365)


def test_an_expired_certificate_is_not_taken(fed):
    request = fed.asks("north")
    sent = fed.admits(request)
    issue(fed.server, ADDRESS, "north", request.key.encode(), days=-1)
    with pytest.raises(FederationError, match="has expired.*have the server admit a new request"):
        accept(fed.folder / "north", sent)


def test_a_kit_without_a_certificate_is_told_how_to_get_one(fed):
    fed.asks("north")
    with pytest.raises(SettingsError, match="no server has admitted this site.*join-request"):
        own(fed.folder / "north")
