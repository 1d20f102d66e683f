"""Tracks the KV of importing requests that has been ordered from another pod and has not arrived yet."""

import msgspec

from baton_common.extent import Extent, Missing
from baton_common.kv_layout import KvLayout

from .delta import Reservation
from .executor import Fence
from .sequence import Sequence


class Import(msgspec.Struct):
    """The KV that is to arrive in a sequence's blocks.

    fence: behind the steps in flight that may still write to these blocks on behalf of the previous owner.
    """

    sequence: Sequence
    generation: int
    missing: Missing
    fence: Fence | None
    first_tokens: list[int] | None = None


class Imports:
    """waiting: the imports of the requests that wait for KV or first tokens, by request id."""

    def __init__(self, layout: KvLayout) -> None:
        self.waiting: dict[int, Import] = {}
        self._layout = layout
        self._generations = 0

    def order(self, sequence: Sequence, fence: Fence | None, first_tokens: list[int] | None) -> Reservation:
        """Order all KV that a sequence lacks. KV of an earlier order that arrives later is refused."""
        self._generations += 1
        id, first, count = sequence.request.id, sequence.cached, sequence.given_len - sequence.cached
        missing = Missing(self._layout.seen(first, count))
        self.waiting[id] = Import(sequence, self._generations, missing, fence, first_tokens)
        return Reservation(id, first, count, self._generations, sequence.cached)

    def awaiting(self, id: int, generation: int, extent: Extent) -> Import | None:
        """Return the import that still lacks all of an extent, which was ordered in this generation."""
        entry = self.waiting.get(id)
        if entry is None or entry.generation != generation or not entry.missing.lacks(extent):
            return None
        return entry
