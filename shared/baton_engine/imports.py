"""What of the KV of importing requests has been ordered from another pod and has not come yet."""

import msgspec

from baton_common.extent import Extent, Missing
from baton_common.kv_layout import KvLayout

from .delta import Reservation
from .executor import Fence
from .sequence import Sequence


class Import(msgspec.Struct):
    """KV on its way into a sequence's blocks.

    fence: steps in flight that may still write to these blocks on behalf of the previous owner.
    """

    sequence: Sequence
    generation: int
    missing: Missing
    fence: Fence | None
    first_tokens: list[int] | None = None


class Imports:
    """waiting: by id, the requests that wait for KV or first tokens."""

    def __init__(self, layout: KvLayout) -> None:
        self.waiting: dict[int, Import] = {}
        self._layout = layout
        self._generations = 0

    def order(self, sequence: Sequence, fence: Fence | None, first_tokens: list[int] | None) -> Reservation:
        """Order all that a sequence lacks; what still comes of an earlier order is nobody's."""
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
