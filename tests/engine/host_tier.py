"""A source of KV that keeps what the block pool evicts."""

from collections.abc import Callable

import torch

from baton_common.extent import Extent
from baton_engine.delta import Reservation
from baton_engine.engine import Engine
from baton_engine.sequence import Sequence


class HostTier:
    """Keeps evicted KV by hash, layer and token, and brings what is ordered when a test calls `bring`.

    kept: the KV of each evicted block, by its group of layers and its hash, then by layer and by token in the block.
    orders: what the engine waits for, by request id. brought: the number of tokens that have been brought.
    """

    brings_first_tokens = False

    def __init__(self, engine: Engine, read: Callable[[list[list[int]], Extent], torch.Tensor]) -> None:
        """read: returns a part of the KV that is in the blocks of a block table for each group."""
        self.kept: dict[tuple[int, bytes], dict[tuple[int, int], torch.Tensor]] = {}
        self.orders: dict[int, tuple[Sequence, Reservation]] = {}
        self.brought = 0
        self._engine = engine
        self._layout = engine.runner.cache.layout
        self._size = engine.config.block_size
        self._read = read
        engine.pool.on_evict = self._keep
        engine.add_source(self)

    def _keep(self, block: int, group: int, digest: bytes) -> None:
        tables = [[block]] * len(self._layout.groups)
        self.kept[group, digest] = {
            (layer, offset): self._read(tables, self._layout.extent(offset, 1, layer, 1)).clone()
            for layer in self._layout.groups[group].layers
            for offset in range(self._size)
        }

    def reach(self, sequence: Sequence, cached: Callable[[], int]) -> int:
        groups = range(len(self._layout.groups))
        hashes = sequence.hashes(0, (sequence.known - 1) // self._size)
        at = known = cached() // self._size
        while at < len(hashes) and all((group, hashes[at]) in self.kept for group in groups):
            at += 1
        return at * self._size if at > known else 0

    def order(self, sequence: Sequence, reservation: Reservation) -> None:
        self.orders[reservation.id] = sequence, reservation

    def cancel(self, id: int) -> None:
        self.orders.pop(id, None)

    def bring(self, id: int) -> None:
        """Bring all KV of an order, or give up in the middle when some is no longer kept."""
        sequence, order = self.orders[id]
        end = order.first_token + order.num_tokens
        hashes = sequence.hashes(0, end // self._size)
        for index, group in enumerate(self._layout.groups):
            for position in range(max(order.first_token, group.first_seen(end)), end):
                block = self.kept.get((index, hashes[position // self._size]))
                if block is None:
                    self._engine.cancel_import(id)
                    return
                for layer in group.layers:
                    extent = self._layout.extent(position, 1, layer, 1)
                    values = block[layer, position % self._size]
                    assert self._engine.import_kv(id, order.generation, extent, values) is not None
        self.brought += order.num_tokens
        assert id not in self.orders
