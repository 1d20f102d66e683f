"""Tracks the KV of exporting requests that is computed and has not been handed out yet."""

from typing import cast

import msgspec

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout

from .executor import Fence
from .sequence import Sequence


class Export(msgspec.Struct):
    """A part of an exporting request's KV that is complete behind a fence, or now.

    tables: the request's block table for each group of layers.
    """

    id: int
    extent: Extent
    tables: list[list[int]]
    fence: Fence | None = None


class Exports:
    """The progress of each exporting request.

    first_unsent: by request, the first token whose KV has not been handed out for all layers. layers_sent: how many
    layers have been handed out for the tokens of the step in flight.
    """

    def __init__(self, layout: KvLayout, block_size: int) -> None:
        self.first_unsent: dict[int, int] = {}
        self.layers_sent = 0
        self._layout = layout
        self._block_size = block_size

    def hand_out(self, sequence: Sequence, count: int, end: int, complete: bool, layers: int) -> list[Export]:
        """Return the KV that has not been handed out yet, after a step has computed `layers` layers of the `count`
        tokens that end at `end`.

        complete: these are the last tokens. Tokens that no later query sees are left out.
        """
        tables = [table.blocks for table in sequence.tables]
        return [
            Export(sequence.request.id, part, tables)
            for extent in self._extents(sequence, count, end, complete, layers)
            for part in self._layout.still_seen(extent, sequence.given_len)
        ]

    def _extents(self, sequence: Sequence, count: int, end: int, complete: bool, layers: int) -> list[Extent]:
        id, size, extent = sequence.request.id, self._block_size, self._layout.extent
        first = self.first_unsent.get(id, cast(int, sequence.request.exports_from))
        # Only whole blocks are handed out before the last chunk. Tokens of later steps do not count yet.
        end, begin = sequence.given_len if complete else end // size * size, end - count
        if end <= first:
            return []
        all_layers = layers == self._layout.num_layers
        if all_layers and not self.layers_sent:
            self.first_unsent[id] = end
            return [extent(first, end - first)]
        extents: list[Extent] = []
        if first < begin:
            # The steps before have computed these tokens, in all layers.
            first, earlier = min(begin, end), first
            self.first_unsent[id] = first
            extents.append(extent(earlier, first - earlier))
        if first < end:
            extents.append(extent(first, end - first, self.layers_sent, layers - self.layers_sent))
            if all_layers:
                self.first_unsent[id] = end
        return extents
