"""Slots for KV from other GPUs. Each pair has slots of its own, so that no pair waits for another pair's peer."""

from collections import deque
from collections.abc import Iterator

import msgspec

from .messages import MOST_ANNOUNCED, ReceivePiece


class _PairSlots(msgspec.Struct):
    """Slots for one pair. pair: None when it is closed. free: unused slots. waiting: pieces without a slot."""

    slots: range
    free: deque[int]
    pair: int | None = None
    waiting: deque[ReceivePiece] = msgspec.field(default_factory=deque)

    @property
    def idle(self) -> bool:
        return self.pair is None and len(self.free) == len(self.slots)


class Landing:
    """Gives a pair's slots to its pieces in the order of their announcements, as NCCL delivers them."""

    def __init__(self, most_pairs: int, slots_per_pair: int) -> None:
        self.slots_per_pair = slots_per_pair
        self._groups = []
        for number in range(most_pairs):
            slots = range(number * slots_per_pair, (number + 1) * slots_per_pair)
            self._groups.append(_PairSlots(slots, deque(slots)))
        self._by_pair: dict[int, _PairSlots] = {}

    @property
    def room(self) -> bool:
        """Whether one more pair can be opened. The slots of a closed pair count as used until all of them are freed."""
        return any(group.idle for group in self._groups)

    def open(self, pair: int) -> list[int]:
        """Give slots to a new pair and return them. There must be `room`."""
        group = next(group for group in self._groups if group.idle)
        group.pair = pair
        self._by_pair[pair] = group
        return list(group.slots)

    def close(self, pair: int) -> None:
        """Remove a pair and its waiting pieces. A piece that has a slot keeps it until the slot is freed."""
        group = self._by_pair.pop(pair, None)
        if group is not None:
            group.pair = None
            group.waiting.clear()

    def put(self, piece: ReceivePiece) -> str | None:
        """Queue a piece that was announced. Returns why it cannot be received, which must end its pair; else None."""
        group = self._by_pair.get(piece.pair)
        if group is None:
            return "a piece was announced for a pair that does not exist"
        if len(group.waiting) >= MOST_ANNOUNCED:
            return "too many pieces were announced"
        group.waiting.append(piece)
        return None

    def take(self) -> Iterator[tuple[ReceivePiece, int]]:
        """Give free slots to waiting pieces, and yield each piece with its slot."""
        for group in list(self._by_pair.values()):
            while group.waiting and group.free and group.pair is not None:
                yield group.waiting.popleft(), group.free.popleft()

    def free(self, slot: int) -> int | None:
        """Free a slot. Return the pair that can use it again; None when the pair is closed."""
        group = self._groups[slot // self.slots_per_pair]
        group.free.append(slot)
        return group.pair
