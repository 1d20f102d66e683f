"""Tracks the KV of exporting requests that is computed and has not been handed out yet."""

from collections.abc import KeysView
from typing import cast

import msgspec

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout

from .executor import Fence
from .sequence import Sequence, State
from .step import Step


class Export(msgspec.Struct):
    """A part of an exporting request's KV that is complete behind a fence, or now.

    tables: the request's block table for each group of layers.
    """

    id: int
    extent: Extent
    tables: list[list[int]]
    fence: Fence | None = None


class Exports:
    """The progress of each exporting request."""

    def __init__(self, layout: KvLayout, block_size: int) -> None:
        self._layout = layout
        self._block_size = block_size
        self._first_unsent: dict[int, int] = {}  # by request, the first token of which not all layers are handed out
        self._layers_sent = 0  # how many layers have been handed out for the tokens of the step in flight

    @property
    def ids(self) -> KeysView[int]:
        """The requests of which KV has been handed out."""
        return self._first_unsent.keys()

    def end(self, id: int) -> None:
        """Forget a request, exporting or not."""
        self._first_unsent.pop(id, None)

    def step_ended(self) -> None:
        """Note that all KV of the step in flight has been handed out."""
        self._layers_sent = 0

    def hand_out_layers(self, step: Step, layers: int, fence: Fence | None) -> list[Export]:
        """Return the KV of the step in flight that has not been handed out yet, of its first `layers` layers, which are
        complete behind the fence."""
        if layers <= self._layers_sent:
            return []
        exports: list[Export] = []
        for (sequence, count, end), draws in zip(step, step.plan.draws, strict=True):
            if sequence.exports and sequence.state is not State.FINISHED:
                exports += self.hand_out(sequence, count, end, draws > 0, layers)
        for export in exports:
            export.fence = fence
        self._layers_sent = layers
        return exports

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
        first = self._first_unsent.get(id, cast(int, sequence.request.exports_from))
        # Only whole blocks are handed out before the last chunk. Tokens of later steps do not count yet.
        end, begin = sequence.given_len if complete else end // size * size, end - count
        if end <= first:
            return []
        all_layers = layers == self._layout.num_layers
        if all_layers and not self._layers_sent:
            self._first_unsent[id] = end
            return [extent(first, end - first)]
        extents: list[Extent] = []
        if first < begin:
            # The steps before have computed these tokens, in all layers.
            first, earlier = min(begin, end), first
            self._first_unsent[id] = first
            extents.append(extent(earlier, first - earlier))
        if first < end:
            extents.append(extent(first, end - first, self._layers_sent, layers - self._layers_sent))
            if all_layers:
                self._first_unsent[id] = end
        return extents
