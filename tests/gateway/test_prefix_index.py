"""The index against sets of keys, one for each pod."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton_common.block_hash import ROOT_HASH, block_hash, block_key, block_keys, salted
from baton_common.cache_scope import MAX_SALT_BYTES, CacheScope
from baton_gateway.routing.prefix_index import PrefixIndex

SLOTS, KEYS = st.integers(0, 3), st.lists(st.integers(0, 7), max_size=6)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.pods: dict[int, set[int]] = {slot: set() for slot in range(4)}

    @rule(slot=SLOTS, keys=KEYS)
    def gain(self, slot: int, keys: list[int]) -> None:
        self.index.gain(slot, keys)
        self.pods[slot] |= set(keys)

    @rule(slot=SLOTS, keys=KEYS)
    def lose(self, slot: int, keys: list[int]) -> None:
        self.index.lose(slot, keys)
        self.pods[slot] -= set(keys)

    @rule(slot=SLOTS)
    def drop(self, slot: int) -> None:
        self.index.drop(slot)
        self.pods[slot].clear()

    @rule(keys=KEYS)
    def match(self, keys: list[int]) -> None:
        expected = {}
        for slot, held in self.pods.items():
            length = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            if length:
                expected[slot] = length
        assert self.index.match(keys) == expected

    @invariant()
    def counts(self) -> None:
        assert self.index.num_entries == sum(map(len, self.pods.values()))


TestIndex = IndexMachine.TestCase


def test_no_more_entries_than_allowed():
    index = PrefixIndex(max_entries=5)
    index.gain(0, [1, 2, 3])
    index.gain(1, [1, 2, 3])
    assert index.num_entries == 5
    assert index.match([1, 2, 3]) == {0: 3, 1: 2}
    index.drop(0)
    index.gain(1, [3])
    assert (index.num_entries, index.match([1, 2, 3])) == (3, {1: 3})


def test_no_hash_is_computed_that_no_pod_can_have():
    taken = []

    def keys():
        for key in range(100):
            taken.append(key)
            yield key

    index = PrefixIndex()
    index.gain(0, range(3))
    assert index.match(keys()) == {0: 3}
    assert taken == [0, 1, 2, 3]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 9),
    st.binary(max_size=MAX_SALT_BYTES),
    st.integers(0, 50),
)
def test_keys_are_those_of_the_blocks_that_an_engine_looks_for(token_ids, size, salt, shared):
    expected, digest, entered = [], ROOT_HASH, not salt
    for start in range(0, (max(len(token_ids), 1) - 1) // size * size, size):
        if start + size > shared and not entered:
            digest, entered = salted(digest, salt), True
        digest = block_hash(digest, token_ids[start : start + size])
        expected.append(block_key(digest))
    assert list(block_keys(token_ids, size, CacheScope(salt, shared))) == expected


@pytest.mark.parametrize("length", [0, 1, 16])
def test_the_last_token_is_always_computed(length):
    assert list(block_keys(range(length), 16)) == []
