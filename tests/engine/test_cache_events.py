"""The prefix cache events that gateways receive lead to an index with the contents of the block pool."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from baton_common.block_hash import block_key
from baton_common.set_changes import SetChanges
from baton_gateway.routing.prefix_index import PrefixIndex
from baton_worker.cache_view import CacheView

from .test_block_pool import NUM_BLOCKS, PoolMachine

LIMITS = st.integers(1, 4)
MANY = 1000


class EventMachine(PoolMachine):
    """The pool's changes reach two gateways, in parts and late; a gateway's stream may break and begin anew."""

    def __init__(self) -> None:
        super().__init__()
        self.view = CacheView()
        self.index = PrefixIndex()
        self.watchers: list[SetChanges[int]] = []

    @initialize()
    def begin(self) -> None:
        self.watchers = [self.view.watch(), self.view.watch()]

    @rule(limit=LIMITS)
    def engine_says(self, limit: int) -> None:
        gained, lost = self.pool.changes.take(limit)
        assert len(gained) + len(lost) <= limit
        self.view.update(map(block_key, gained), map(block_key, lost))

    @rule(slot=st.integers(0, 1), limit=LIMITS)
    def gateway_hears(self, slot: int, limit: int) -> None:
        gained, lost = self.watchers[slot].take(limit)
        assert len(gained) + len(lost) <= limit
        self.index.lose(slot, lost)
        self.index.gain(slot, gained)

    @rule(slot=st.integers(0, 1), limit=LIMITS)
    def stream_begins_anew(self, slot: int, limit: int) -> None:
        self.view.leave(self.watchers[slot])
        self.watchers[slot] = self.view.watch()
        self.index.drop(slot)
        self.gateway_hears(slot, limit)

    @rule()
    def all_is_told(self) -> None:
        self.engine_says(MANY)
        keys = {block_key(digest) for digest in self.contents}
        for slot in range(2):
            self.gateway_hears(slot, MANY)
            assert {key for key in keys if slot in self.index.match([key])} == keys
        assert self.index.num_entries == 2 * len(keys)

    @invariant()
    def what_waits_is_bounded(self) -> None:
        for changes in (self.pool.changes, *self.watchers):
            assert len(changes.gained) <= NUM_BLOCKS
            assert len(changes.lost) <= NUM_BLOCKS


TestEvents = EventMachine.TestCase
TestEvents.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
