"""Many clients and rows in few arrays say what words and objects would."""

from hashlib import sha256

import numpy as np

from fedvlm.data.members import Member, Members
from fedvlm.data.table import Digests, ranks


def test_members_come_back_as_they_were_added_and_in_their_order():
    members = Members()
    none = np.zeros(0, np.int64)
    given = {
        "b": Member("b", "photo", np.array([5, 1]), none, np.array([3]), np.array([7])),
        "a": Member("a", "", np.array([2]), np.array([9, 8]), none),
    }
    for one in given.values():
        members.add(one)
    assert list(members) == ["b", "a"] and len(members) == 2
    assert "a" in members and "c" not in members and members.get("c") is None
    for id, one in given.items():
        found = vars(members[id])
        assert found.keys() == vars(one).keys()
        assert all(np.array_equal(found[key], value) for key, value in vars(one).items())
    members["b"].train[0] = 0  # the caller's own
    assert members["b"].train.tolist() == [5, 1]


def test_digests_are_told_and_ordered_as_their_words_are():
    raw = [sha256(bytes([i % 7])).digest() for i in range(30)]
    raw += [bytes(32), b"a" + bytes(31), bytes(31) + b"a", b"\xff" * 32]
    words = [one.hex() for one in raw]
    digests = Digests(b"".join(raw))
    assert list(digests) == words and digests[-2:] == words[-2:] and digests == words
    assert ranks(digests).tolist() == ranks(words).tolist()
    order = sorted(set(words))
    assert ranks(words).tolist() == [order.index(one) for one in words]
