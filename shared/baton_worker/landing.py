"""Where KV from other GPUs lands: each pair has slots of its own, so that none waits for another one's peer."""

from collections import deque
from collections.abc import Iterator

import msgspec
import torch

from .gpu_slots import GpuSlots
from .messages import MOST_ANNOUNCED, ReceivePiece


class _Berth(msgspec.Struct):
    """The slots of one pair. pair: None when it is closed; free: the slots into which nothing comes."""

    slots: range
    free: deque[int]
    pair: int | None = None
    waiting: deque[ReceivePiece] = msgspec.field(default_factory=deque)

    @property
    def idle(self) -> bool:
        return self.pair is None and len(self.free) == len(self.slots)


class Landing:
    """Hands a pair's slots to its pieces in the order of their announcement, as NCCL will bring them."""

    def __init__(self, most_pairs: int, slots_per_pair: int, slot_bytes: int, device: torch.device) -> None:
        self.slots_per_pair = slots_per_pair
        self.memory = GpuSlots(most_pairs * slots_per_pair, slot_bytes, device)
        self._berths = []
        for number in range(most_pairs):
            slots = range(number * slots_per_pair, (number + 1) * slots_per_pair)
            self._berths.append(_Berth(slots, deque(slots)))
        self._by_pair: dict[int, _Berth] = {}

    @property
    def room(self) -> bool:
        """Whether one more pair can be opened. A closed one's slots are taken until nothing uses them any more."""
        return any(berth.idle for berth in self._berths)

    def open(self, pair: int) -> None:
        """Give slots to a pair, while there is `room`. Raises torch.OutOfMemoryError."""
        berth = next(berth for berth in self._berths if berth.idle)
        self.memory.allocate(berth.slots)
        berth.pair = pair
        self._by_pair[pair] = berth

    def close(self, pair: int) -> None:
        """Forget a pair and what was announced for it. What has a slot keeps it until that is freed."""
        berth = self._by_pair.pop(pair, None)
        if berth is not None:
            berth.pair = None
            berth.waiting.clear()

    def put(self, piece: ReceivePiece) -> str | None:
        """Queue a piece that was announced. Returns why it cannot be received, if so: the pair is of no use then."""
        berth = self._by_pair.get(piece.pair)
        if berth is None:
            return "a piece was announced for a pair that is not there"
        if not 0 < piece.size <= self.memory.slot_bytes:
            return "the size of a piece that was announced is none that a piece can have"
        if len(berth.waiting) >= MOST_ANNOUNCED:
            return "too many pieces were announced"
        berth.waiting.append(piece)
        return None

    def take(self) -> Iterator[tuple[ReceivePiece, int]]:
        """Yield pieces that have a slot now."""
        for berth in list(self._by_pair.values()):
            while berth.waiting and berth.free and berth.pair is not None:
                yield berth.waiting.popleft(), berth.free.popleft()

    def free(self, slot: int) -> int | None:
        """Take a slot back; return the pair that has it again, None when that is closed."""
        berth = self._berths[slot // self.slots_per_pair]
        berth.free.append(slot)
        return berth.pair
