"""The block pool against a naive model: sets, counts and a list in order of release."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_common.block_hash import ROOT_HASH, block_hash
from baton_engine.block_pool import BlockPool

NUM_BLOCKS = 5


def chain(words: list[int]) -> list[bytes]:
    """Return the hashes of blocks of one token each."""
    hashes, parent = [], ROOT_HASH
    for word in words:
        parent = block_hash(parent, [word])
        hashes.append(parent)
    return hashes


class PoolMachine(RuleBasedStateMachine):
    """Block tables are allocated, added to the prefix cache, shared and released in random order."""

    caching = True

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, self.caching)
        self.tables: list[tuple[list[int], list[bytes]]] = []  # blocks, and the hashes of their complete contents
        self.contents: dict[bytes, int] = {}
        self.unused: list[int] = []  # cached blocks without a holder, the one to be evicted next first

    def held(self) -> set[int]:
        return {block for blocks, _ in self.tables for block in blocks}

    def cached(self) -> set[int]:
        return set(self.contents.values())

    @rule(words=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def admit(self, words: list[int]) -> None:
        """Hold the cached blocks of a chain, and allocate new blocks for the rest if enough are available."""
        hashes = chain(words)
        known = []
        for digest in hashes:
            if digest not in self.contents:
                break
            known.append(self.contents[digest])
        assert self.pool.match(hashes) == known
        self.pool.hold(known)
        self.unused = [block for block in self.unused if block not in known]
        self.tables.append((list(known), hashes))
        missing = len(words) - len(known)
        if missing <= self.pool.num_available:
            self.tables[-1][0].extend(self.allocate(missing))
        else:
            self.release(len(self.tables) - 1)

    def allocate(self, count: int) -> list[int]:
        busy = self.held()
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        for block in blocks:
            assert block not in busy, "a block is given out twice"
            empty = set(range(NUM_BLOCKS)) - busy - set(self.unused)
            if empty:
                assert block in empty, "a cached block is evicted while an empty one is left"
            else:
                assert block == self.unused.pop(0), "not the least recently used is evicted"
                self.contents = {digest: other for digest, other in self.contents.items() if other != block}
            busy.add(block)
        return blocks

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """Complete the first blocks of a table."""
        blocks, hashes = data.draw(st.sampled_from(self.tables))
        count = data.draw(st.integers(1, len(blocks)))
        self.remember(blocks[:count], hashes[:count])

    def remember(self, blocks: list[int], hashes: list[bytes]) -> None:
        for block, digest in zip(blocks, hashes, strict=True):
            self.pool.remember(block, digest)
            if self.caching and digest not in self.contents and block not in self.cached():
                self.contents[digest] = block

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        blocks, hashes = data.draw(st.sampled_from(self.tables))
        self.pool.hold(blocks)
        self.tables.append((list(blocks), hashes))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.release(data.draw(st.integers(0, len(self.tables) - 1)))

    def release(self, index: int) -> None:
        blocks, _ = self.tables.pop(index)
        self.pool.release(blocks)
        # The head of a sequence is of use to more prompts than its tail, so it stays longer.
        for block in reversed(blocks):
            if block not in self.held() and block in self.cached():
                self.unused.append(block)

    @rule(words=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def serve(self, words: list[int]) -> None:
        """Admit, compute and release a whole sequence."""
        before = len(self.tables)
        self.admit(words)
        if len(self.tables) > before:
            self.remember(*self.tables[-1])
            self.release(len(self.tables) - 1)

    @precondition(lambda self: len(self.unused) == NUM_BLOCKS)
    @rule()
    def forget(self) -> None:
        self.pool.release(self.pool.allocate(NUM_BLOCKS))
        self.contents.clear()
        self.unused.clear()

    @invariant()
    def counts_agree(self) -> None:
        held = self.held()
        assert self.pool.num_held == len(held)
        assert self.pool.num_available == NUM_BLOCKS - len(held)
        assert self.pool.num_cached == len(self.cached() - held)
        for block in range(NUM_BLOCKS):
            assert self.pool.is_shared(block) == (sum(block in blocks for blocks, _ in self.tables) > 1)
        self.pool.check_integrity([blocks for blocks, _ in self.tables])


class PoolWithoutCacheMachine(PoolMachine):
    caching = False


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolWithoutCache = PoolWithoutCacheMachine.TestCase
TestPoolWithoutCache.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_more_blocks_than_there_are_is_an_error() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    with pytest.raises(KeyError):
        pool.allocate(1)


def test_the_integrity_check_finds_a_lost_reference() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.check_integrity([blocks])
    with pytest.raises(RuntimeError, match=f"block {min(blocks)} has 1 references, 0 tables"):
        pool.check_integrity([])
    with pytest.raises(RuntimeError, match="2 tables"):
        pool.check_integrity([blocks, blocks])


def test_the_integrity_check_finds_a_wrong_list_and_a_wrong_hash() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.remember(block, b"digest")
    pool._hash_of[block] = 0, b"other"
    with pytest.raises(RuntimeError, match="hash"):
        pool.check_integrity([[block]])
    pool._hash_of[block] = 0, b"digest"
    pool._available[block] = None
    with pytest.raises(RuntimeError, match="wrong list"):
        pool.check_integrity([[block]])
