"""What the server refuses: damage, strangers' tensors, and counts nobody has."""

import random
from pathlib import Path

import pytest
import torch

from fedvlm.channel import Channel
from fedvlm.channel.pipeline import ReceivedUploads, UploadPipeline, UploadReceiver
from fedvlm.channel.steps import Quantise
from fedvlm.channel.validation import UploadValidator
from fedvlm.core import make
from fedvlm.engines.aggregate import aggregate_uploads, drop_refused
from fedvlm.engines.client import ClientReply, RoundReplies
from fedvlm.errors import FederationError
from fedvlm.storage.files import DamagedError, decode_tensors, encode_tensors

CONTEXT = "method fedavg, client b, round 3"
SENT = {"head": torch.zeros(4, 6)}
UPLOAD = {"head": torch.arange(24.0).reshape(4, 6)}


def inbox(**channel):
    return UploadValidator(Channel(**channel), {"skew"}, make("fedavg"))


def test_a_message_comes_back_as_it_was_sent():
    tensors = {**UPLOAD, "n": torch.tensor([3, 4]), "half": torch.ones(2, dtype=torch.float16)}
    back, about = decode_tensors(encode_tensors(tensors, {"round": 3}))
    assert about == {"round": 3}
    assert all(torch.equal(back[key], value) for key, value in tensors.items())
    assert all(back[key].dtype == value.dtype for key, value in tensors.items())


def test_every_flipped_bit_and_every_cut_is_found():
    data = encode_tensors(UPLOAD, {"round": 3})
    draw = random.Random(4)
    broken = [data[:n] for n in (0, 1, 7, 8, 50, len(data) // 2, len(data) - 1)] + [data + b"\0"]
    for _ in range(300):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        broken.append(bytes(flipped))
    for bad in broken:
        with pytest.raises(DamagedError):
            decode_tensors(bad)


def test_bytes_that_are_no_message_are_damaged_and_nothing_else():
    for bad in (b"", b"{}", b"\xff" * 100, (2).to_bytes(8, "little") + b"[]", b"\x80\x04K\x01."):
        with pytest.raises(DamagedError):
            decode_tensors(bad)
    assert decode_tensors(encode_tensors({}, {"round": 1})) == ({}, {"round": 1})


def test_the_same_upload_counts_once_a_round():
    box = inbox()
    box.check(UPLOAD, SENT, 40, "b", 3, CONTEXT)
    with pytest.raises(FederationError, match="client b, round 3: an upload of this round has come"):
        box.check(UPLOAD, SENT, 40, "b", 3, CONTEXT)
    box.check(UPLOAD, SENT, 40, "b", 4, CONTEXT)


@pytest.mark.parametrize("rows", [10**12, -1, 1.5, True, None, "40", float("nan")])
def test_a_row_count_nobody_has_is_refused(rows):
    with pytest.raises(FederationError, match="client b, round 3: it reports .* training samples"):
        inbox().check(UPLOAD, SENT, rows, "b", 3, CONTEXT)


def test_a_client_may_not_grow_between_rounds():
    box = inbox()
    box.check(UPLOAD, SENT, 40, "b", 3, CONTEXT)
    with pytest.raises(FederationError, match="reports 4000 training samples, but reported 40 before"):
        box.check(UPLOAD, SENT, 4000, "b", 4, CONTEXT)


@pytest.mark.parametrize(
    ("upload", "error"),
    [
        ({"head": torch.zeros(4, 7)}, r"'head' of its upload is float32 \(4, 7\), but"),
        ({"head": torch.zeros(4, 6).double()}, r"is float64 \(4, 6\), but float32"),
        ({**UPLOAD, "skew": torch.zeros(2)}, "holds 'skew', which is local"),
        ({"head": torch.full((4, 6), torch.nan)}, "24 of 24 numbers of 'head' are not finite"),
        ({**UPLOAD, "more": torch.zeros(2)}, "'more' .* is float32 .*, but missing in client a's"),
        ({}, r"'head' of its upload is missing, but float32 \(4, 6\) in client a's"),
    ],
)
def test_an_upload_unlike_the_method_is_refused(upload, error):
    box = inbox()
    box.check(UPLOAD, SENT, 40, "a", 3, "client a, round 3")
    with pytest.raises(FederationError, match=f"client b, round 3: .*{error}"):
        box.check(upload, SENT, 40, "b", 3, CONTEXT)


def test_the_first_upload_too_is_compared_to_what_was_sent():
    with pytest.raises(FederationError, match=r"but float32 \(4, 6\) in what was sent"):
        inbox().check({"head": torch.zeros(4, 7)}, SENT, 40, "b", 3, CONTEXT)


def test_who_is_sent_something_else_may_upload_something_else():
    box = UploadValidator(Channel(), (), None)
    box.check({"prompt": torch.zeros(3)}, {"prompt": torch.zeros(3)}, 40, "a", 3, CONTEXT)
    box.check({"held": torch.tensor(1)}, {"prompts": torch.zeros(2, 3)}, 40, "b", 3, CONTEXT)


def test_a_change_longer_than_the_channel_allows_is_refused():
    for channel in ({"bound": 5.0}, {"clip": 5.0}, {"clip": 100.0, "bound": 5.0}):
        with pytest.raises(FederationError, match="norm 65.76, more than 5,"):
            inbox(**channel).check(UPLOAD, SENT, 40, "b", 3, CONTEXT)
    inbox(bound=66.0).check(UPLOAD, SENT, 40, "b", 3, CONTEXT)


def test_odd_scales_of_an_8_bit_upload_are_refused():
    travels, _ = Quantise().encode({"head": torch.ones(4, 6)}, {}, None)
    for key, value in (
        ("head", torch.zeros(40, 40, dtype=torch.int8)),
        ("head", torch.zeros(4, 6)),
        ("head/scale", torch.zeros(3)),
        ("head/scale", torch.zeros(1).double()),
    ):
        with pytest.raises(FederationError, match="8-bit numbers with one float32"):
            UploadPipeline(Channel(quantise=True)).decode({**travels, key: value}, SENT)
    wrong = {**travels, "head/scale": torch.tensor([torch.inf])}
    with pytest.raises(FederationError, match="not finite"):
        inbox().check(UploadPipeline(Channel(quantise=True)).decode(wrong, SENT), SENT, 40, "b", 3, CONTEXT)


@pytest.mark.parametrize("channel", [{}, {"verified": True}, {"bound": "median"}, {"aggregation": "krum"}])
def test_a_round_in_which_every_upload_is_refused_ends_with_the_quorum_and_all_reasons(channel):
    ids = ("a", "b", "c")
    uploads = {id: {"head": torch.full((4, 6), torch.nan)} for id in ids}
    received = ReceivedUploads(0, uploads, dict.fromkeys(ids, SENT), dict.fromkeys(ids, 40), encoded_ids=ids)
    method = make("fedavg")
    decoded = UploadReceiver(Channel(**channel), method, [], 0).receive(received)
    assert decoded.ids == [] and decoded.refused.keys() == set(ids)
    shared, decoded = aggregate_uploads(method, SENT, decoded, ids, 0)
    assert shared is SENT
    replies = {id: ClientReply(uploads[id], {}, {}, 40, is_encoded=True) for id in ids}
    with pytest.raises(FederationError, match="0 of 3 clients can be used, and 2 must") as refused:
        drop_refused(RoundReplies(replies, min_clients=2), decoded.refused, ids)
    assert str(refused.value).count("not finite") == 3


def test_the_page_of_the_channel_says_that_the_majority_is_the_measure():
    page = " ".join((Path(__file__).parents[2] / "docs" / "security" / "channel.md").read_text("utf-8").split())
    assert "from those that most clients upload which were sent the same" in page
    assert "the round's first" not in page
