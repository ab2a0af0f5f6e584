"""Many clients and rows in few arrays say what words and objects would."""

from hashlib import sha256

import numpy as np

from fedvlm.data.partition import ClientSplit, ClientSplits
from fedvlm.data.table import Digests, rank_digests, sort_order, unique_with_inverse


def test_members_come_back_as_they_were_added_and_in_their_order():
    members = ClientSplits()
    none = np.zeros(0, np.int64)
    expected = {
        "b": ClientSplit("b", "photo", np.array([5, 1]), none, np.array([3]), np.array([7])),
        "a": ClientSplit("a", "", np.array([2]), np.array([9, 8]), none),
    }
    for member in expected.values():
        members.add(member)
    assert list(members) == ["b", "a"] and len(members) == 2
    assert "a" in members and "c" not in members and members.get("c") is None
    for id, member in expected.items():
        stored = vars(members[id])
        assert stored.keys() == vars(member).keys()
        assert all(np.array_equal(stored[key], value) for key, value in vars(member).items())
    members["b"].train[0] = 0  # the caller's own
    assert members["b"].train.tolist() == [5, 1]


def test_digests_are_told_and_ordered_as_their_words_are():
    raw = [sha256(bytes([i % 7])).digest() for i in range(30)]
    raw += [bytes(32), b"a" + bytes(31), bytes(31) + b"a", b"\xff" * 32]
    words = [digest.hex() for digest in raw]
    digests = Digests(b"".join(raw))
    assert list(digests) == words and digests[-2:] == words[-2:] and digests == words
    assert rank_digests(digests).tolist() == rank_digests(words).tolist()
    order = sorted(set(words))
    assert rank_digests(words).tolist() == [order.index(digest) for digest in words]


def test_rows_are_in_order_of_content_and_of_the_columns_where_it_is_the_same():
    draw = np.random.default_rng(0)
    words, labels = draw.choice(["b", "a", "cc"], 40), draw.integers(3, size=40)
    for content in (rank_digests(list(map(str, draw.integers(6, size=40)))), draw.permutation(40)):
        expected = sorted(range(40), key=lambda row: (content[row], words[row], labels[row], row))
        assert sort_order(content, words, labels).tolist() == expected
    assert not len(sort_order(np.zeros(0, np.int64), words[:0]))


def test_words_are_numbered_in_their_order():
    words = np.array(["b", "", "a", "b", "cc"])
    different, indices = unique_with_inverse(words)
    assert different.tolist() == ["", "a", "b", "cc"] and indices.tolist() == [2, 0, 1, 2, 3]
    different, indices = unique_with_inverse(np.broadcast_to(np.array(""), 3))
    assert different.tolist() == [""] and indices.tolist() == [0, 0, 0]
