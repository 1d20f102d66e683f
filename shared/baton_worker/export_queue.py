"""Chooses the KV for each free staging slot, so that a decode pod that reads nothing does not delay other pods."""

from collections import Counter, deque

import msgspec

from baton_engine.exports import Export


class ExportQueue:
    """Exports wait in lanes, one per decode pod. The lanes take turns.

    A lane gets no further slot when it holds at least as many slots as are free. So stalled lanes leave slots for
    other lanes, unless there are as many stalled lanes as slots (the dynamic thresholds of Choudhury and Hahne,
    IEEE/ACM Transactions on Networking 6(2), 1998).
    """

    def __init__(self, num_slots: int, slot_size: int, block_size: int) -> None:
        """slot_size: how many tokens of one layer fit into a slot. block_size: tokens."""
        self._slot_size = slot_size
        self._block_size = block_size
        self._free = deque(range(num_slots))
        self._waiting: dict[int, deque[Export]] = {}  # by lane; the first lane is the next to be served
        self._lane_of: dict[int, int] = {}  # by slot
        self._held: Counter[int] = Counter()  # slots by lane
        self._credit: dict[int, int] = {}  # by lane, slots that it may still take; other lanes have no limit

    def limit(self, lane: int, slots: int) -> None:
        """Limit a lane to this many more slots, and to those that `grant` adds later."""
        self._credit[lane] = slots

    def grant(self, lane: int, slots: int) -> None:
        """Let a limited lane take more slots. Does nothing for a lane without a limit."""
        if lane in self._credit:
            self._credit[lane] += slots

    def put(self, lane: int, export: Export) -> None:
        self._waiting.setdefault(lane, deque()).append(export)

    @property
    def ready(self) -> bool:
        """Whether `take` would return an export."""
        return self._next() is not None

    def take(self) -> tuple[Export, int] | None:
        """Return a part of the next lane's oldest export and a free slot for it; None when no lane can get a slot.

        The part is as much as fits into the slot, in whole blocks where possible. The rest stays in the lane.
        """
        lane = self._next()
        if lane is None:
            return None
        exports = self._waiting.pop(lane)
        export = exports.popleft()
        first, end = export.extent.tokens.start, export.extent.tokens.stop
        limit = first + self._slot_size // export.extent.num_layers
        if end > limit:
            aligned = limit - limit % self._block_size
            cut = aligned if aligned > first else limit
            exports.appendleft(_part(export, cut, end))
            export = _part(export, first, cut)
        if exports:
            self._waiting[lane] = exports
        slot = self._free.popleft()
        self._lane_of[slot] = lane
        self._held[lane] += 1
        self.grant(lane, -1)
        return export, slot

    def free(self, slot: int, unused: bool = False) -> None:
        """Free a slot that has been read. unused: it was not read, and its lane gets the credit back."""
        lane = self._lane_of.pop(slot)
        if unused:
            self.grant(lane, 1)
        self._held[lane] -= 1
        if not self._held[lane]:
            del self._held[lane]
        self._free.append(slot)

    def drop(self, id: int) -> None:
        """Remove the exports of a request that still wait."""
        kept = {lane: deque(e for e in exports if e.id != id) for lane, exports in self._waiting.items()}
        self._waiting = {lane: exports for lane, exports in kept.items() if exports}

    def take_lane(self, lane: int) -> list[Export]:
        """Remove a lane with its credit, and return the exports that waited in it."""
        self._credit.pop(lane, None)
        return list(self._waiting.pop(lane, ()))

    def _next(self) -> int | None:
        free = len(self._free)
        return next((lane for lane in self._waiting if self._held[lane] < free and self._credit.get(lane, 1) > 0), None)


def _part(export: Export, first_token: int, end: int) -> Export:
    extent = msgspec.structs.replace(export.extent, first_token=first_token, num_tokens=end - first_token)
    return msgspec.structs.replace(export, extent=extent)
