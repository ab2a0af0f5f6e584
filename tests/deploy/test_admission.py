"""A site joins with a key of its own, renews it and leaves; nobody gets in by another's name."""

import json
import stat
import sys
from datetime import UTC, datetime, timedelta

import pytest

from fedvlm.cli import main
from fedvlm.deploy import admission, membership
from fedvlm.deploy.admission import NEXT, REQUEST, accept, admit, join_request, read_request, revoke
from fedvlm.deploy.keys import Signer, certificates, key_pair, paper_until
from fedvlm.deploy.kits import INVITATION, init, read_server, read_site
from fedvlm.deploy.membership import ENDED, issue, member, own, place
from fedvlm.deploy.serve import serve
from fedvlm.deploy.standing import renew_server, server_days, server_days_in_words, standings
from fedvlm.engines.flower.wire import Parcel
from fedvlm.errors import DataError, FederationError, SettingsError

ADDRESS = "127.0.0.1:8443"


class Federation:
    def __init__(self, folder):
        self.folder = folder
        [self.server] = init(folder / "fed", [], "127.0.0.1", 8443)

    @property
    def kit(self):
        return read_server(self.server)

    def asks(self, name, folder=None):
        """A site's request, in a folder of its own."""
        place = self.folder / (folder or name)
        return join_request(place, self.server / INVITATION, name)

    def admits(self, request):
        return admit(self.kit, read_request(self.kit, request.path))

    def joins(self, name):
        """All three steps."""
        accept(self.folder / name, self.admits(self.asks(name)))
        return self.folder / name

    def expires(self, name):
        """A certificate of yesterday for the key that the site has, at both places."""
        key = member(self.server, name).key.encode()
        issue(self.server, ADDRESS, name, key, days=-1)
        (self.folder / name / membership.NAME).write_bytes(place(self.server, name).read_bytes())


@pytest.fixture
def fed(tmp_path):
    return Federation(tmp_path)


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
    other = Federation(tmp_path / "two")
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


# Renewal and revocation.


def test_a_renewed_site_has_a_new_key_under_its_name_and_the_old_one_ends(fed):
    folder = fed.joins("north")
    (folder / "policy.toml").write_text("# ours\n")
    old, before = (folder / "key").read_bytes(), member(fed.server, "north")
    request = join_request(folder)
    assert own(folder) == before  # until the server has answered, it goes on with the old one
    assert read_request(fed.kit, request.path).note == "north renews its key; the old one ends"
    accept(folder, fed.admits(request))
    assert (folder / "key").read_bytes() != old and not (folder / NEXT).exists()
    assert own(folder).key == member(fed.server, "north").key == request.key != before.key
    assert (folder / "policy.toml").read_text() == "# ours\n" and fed.kit.sites == ("north",)
    assert [one.note for one in standings(fed.server)] == ["", "", "revoked or replaced"]


def test_an_older_renewal_cannot_be_replayed(fed):
    folder = fed.joins("north")
    first = join_request(folder)
    kept = first.path.read_bytes()
    first.path.unlink()
    (folder / NEXT).unlink()  # lost; the site asks once more
    accept(folder, fed.admits(join_request(folder)))
    path = fed.folder / "kept.json"
    path.write_bytes(kept)
    with pytest.raises(FederationError, match="the name north is taken"):
        read_request(fed.kit, path)


def test_a_stop_while_a_certificate_is_put_in_is_made_good_by_the_same_command(fed, monkeypatch):
    folder = fed.joins("north")
    sent = fed.admits(join_request(folder))

    def stop(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(folder), "replace", stop)  # which is how the key is moved
    with pytest.raises(KeyboardInterrupt):
        accept(folder, sent)
    monkeypatch.undo()
    with pytest.raises(SettingsError, match="is of another key than.*deploy accept"):
        own(folder)
    accept(folder, sent)
    assert own(folder).key == member(fed.server, "north").key


def test_a_request_that_changes_after_it_was_compared_is_not_admitted(fed):
    one = read_request(fed.kit, fed.asks("north").path)
    one.path.write_bytes(fed.asks("north", folder="thief").path.read_bytes())
    with pytest.raises(FederationError, match="was changed meanwhile"):
        admit(fed.kit, one)


def test_only_a_site_can_be_revoked(fed):
    fed.joins("north")
    with pytest.raises(SettingsError, match="'nort'; did you mean 'north'"):
        revoke(fed.kit, "nort")


def test_a_damaged_certificate_holds_its_name_until_it_is_revoked(fed):
    fed.joins("north")
    place(fed.server, "north").write_bytes(b"{")
    with pytest.raises(FederationError, match="the name north is taken"):
        fed.admits(fed.asks("north", folder="new"))
    assert standings(fed.server)[1].note == "its certificate is damaged; revoke it"
    revoke(fed.kit, "north")
    fed.admits(join_request(fed.folder / "new"))
    assert not list((fed.server / ENDED).glob("*"))


def test_a_certificate_under_another_name_is_nobodys(fed):
    fed.joins("north")
    place(fed.server, "south").write_bytes(place(fed.server, "north").read_bytes())
    with pytest.raises(DataError, match="is the certificate of north"):
        member(fed.server, "south")


def test_the_server_renews_its_certificate_under_the_root_that_sites_know(fed):
    root, old = (fed.server / "ca.crt").read_bytes(), (fed.server / "server.pem").read_bytes()
    for name, data in certificates("127.0.0.1", datetime.now(UTC), 5).items():
        (fed.server / name).write_bytes(data)
    assert server_days(fed.server) == 4
    assert "renew it soon: fedvlm deploy renew" in server_days_in_words(fed.kit)[0]
    root = (fed.server / "ca.crt").read_bytes()
    assert renew_server(fed.kit) == 364
    assert (fed.server / "ca.crt").read_bytes() == root
    assert (fed.server / "server.pem").read_bytes() != old
    assert paper_until(fed.server / "ca.crt") > datetime.now(UTC) + timedelta(days=3000)


def test_a_server_without_its_root_key_cannot_renew(fed):
    (fed.server / "ca.key").unlink()
    with pytest.raises(SettingsError, match="there is no .*ca.key.*make new kits"):
        renew_server(fed.kit)


# The commands.


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
    def say(*words, answer=""):
        return run(monkeypatch, capsys, *words, answer=answer)

    server, north = tmp_path / "fed" / "server", tmp_path / "north"
    code, text = say("init", tmp_path / "fed")
    assert code == 0 and "invitation.json: to each site" in text and "rehears" not in text
    invitation = server / INVITATION
    code, text = say("join-request", north, "--name", "north", "--invitation", invitation)
    heard = text.strip().rpartition(": ")[2]
    assert code == 0 and "the key stays here" in text
    code, text = say("admit", server, north / REQUEST, answer="n")
    assert code == 2 and heard in text and "north is not admitted" in text
    assert read_server(server).sites == ()
    code, text = say("admit", server, north / REQUEST, answer="y")
    assert code == 0 and heard in text and "north is new here" in text
    code, text = say("accept", north, server / "sites" / "north.json")
    assert code == 0 and heard in text and "more days" in text
    code, text = say("renew", north)
    assert code == 0 and heard not in text
    code, text = say("admit", server, north / REQUEST, "--yes")
    assert code == 0 and "north renews its key" in text
    code, text = say("accept", north, server / "sites" / "north.json")
    assert code == 0
    for folder in (server, north):
        code, text = say("keys", folder)
        assert code == 0 and "days left" in text and "north" in text
    code, text = say("revoke", server, "north")
    assert code == 0 and "out from its next message on" in text
    code, text = say("renew", server)
    assert code == 0 and "from its next start on" in text
    code, text = say("keys", tmp_path)
    assert code == 2 and "no server's folder and no site's" in text


def test_ready_kits_are_said_to_be_for_rehearsals(tmp_path, monkeypatch, capsys):
    code, text = run(monkeypatch, capsys, "init", tmp_path / "fed", "--sites", "a,b")
    assert code == 0 and "ready kits are for rehearsals" in text


def test_a_site_of_a_ready_kit_can_make_a_key_of_its_own(tmp_path):
    server, kit = init(tmp_path / "fed", ["a"], "127.0.0.1", 8443)
    given = (kit / "key").read_bytes()
    one = read_server(server)
    accept(kit, admit(one, read_request(one, join_request(kit).path)))
    assert (kit / "key").read_bytes() != given and own(kit).site == "a"
