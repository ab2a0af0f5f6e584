"""Whatever words come, signed or not: a site answers or drops them, a server leaves them out."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedvlm.deploy.identity.keys import Signer
from fedvlm.deploy.operations.events import EventLog
from fedvlm.deploy.server.engine import OpeningExchange, RemoteEngine
from fedvlm.deploy.server.evaluation import EvaluationEngine, evaluation_spec, read_tested
from fedvlm.deploy.site.service import UnsignedMessageError
from fedvlm.engines.flower.engine import local_grid
from fedvlm.engines.flower.messages import Message
from fedvlm.errors import FederationError

EXAMPLES = int(os.environ.get("FEDVLM_FUZZ", "150"))  # of each; docs/security has a longer run
few_examples = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
words = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["open", "round", "adapt", "0", "../..", "art", "fedot"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KINDS = ["open", "round", "adapt", "evaluate"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, rows_like, place_of):
    """A place, its server's engine, and an honest request and reply of each kind."""
    place = place_of(tmp_path_factory.mktemp("fuzz"), rows_like())
    site, pairs = place.desks["art"], {}
    answer = site.answer

    def listen(request, state):
        reply, state = answer(request, state)
        pairs[request.header["kind"]] = (request, reply)
        return reply, state

    site.answer = listen
    grid = local_grid(place.desks)
    result, log_event = place.run(grid=grid), EventLog(place.kit.folder)
    tested = [read_tested(place.kit, str(result.folder))]
    evaluation = EvaluationEngine(grid, place.kit, evaluation_spec(tested, (), {}), tested, log_event)
    evaluation.wait_for_sites()
    del site.answer
    engine = RemoteEngine(grid, place.kit, pairs["open"][0].header["spec"], {})
    engine.wait_for_sites()
    openings = {"open": OpeningExchange(engine, {}, 1.0), "evaluate": OpeningExchange(evaluation, {}, 1.0)}
    return place, {**dict.fromkeys(KINDS, engine), **openings}, pairs


def changed(about, path, value):
    """The words with one of them, perhaps an inner one, replaced."""
    about = dict(about)
    key = sorted(about)[path % len(about)]
    inner = about[key]
    if isinstance(inner, dict) and inner and path % 2:
        about[key] = changed(inner, path // 2, value)
    else:
        about[key] = value
    return about


@few_examples
@given(about=st.dictionaries(st.text(max_size=8) | st.sampled_from(["kind", "round"]), words))
def test_a_site_drops_whatever_the_server_did_not_sign(recorded, about):
    with pytest.raises(UnsignedMessageError):
        recorded[0].desks["art"].answer(Message(about), Message({}))


@few_examples
@given(kind=st.sampled_from(KINDS), path=st.integers(0, 200), value=words)
def test_a_site_answers_whatever_the_server_signs(recorded, kind, path, value):
    place, _, pairs = recorded
    request = pairs[kind][0]
    sign = Signer(place.kit.folder / "signing.key")
    signed_request = sign(Message(changed(request.header, path, value), request.arrays))
    reply, _ = place.desks["art"].answer(signed_request, Message({}))
    if "error" in reply.header:
        assert set(reply.header["error"]) == {"code", "numbers"} and not reply.arrays


@few_examples
@given(kind=st.sampled_from(KINDS), path=st.integers(0, 200), value=words)
def test_a_server_reads_whatever_a_site_signs(recorded, kind, path, value):
    place, engines, pairs = recorded
    request, reply = pairs[kind]
    signed_reply = place.desks["art"].sign(Message(changed(reply.header, path, value), reply.arrays))
    reason = None
    try:
        message = engines[kind]._check_reply(signed_reply, "art", request)
    except FederationError as error:
        reason = str(error)
    assert len(reason) < 1000 if reason else message.header.keys() == reply.header.keys()
