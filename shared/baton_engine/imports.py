"""Tracks the KV that has been ordered from a source and has not arrived yet."""

from collections.abc import Callable

import msgspec

from baton_common.extent import Extent, Missing
from baton_common.kv_layout import KvLayout

from .delta import Reservation
from .executor import Fence
from .kv_source import KvSource
from .sequence import Sequence

# Writes KV into the blocks of the block tables, one for each group of layers, after the fence.
Write = Callable[[list[list[int]], Fence | None], None]


class Import(msgspec.Struct):
    """The KV that a source is to bring into a sequence's blocks.

    fence: behind the steps in flight that may still write to these blocks on behalf of the previous owner.
    """

    sequence: Sequence
    source: KvSource
    generation: int
    missing: Missing
    fence: Fence | None
    first_tokens: list[int] | None = None

    @property
    def complete(self) -> bool:
        return not self.missing and (self.first_tokens is not None or not self.source.brings_first_tokens)


class Imports:
    """The sources of KV, and the imports of the sequences that wait for one of them.

    sources: in the order in which they are asked. waiting: by request id.
    """

    def __init__(self, layout: KvLayout, sources: list[KvSource]) -> None:
        self.sources = sources
        self.waiting: dict[int, Import] = {}
        self._layout = layout
        self._generations = 0

    def reach(self, sequence: Sequence, cached: Callable[[], int]) -> int:
        """Return the token up to which the first source that can help brings the KV of a sequence; 0 without one.

        cached: as in KvSource.reach.
        """
        _, end = self._find(sequence, cached)
        return end

    def order(self, sequence: Sequence, fence: Fence | None, first_tokens: list[int] | None) -> bool:
        """Order all KV that a sequence lacks up to its import_end. KV of an earlier order that comes later is refused.

        Returns False, and orders nothing, if no source has that KV any more or none of it is lacking.
        """
        id, first, end = sequence.request.id, sequence.cached, sequence.import_end
        source, reach = self._find(sequence, lambda: first)
        # While the sequence waited for its blocks, the source may have lost KV, or the cache may have caught up.
        if source is None or not first < end <= reach:
            return False
        self._generations += 1
        missing = Missing(self._layout.seen(first, end - first))
        self.waiting[id] = Import(sequence, source, self._generations, missing, fence, first_tokens)
        source.order(sequence, Reservation(id, first, end - first, self._generations, first))
        return True

    def awaiting(self, id: int, generation: int, extent: Extent) -> Import | None:
        """Return the import that was ordered in this generation and still lacks all of an extent."""
        entry = self.waiting.get(id)
        if entry is None or entry.generation != generation or not entry.missing.lacks(extent):
            return None
        return entry

    def end(self, id: int) -> Import | None:
        """Forget the import of a request, if there is one, and return it."""
        entry = self.waiting.pop(id, None)
        if entry is not None:
            entry.source.cancel(id)
        return entry

    def _find(self, sequence: Sequence, cached: Callable[[], int]) -> tuple[KvSource | None, int]:
        # After its first token a request may consist of several sequences, and imports are known by the request.
        if sequence.may_import and sequence.known == sequence.given_len:
            for source in self.sources:
                end = source.reach(sequence, cached)
                if not source.brings_first_tokens:
                    end = 0 if sequence.needs_prompt_logits else min(end, sequence.known - 1)
                if end:
                    return source, end
        return None, 0
