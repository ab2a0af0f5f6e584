"""A server, or a member, that deviates from a verified sum gets nothing from an honest site.

Every attack meets the site as it is; most also meet a site whose check is switched off, where the refusal is gone.
"""

import json
from base64 import b64encode
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import torch

from fedvlm.deploy import statements
from fedvlm.deploy.identity.keys import Signer, create_key_pair, sign_bytes
from fedvlm.deploy.kits import read_site, restore_backup, write_backup
from fedvlm.deploy.messages import training_spec
from fedvlm.deploy.plan import Member, hash_tensors
from fedvlm.deploy.server.sums import SumEngine
from fedvlm.deploy.site import peers as site_peers
from fedvlm.deploy.site import sums
from fedvlm.deploy.site.service import Site
from fedvlm.deploy.statements import UploadStatement, hash_vector, initial_shared, next_state, open_sum, to_vector
from fedvlm.engines.flower import import_flower
from fedvlm.engines.flower.client import to_arrays
from fedvlm.engines.flower.engine import NODE_UNAVAILABLE, local_grid
from fedvlm.engines.flower.messages import Message, checksum
from fedvlm.runner.prepare import trainings_of

NAMES = ["art", "photo", "sketch"]
FEDAVG = {"name": "fedavg", "rounds": 3, "lr": 1e-2}
CHANNEL = {"verified": True, "clip": 1.0}


class Server:
    """Drive the three sites step by step with the server's key, so that any message can be changed."""

    def __init__(self, place, method=FEDAVG, channel=CHANNEL):
        self.place, self.settings = place, place.settings(method, channel=channel)
        [training] = trainings_of(self.settings, {name: name for name in NAMES}, 0)
        size = {"identity": self.settings.identity(), "purpose": "", "contact": "", "trainings": 1, "rounds": 3}
        spec = training_spec(self.settings, training, 0)
        spec = spec if "run" in spec else {**spec, "run": size}
        self.engine = SumEngine(local_grid(place.desks), place.kit, spec, {})
        self.engine.wait_for_sites()
        self.plan, self.tensors = self.engine._propose()
        self.n, self.agreements, self.uploads, self.state = 0, [], {}, {}

    def ask(self, name, kind, number=0, arrays=None, plain=False, **header):
        """Return the reply of a site, or what it logged of its refusal."""
        self.n += 1
        words = {"kind": kind, "training": self.engine.training, "round": number, "client": name, **header}
        request = Message({**words, "nonce": str(self.n)}, to_arrays(arrays or {}))
        reply, _ = self.place.desks[name].answer(self.engine.sign(request), Message({}))
        if "error" not in reply.header:
            return reply
        lines = (self.place.desks[name].kit.folder / "events.jsonl").read_text().splitlines()
        said = [json.loads(line).get("text", "") for line in lines if '"said"' in line]
        return f"{reply.header['error']['code']}: {said[-1]}"

    def agree(self, name, plan=None, tensors=None):
        plan = plan or self.plan
        tensors = self.tensors if tensors is None else tensors
        return self.ask(name, "plan", 0, tensors, plan=plan.to_bytes().decode())

    def agree_all(self):
        self.agreements = [self.agree(name).header["statement"] for name in NAMES]
        return self

    def count(self, name, agreements=None):
        return self.ask(name, "counts", 0, statements=agreements or self.agreements)

    def count_all(self):
        self.uploads = {name: self.count(name) for name in NAMES}
        self.state = initial_shared(self.settings.method, self.frozen, 3)
        return self

    @property
    def frozen(self):
        site = self.place.desks["art"]
        return site.site_trainings[self.engine.training].world.frozen

    def relayed(self, uploads=None, state=None, entries=None):
        uploads = uploads or self.uploads
        state = self.state if state is None else state
        arrays = {f"upload/{name}": torch.from_numpy(reply.arrays["masked"]) for name, reply in uploads.items()}
        arrays |= {f"state/{key}": value for key, value in state.items()}
        entries = entries or [reply.header["statement"] for reply in uploads.values()]
        return {"arrays": arrays, "statements": entries}

    def round(self, name, number, **changes):
        return self.ask(name, "sum", number, **self.relayed(**changes))

    def round_all(self, number):
        self.uploads = {name: self.round(name, number) for name in NAMES}
        layout = self.uploads["art"].header["statement"]["layout"]
        vectors = [to_vector(reply.arrays["masked"]) for reply in self.uploads.values()]
        total, _ = open_sum(vectors, layout, statements.is_total(self.settings))
        self.state = next_state(self.settings, self.state, total, NAMES)
        return self

    def begin(self, rounds=0):
        self.agree_all().count_all()
        for number in range(rounds):
            self.round_all(number)
        return self

    def key(self, name):
        """The key of a member that colludes."""
        return Signer(self.place.site(name) / "key")


@pytest.fixture
def server(place):
    return Server(place)


def moved(state, by=1e-3):
    return {key: value + by for key, value in state.items()}


def with_statement(server, name, **changes):
    """A statement of a colluding member about another upload, properly signed."""
    statement = UploadStatement(**{**server.uploads[name].header["statement"], **changes})
    return statements.sign(statement, server.key(name)).model_dump(mode="json")


def replaced(server, name, vector):
    """The uploads with another one of a colluding member, and the statements."""
    reply = server.uploads[name]
    changed = Message(reply.header, {"masked": vector})
    statement = with_statement(server, name, upload=hash_vector(to_vector(vector)))
    uploads = {**server.uploads, name: changed}
    entries = [statement if other == name else server.uploads[other].header["statement"] for other in NAMES]
    return {"uploads": uploads, "entries": entries}


def crafted_first_state(server):
    return server.begin().round("art", 0, state=moved(server.state))


def crafted_state(server):
    return server.begin(1).round("art", 1, state=moved(server.state))


def more_tensors(server):
    return server.begin().round("art", 0, state={**server.state, "open": torch.ones(4)})


def other_settings(server):
    method = {**server.plan.identity["method"], "lr": 1000.0}
    return server.agree("art", server.plan.model_copy(update={"identity": {**server.plan.identity, "method": method}}))


def other_seed(server):
    return server.agree("art", server.plan.model_copy(update={"seed": 7}))


def decoy_classes(server):
    return server.agree("art", server.plan.model_copy(update={"classes": ["ant", "bee", "cat", "owl"]}))


def changed_texts(server):
    texts = {"text": server.tensors["text"].roll(1, 0)}
    hashes = {"text": hash_tensors({"": texts["text"]})}
    return server.agree("art", server.plan.model_copy(update={"tensors": hashes}), texts)


def texts_of_another_hash(server):
    return server.agree("art", None, {"text": server.tensors["text"] + 1e-6})


def added_reference(server):
    tensors = {**server.tensors, "reference": torch.zeros(3, 16)}
    hashes = {name: hash_tensors({"": value}) for name, value in tensors.items()}
    return server.agree("art", server.plan.model_copy(update={"tensors": hashes}), tensors)


def other_scale(server):
    return server.agree("art", server.plan.model_copy(update={"scale": 1e6}))


def no_deadline(server):
    return server.agree("art", server.plan.model_copy(update={"deadline": "2999-01-01T00:00:00+00:00"}))


def with_members(server, members):
    return server.plan.model_copy(update={"members": tuple(sorted(members, key=lambda member: member.name))})


def invented_member(server):
    puppet = Member(name="zoo", key=create_key_pair()[1].decode())
    return server.agree("art", with_members(server, [*server.plan.members, puppet]))


def swapped_key(server):
    puppet = Member(name="photo", key=create_key_pair()[1].decode())
    others = [member for member in server.plan.members if member.name != "photo"]
    return server.agree("art", with_members(server, [*others, puppet]))


def duplicated_member(server):
    art, photo, _ = server.plan.members
    return server.agree("art", with_members(server, [art, photo, Member(name="photo 2", key=photo.key)]))


def two_members(server):
    return server.agree("art", with_members(server, server.plan.members[:2]))


def split_plans(server):
    """The others agree to another plan than this site."""
    other = server.plan.model_copy(update={"purpose": "another"})
    server.agree_all()
    second = Server(server.place)
    second.plan, second.tensors = other, server.tensors
    entries = [server.agreements[0], *(second.agree(name).header["statement"] for name in NAMES[1:])]
    return server.count("art", entries)


def missing_agreement(server):
    server.agree_all()
    return server.count("art", server.agreements[:2])


def forged_agreement(server):
    """The server signs for a member."""
    server.agree_all()
    entry = {**server.agreements[1], "key": statements.new_session_key()[1]}
    agreement = statements.Agreement(**entry)
    signature = b64encode(sign_bytes(server.engine.sign, agreement.signed_bytes())).decode()
    entries = [server.agreements[0], {**entry, "signature": signature}, server.agreements[2]]
    return server.count("art", entries)


def dropped_upload(server):
    server.begin()
    uploads = {name: server.uploads[name] for name in NAMES[:2]}
    return server.round("art", 0, uploads=uploads)


def changed_upload(server):
    server.begin()
    reply = server.uploads["photo"]
    changed = Message(reply.header, {"masked": reply.arrays["masked"] + 1})
    return server.round("art", 0, uploads={**server.uploads, "photo": changed})


def swapped_uploads(server):
    server.begin()
    photo, sketch = server.uploads["photo"], server.uploads["sketch"]
    uploads = {
        "art": server.uploads["art"],
        "photo": Message(photo.header, sketch.arrays),
        "sketch": Message(sketch.header, photo.arrays),
    }
    return server.round("art", 0, uploads=uploads)


def replayed_uploads(server):
    """Uploads of the first round once more, for the second."""
    server.begin(1)
    first = server.uploads
    server.round_all(1)
    return server.round("art", 2, uploads=first)


def replaced_own_upload(server):
    """Another upload in the name of this site, by its own (restored) key."""
    server.begin()
    vector = server.uploads["art"].arrays["masked"] + 1
    return server.round("art", 0, **replaced(server, "art", vector))


def second_state(server):
    """The same round once more, at another state that a colluding member's second upload leads to."""
    server.begin(1)
    assert not isinstance(server.round("art", 1), str)
    other = replaced(server, "sketch", server.uploads["sketch"].arrays["masked"] + (1 << 26))
    vectors = [to_vector(reply.arrays["masked"]) for reply in other["uploads"].values()]
    total, _ = open_sum(vectors, server.uploads["art"].header["statement"]["layout"], False)
    before = initial_shared(server.settings.method, server.frozen, 3)
    return server.round("art", 1, state=next_state(server.settings, before, total, NAMES), **other)


def two_views(server):
    """A member signs two uploads of a round, and the server shows one to art and the other to the rest."""
    server.begin()
    server.uploads = {name: server.round(name, 0) for name in NAMES}
    layout, before = server.uploads["art"].header["statement"]["layout"], server.state
    views = {
        "art": {},
        "photo": replaced(server, "sketch", server.uploads["sketch"].arrays["masked"] + (1 << 26)),
    }
    replies = {}
    for name, view in views.items():
        uploads = view.get("uploads", server.uploads)
        total, _ = open_sum([to_vector(reply.arrays["masked"]) for reply in uploads.values()], layout, False)
        replies[name] = server.round(name, 1, state=next_state(server.settings, before, total, NAMES), **view)
    assert all(not isinstance(reply, str) for reply in replies.values())
    total, _ = open_sum([to_vector(reply.arrays["masked"]) for reply in server.uploads.values()], layout, False)
    state = next_state(server.settings, before, total, NAMES)
    third = server.round("sketch", 1, state=state)
    server.uploads = {"art": replies["art"], "photo": replies["photo"], "sketch": third}
    return server.round("art", 2, state=state)


def too_many_rounds(server):
    server.begin(3)
    return server.round("art", 3)


def plain_round(server):
    server.agree_all()
    header = {"trains": True, "version": 0, "held": []}
    return server.ask("art", "round", 0, initial_shared(server.settings.method, server.frozen, 3), **header)


def vanished_member(server):
    """After a whole round the server claims that a member has left, and begins again without it."""
    server.begin(1)
    place = server.place
    fourth = Member(name="zoo", key=create_key_pair()[1].decode())
    peer = site_peers.key_fingerprint(server.plan.federation, "zoo", fourth.key)
    site_peers.add_peer(place.site("art"), "zoo", peer, "A. Person")
    others = [member for member in server.plan.members if member.name != "sketch"]
    return server.agree("art", with_members(server, [*others, fourth]))


def garbage_under_the_mask(server):
    """A member's upload is no longer within the clip: the mean is far off."""
    server.begin(1)
    vector = server.uploads["sketch"].arrays["masked"] + np.int64(1 << 45)
    other = replaced(server, "sketch", vector)
    layout = server.uploads["art"].header["statement"]["layout"]
    total, _ = open_sum([to_vector(reply.arrays["masked"]) for reply in other["uploads"].values()], layout, False)
    before = initial_shared(server.settings.method, server.frozen, 3)
    after = server.settings.method.aggregate(before, [total], torch.tensor([3.0]), NAMES)
    return server.round("art", 1, state=after, **other)


def wrong_counts(server):
    server.begin()
    vector = server.uploads["sketch"].arrays["masked"].copy()
    vector += np.int64(1 << 50)
    return server.round("art", 0, **replaced(server, "sketch", vector))


# Attack, what the site says, and the check without which it would go on.
ATTACKS = {
    crafted_first_state: ("not what the sum of all members leads to", (sums.statements, "check_same_state")),
    crafted_state: ("not what the sum of all members leads to", (sums.statements, "check_same_state")),
    more_tensors: ("other tensors than the sum leads to", (sums.statements, "check_same_state")),
    other_settings: ("identity of the plan is not that of the training", (sums.SumMember, "_check_plan")),
    other_seed: ("seed of the plan is not that of the training", (sums.SumMember, "_check_plan")),
    decoy_classes: ("classes of the plan is not that of the training", (sums.SumMember, "_check_plan")),
    changed_texts: ("text is not what this site's own encoder makes of it", (sums.SumMember, "_check_plan")),
    texts_of_another_hash: ("not the one of its hash", (sums.SumMember, "_check_plan")),
    added_reference: ("class texts or reference samples are not those", (sums.SumMember, "_check_plan")),
    other_scale: ("logit scale is 1e+06", (sums.SumMember, "_check_plan")),
    no_deadline: ("deadline must be within 30 days", (sums.SumMember, "_check_plan")),
    invented_member: ("zoo is not in peers.toml", (sums, "check_members")),
    swapped_key: ("compared", (sums, "check_members")),
    duplicated_member: ("names a member or a key twice", (sums, "check_members")),
    two_members: ("at least 3 members", (sums, "check_members")),
    split_plans: ("has agreed to another plan", None),
    missing_agreement: ("the agreement of sketch is missing", None),
    forged_agreement: ("the agreement of photo is not signed by its key", (statements, "verify_bytes")),
    dropped_upload: ("the upload of sketch is missing", None),
    changed_upload: ("masked upload of photo is not the one that it signed", (statements, "hash_vector")),
    swapped_uploads: ("masked upload of photo is not the one that it signed", (statements, "hash_vector")),
    replayed_uploads: ("belongs to another round of the session", None),
    replaced_own_upload: ("the upload of this site was replaced", None),
    second_state: ("second time at another state", None),
    two_views: ("belongs to another state of the session", None),
    too_many_rounds: ("the plan has 3 rounds, and round 3 was asked for", None),
    plain_round: ("without its session", None),
    vanished_member: ("members differ from those of an earlier sum", (sums.SumMember, "_check_history")),
    garbage_under_the_mask: ("but channel.clip and noise allow 1", (statements.verified, "check_state")),
    wrong_counts: ("counts are not plausible", (sums._Step, "_check_counts")),
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_site_refuses_and_says_what_is_wrong(server, attack):
    reply = attack(server)
    assert isinstance(reply, str), "something left the site"
    assert ATTACKS[attack][0] in reply
    assert "internal error" not in reply and "Traceback" not in reply


CHECKS = {attack: check for attack, (_, check) in ATTACKS.items() if check is not None}


@pytest.mark.parametrize("attack", CHECKS, ids=lambda attack: attack.__name__)
def test_without_the_check_the_attack_gets_further(server, attack, monkeypatch):
    """So that no test above passes by accident."""
    owner, name = CHECKS[attack]
    always = {"verify_bytes": True, "hash_vector": None}.get(name)
    if name == "hash_vector":
        uploads = iter([])

        def claimed(vector):  # the hash that the member's statement says, in the order of members
            nonlocal uploads
            upload = next(uploads, None)
            if upload is None:
                uploads = iter([server.uploads[other].header["statement"]["upload"] for other in NAMES])
                upload = next(uploads)
            return upload

        monkeypatch.setattr(owner, name, claimed)
    else:
        monkeypatch.setattr(owner, name, lambda *args, **settings: always)
    reply = attack(server)
    assert not isinstance(reply, str) or ATTACKS[attack][0] not in reply


def test_a_repeated_step_gets_the_same_bytes_and_costs_nothing(server):
    server.begin(1)
    site = server.place.desks["art"]
    before = site.budget.rounds.copy()
    for number in (0, 1):
        if number == 1:
            server.round_all(1)
    rounds = site.budget.rounds.copy()
    assert rounds.total() == before.total() + 1
    again = Server(server.place)
    again.plan, again.tensors = server.plan, server.tensors
    assert again.agree("art").header["statement"] == server.agreements[0]
    first, second = again.count("art", server.agreements), again.count("art", server.agreements)
    assert np.array_equal(first.arrays["masked"], second.arrays["masked"])
    assert site.budget.rounds == rounds


def test_a_restarted_site_goes_on_at_every_step(server):
    """Killed after each step, before or after its message has left."""
    place = server.place

    def restart():
        for name in NAMES:
            place.desks[name] = Site(read_site(place.site(name)))

    server.agree_all()
    restart()
    assert [server.agree(name).header["statement"] for name in NAMES] == server.agreements
    server.count_all()
    counted = {name: reply.arrays["masked"] for name, reply in server.uploads.items()}
    restart()
    server.count_all()
    assert all(np.array_equal(counted[name], server.uploads[name].arrays["masked"]) for name in NAMES)
    for number in range(3):
        restart()
        before = dict(server.uploads), server.state
        server.round_all(number)
        masked = {name: reply.arrays["masked"] for name, reply in server.uploads.items()}
        after = server.uploads, server.state
        server.uploads, server.state = before
        restart()
        server.round_all(number)
        assert all(np.array_equal(masked[name], server.uploads[name].arrays["masked"]) for name in NAMES)
        assert server.state["head"].equal(after[1]["head"])
    restart()
    ends = [server.ask(name, "end", 3, **server.relayed()) for name in NAMES]
    restart()
    again = [server.ask(name, "end", 3, **server.relayed()) for name in NAMES]
    assert [end.header["statement"] for end in ends] == [end.header["statement"] for end in again]


def test_an_upload_is_on_disk_before_it_leaves(server, monkeypatch):
    """A site that dies while it writes its upload has sent nothing, and computes it again."""
    server.begin()
    real = sums.write_tensors

    def die(path, *rest):
        raise OSError("killed")

    monkeypatch.setattr(sums, "write_tensors", die)
    assert isinstance(server.round("art", 0), str)
    monkeypatch.setattr(sums, "write_tensors", real)
    assert not isinstance(server.round("art", 0), str)


def test_the_session_key_is_erased_at_the_end_and_at_the_deadline(server, monkeypatch):
    keys = list(server.place.site("art").glob("state/*/session/session.key"))
    assert keys == []
    server.begin(3)
    [key] = server.place.site("art").glob("state/*/session/session.key")
    assert key.stat().st_mode & 0o777 == 0o600
    assert not isinstance(server.ask("art", "end", 3, **server.relayed()), str)
    assert not key.exists()
    [other] = server.place.site("photo").glob("state/*/session/session.key")

    class Later(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(zone) + timedelta(days=8)

    monkeypatch.setattr(sums, "datetime", Later)
    Site(read_site(server.place.site("photo")))
    assert not other.exists()


def test_a_restored_backup_has_no_session_key_and_cannot_go_on(server, tmp_path):
    server.begin(1)
    place, folder = server.place, server.place.site("art")
    write_backup(folder, tmp_path / "backup.tar")
    restore_backup(tmp_path / "backup.tar", tmp_path / "restored")
    assert not list((tmp_path / "restored").glob("state/*/session/session.key"))
    place.desks["art"] = Site(replace(read_site(tmp_path / "restored"), folder=tmp_path / "restored"))
    assert server.round("art", 1).startswith("session: the session of the verified sum has ended there")


def test_other_samples_than_agreed_end_the_session(server, rows):
    server.begin(1)
    keep = np.ones(len(rows.labels), bool)
    keep[np.flatnonzero(rows.domains == "art")[0]] = False
    server.place.change("art", keep)
    assert "samples are not those that it agreed with" in server.round("art", 1)


def test_a_new_session_needs_unchanged_or_much_changed_samples(server, rows):
    server.begin(1)
    place = server.place
    keep = np.ones(len(rows.labels), bool)
    keep[np.flatnonzero(rows.domains == "art")[0]] = False
    place.change("art", keep)
    second = Server(place)
    # too few for a sum of their own: the site takes part with the samples of its last training
    assert not isinstance(second.agree("art"), str)
    assert "the samples of the last run are used again" in (place.site("art") / "events.jsonl").read_text()


def test_with_noise_members_and_samples_may_change(place, rows):
    policy = place.site("art") / "policy.toml"
    first = Server(place, channel={**CHANNEL, "noise_multiplier": 1.0}).begin(1)
    keep = np.ones(len(rows.labels), bool)
    keep[np.flatnonzero(rows.domains == "art")[0]] = False
    place.change("art", keep)
    assert policy.exists() and first.plan.settings.channel.noise_multiplier == 1.0
    assert not isinstance(Server(place, channel={**CHANNEL, "noise_multiplier": 1.0}).agree("art"), str)


def test_a_key_that_the_server_made_is_for_one_machine(server):
    place = server.place
    kit = read_site(place.site("art"))
    place.desks["art"] = Site(replace(kit, address="hospital.example:8443"))
    server.ask("art", "open", 0, spec=server.engine.spec)
    assert "key was made on the server" in server.agree("art")


def test_a_member_that_lies_about_its_signature_is_named_at_the_server(place, monkeypatch):
    """The server checks what it relays, too."""
    real = Site.answer

    def lie(self, request, state):
        reply, after = real(self, request, state)
        if self.kit.name == "photo" and reply.header.get("kind") == "sum":
            header = {**reply.header, "statement": {**reply.header["statement"], "round": 7}}
            reply = self.sign(Message({k: v for k, v in header.items() if k != "signature"}, reply.arrays))
        return reply, after

    monkeypatch.setattr(Site, "answer", lie)
    with pytest.raises(Exception, match="the upload of photo is not signed by its key"):
        place.run(place.settings(FEDAVG, channel=CHANNEL))


@pytest.mark.parametrize("kind", ["plan", "counts", "sum", "end"])
def test_a_member_that_refuses_stops_the_run_with_its_name_and_the_run_resumes(place, monkeypatch, kind):
    real, state = Site.answer, {"silent": True}

    def refuse(self, request, message):
        if state["silent"] and self.kit.name == "photo" and request.header["kind"] == kind:
            header = {name: request.header[name] for name in ("kind", "training", "round", "nonce")}
            error = {"code": "data", "numbers": {}}
            return self.sign(Message({**header, "client": "photo", "error": error})), message
        return real(self, request, message)

    monkeypatch.setattr(Site, "answer", refuse)
    settings = place.settings(FEDAVG, channel=CHANNEL)
    with pytest.raises(Exception, match=r"needs all 3 members(.|\n)*photo: .*its data cannot be used"):
        place.run(settings)
    state["silent"] = False
    resumed = place.run(settings)
    assert resumed.outcome("all")[0]["head"].isfinite().all()
    alone = place.alone(settings)
    torch.testing.assert_close(resumed.outcome("all")[0]["head"], alone.outcome("all")[0]["head"])


def test_a_member_whose_node_is_gone_for_a_moment_is_waited_for(place, monkeypatch):
    """Flower answers for a node without a heartbeat by an error of its own."""
    grid, gone = local_grid(place.desks), []
    pull, photo = grid.pull_messages, grid.nodes["photo"]

    def pull_messages(ids):
        replies = list(pull(ids))
        for place_of, reply in enumerate(replies):
            if reply.metadata.src_node_id == photo and reply.metadata.group_id == "1" and not gone:
                gone.append(reply)
                request = next(m for m in grid.messages if m.metadata.message_id == reply.metadata.reply_to_message_id)
                error = import_flower().Error(NODE_UNAVAILABLE, "Error: Node Unavailable")
                replies[place_of] = import_flower().Message(error, reply_to=request)
        return replies

    grid.pull_messages = pull_messages
    monkeypatch.setattr("fedvlm.deploy.server.sums.sleep", lambda seconds: None)
    settings = place.settings(FEDAVG, channel=CHANNEL)
    done = place.run(settings, grid=grid)
    assert gone
    torch.testing.assert_close(done.outcome("all")[0]["head"], place.alone(settings).outcome("all")[0]["head"])


def test_an_unsigned_step_is_dropped(server):
    server.agree_all()
    request = Message({"kind": "counts", "training": server.engine.training, "round": 0, "nonce": "x", "client": "art"})
    bare = Message({**request.header, "checksum": checksum(request)}, {})
    with pytest.raises(Exception, match="did not sign"):
        server.place.desks["art"].answer(bare, Message({}))


def test_two_plans_of_the_same_settings_differ(server):
    other, _ = server.engine._propose()
    assert other.hash != server.plan.hash
    assert datetime.fromisoformat(other.deadline) > datetime.now(UTC)
