"""Clients refuse a server that deviates from SecAgg+ to see a single upload."""

from dataclasses import replace

import pytest

from fedvlm.channel import Channel
from fedvlm.core import make
from fedvlm.engines.flower import import_flower
from fedvlm.engines.flower.client import to_arrays
from fedvlm.engines.flower.engine import InProcessEngine
from fedvlm.engines.flower.messages import Message, seal, to_bytes
from fedvlm.engines.flower.secure import STAGE, STATE, plan_digest, sum_settings
from fedvlm.engines.loop import initial_state
from fedvlm.testing import toy_world

STAGES = ["setup", "share_keys", "collect_masked_vectors", "unmask"]


class Server:
    """Drive SecAgg+ of four clients stage by stage, so that any message can be changed."""

    def __init__(self):
        world = toy_world(make("fedavg", rounds=1, lr=0.01), sizes=(30,) * 4)
        self.world = replace(world, channel=Channel(clip=0.5, secure=True))
        self.engine = InProcessEngine(self.world)
        self.grid = self.engine.grid
        self.state, self.fresh = initial_state(self.world)
        self.nodes = dict(sorted(self.engine.nodes.items()))
        self.versions = {id: self.engine.version(id, dict(self.fresh)) for id in self.nodes}
        self.keys, self.shares = {}, {}

    def request(self, id, largest=30):
        about = {"kind": "round", "training": "", "round": 0, "client": id, "trains": True}
        about |= {"version": self.versions[id], "held": [], "nonce": "n", "largest": largest}
        return seal(Message(about, to_arrays(self.state.shared)))

    def send(self, id, config, kind="train", **records):
        """Return the client's reply, or what it says instead."""
        app = import_flower()
        stage = {STAGE: app.ConfigRecord(config)} if config else {}
        content = app.RecordDict({**stage, **records})
        [reply] = self.grid.send_and_receive([app.Message(content, self.nodes[id], kind)])
        return reply.error.reason if reply.has_error() else reply.content

    def setup(self, id, largest=30, **changes):
        plan = {"stage": "setup", "plan": plan_digest(self.request(id, largest).header)}
        reply = self.send(id, {**sum_settings(len(self.nodes)), **plan, **changes})
        if isinstance(reply, str):
            return reply
        self.keys[str(self.nodes[id])] = [reply[STAGE]["pk1"], reply[STAGE]["pk2"]]
        return ""

    def share_keys(self, id, keys=None):
        reply = self.send(id, {"stage": "share_keys", **(keys or self.keys)})
        if isinstance(reply, str):
            return reply
        for to, text in zip(reply[STAGE]["dsts"], reply[STAGE]["ctxts"], strict=True):
            self.shares.setdefault(to, {})[self.nodes[id]] = text
        return ""

    def collect(self, id, largest=30, shares=None):
        texts = self.shares[self.nodes[id]] if shares is None else shares
        config = {"stage": "collect_masked_vectors"}
        config |= {"srcs": list(texts), "ctxts": list(texts.values())}
        return self.send(id, config, **fit(self.request(id, largest)))

    def begin(self, until):
        """Follow the protocol with every client up to a stage."""
        for stage in STAGES[: STAGES.index(until)]:
            for id in self.nodes:
                step = {"setup": self.setup, "share_keys": self.share_keys}.get(stage, self.collect)
                assert not isinstance(reply := step(id), str) or not reply
        return self


def fit(parcel):
    record = import_flower().ConfigRecord({"parcel": to_bytes(parcel)})
    return {"fitins.config": record, "fitins.parameters": import_flower().ArrayRecord()}


@pytest.fixture
def server():
    return Server()


def test_a_server_that_follows_the_protocol_gets_every_share(server):
    server.begin("unmask")
    nodes = list(server.nodes.values())
    config = {"stage": "unmask", "active_nids": nodes[:3], "dead_nids": nodes[3:]}
    assert len(server.send("client-0", config)[STAGE]["shares"]) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sample_num": 1, "share_num": 1, "threshold": 1}, "at least 3 members, got 1"),
        ({"sample_num": 2, "share_num": 2, "threshold": 2}, "at least 3 members, got 2"),
        ({"sample_num": 1001}, "at most 1000 members, got 1001"),
        ({"threshold": 1}, "threshold must be at least 3, got 1"),
        ({"threshold": 5}, "threshold must be at most 4, got 5"),
        ({"share_num": 3}, "share_num must be 4, got 3"),
        ({"max_weight": 1e9}, "max_weight must be 1.0, got 1000000000.0"),
        ({"clipping_range": 1e9}, "clipping_range must be 8.0"),
        ({"target_range": 2}, "target_range must be"),
        ({"mod_range": 1 << 40}, "mod_range must be"),
    ],
)
def test_a_client_refuses_a_sum_that_would_not_hide_it(server, changes, words):
    assert words in server.setup("client-0", **changes)


def test_a_client_refuses_another_number_of_members_than_was_announced(server):
    server.begin("share_keys")
    for own in ({}, {f"0{server.nodes['client-1']}": server.keys[str(server.nodes["client-1"])]}):
        fewer = dict(list(server.keys.items())[: 4 - len(own) - 1]) | own
        assert "4 members were announced, got" in server.share_keys("client-0", fewer)


@pytest.mark.parametrize("case", ["none", "fewer", "twice"])
def test_a_client_shares_masks_with_every_member_or_sends_nothing(server, case):
    server.begin("collect_masked_vectors")
    texts = list(server.shares[server.nodes["client-0"]].items())
    shares = {"none": {}, "fewer": dict(texts[:2])}.get(case)
    if case == "twice":
        config = {"stage": "collect_masked_vectors"}
        config |= {"srcs": [texts[0][0]] * 3, "ctxts": [texts[0][1]] * 3}
        reply = server.send("client-0", config, **fit(server.request("client-0")))
    else:
        reply = server.collect("client-0", shares=shares)
    assert "shares of all 3 other members" in reply


@pytest.mark.parametrize(
    ("active", "dead", "words"),
    [
        ([0], [1, 2, 3], "at least 3 uploads, got 1"),
        ([0, 1], [2, 3], "at least 3 uploads, got 2"),
        ([0, 0, 0], [1, 2, 3], "each member once"),
        ([0, 1, 2, 3], [0], "each member once"),
        ([0, 1, 2], [], "each member once"),
    ],
)
def test_a_client_does_not_help_to_unmask_fewer_than_three(server, active, dead, words):
    server.begin("unmask")
    nodes = list(server.nodes.values())
    lists = {"active_nids": [nodes[i] for i in active], "dead_nids": [nodes[i] for i in dead]}
    assert words in server.send("client-0", {"stage": "unmask", **lists})


def test_every_member_must_be_told_the_same_largest_number_of_samples(server):
    """Clients told 10^9 would weigh nothing, and the sum would be the upload of the one left."""
    for id in server.nodes:
        assert not server.setup(id, largest=30 if id == "client-0" else 10**9)
    for id in server.nodes:
        assert not server.share_keys(id)
    for id in server.nodes:
        largest = 30 if id == "client-0" else 10**9
        assert "another plan" in server.collect(id, largest=largest)


def test_the_request_must_be_of_the_plan_that_the_members_agreed_on(server):
    server.begin("collect_masked_vectors")
    assert "another plan" in server.collect("client-1", largest=10**9)


def test_every_member_must_be_told_the_same_members(server):
    """A forged fourth member that only one client is told of does not pass."""
    for id in server.nodes:
        assert not server.setup(id)
    other = Server()
    other.setup("client-3")
    forged = {**server.keys, **other.keys}
    assert not server.share_keys("client-0", forged)
    for id in ("client-1", "client-2", "client-3"):
        assert not server.share_keys(id)
    assert "another plan" in server.collect("client-1")


@pytest.mark.parametrize("kind", ["train", "query"])
@pytest.mark.parametrize("staged", [False, True])
def test_an_upload_of_a_secure_sum_leaves_in_the_stage_that_masks_it_only(server, kind, staged):
    server.begin("collect_masked_vectors")
    config = {"stage": "unmask", "active_nids": [], "dead_nids": []} if staged else {}
    reply = server.send("client-0", config, kind, **fit(server.request("client-0")))
    assert isinstance(reply, str), {name: dict(value) for name, value in reply.items()}


def test_names_of_flower_that_the_checks_read_are_as_they_were():
    import_flower()
    from flwr.common.secure_aggregation import secaggplus_constants as constants

    assert (constants.RECORD_KEY_CONFIGS, constants.RECORD_KEY_STATE) == (STAGE, STATE)
    assert [*constants.Stage.all()] == STAGES
