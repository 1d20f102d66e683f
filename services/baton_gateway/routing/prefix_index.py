"""The index of the KV blocks that each pod's prefix cache holds, as the pods report them."""

from collections.abc import Iterable


class PrefixIndex:
    """Maps the key of a block to the pods that have it, one bit for each pod, and each pod to its keys.

    A pod is known by its slot, a small number. At most `max_entries` (block, pod) pairs are kept; a pod whose blocks do
    not fit counts as having fewer blocks cached.
    """

    def __init__(self, max_entries: int = 4_000_000) -> None:
        self._max_entries = max_entries
        self._holders: dict[int, int] = {}
        self._keys: dict[int, set[int]] = {}
        self._bits: list[int] = []  # most blocks are on one pod only, and share these objects as their values
        self.num_entries = 0

    def gain(self, slot: int, keys: Iterable[int]) -> None:
        """Note blocks that a pod has cached."""
        holders, held, bit = self._holders, self._keys.setdefault(slot, set()), self._bit(slot)
        room = self._max_entries - self.num_entries + len(held)
        for key in keys:
            if key in held:
                continue
            if len(held) >= room:
                break
            others = holders.get(key)
            holders[key] = bit if others is None else others | bit
            held.add(key)
        self.num_entries = self._max_entries - room + len(held)

    def lose(self, slot: int, keys: Iterable[int]) -> None:
        """Note blocks that a pod has evicted."""
        held, bit = self._keys.get(slot, set()), self._bit(slot)
        for key in keys:
            if key in held:
                held.remove(key)
                self.num_entries -= 1
                self._unmark(key, bit)

    def drop(self, slot: int) -> None:
        """Forget all blocks of a pod."""
        bit = self._bit(slot)
        keys = self._keys.pop(slot, set())
        self.num_entries -= len(keys)
        for key in keys:
            self._unmark(key, bit)

    def match(self, keys: Iterable[int]) -> dict[int, int]:
        """Return by slot how many of these blocks a pod has, from the first on without a gap.

        Pods with none are absent. Reads one key more than the longest match.
        """
        lengths: dict[int, int] = {}
        holders, length, holding_all = self._holders, 0, -1
        for key in keys:
            holding_this = holders.get(key, 0) & holding_all
            if holding_this != holding_all and length:
                _note(holding_all & ~holding_this, length, lengths)
            holding_all = holding_this
            if not holding_all:
                return lengths
            length += 1
        if length:
            _note(holding_all, length, lengths)
        return lengths

    def _bit(self, slot: int) -> int:
        while len(self._bits) <= slot:
            self._bits.append(1 << len(self._bits))
        return self._bits[slot]

    def _unmark(self, key: int, bit: int) -> None:
        others = self._holders[key] & ~bit
        if others:
            self._holders[key] = others
        else:
            del self._holders[key]


def _note(pods: int, length: int, lengths: dict[int, int]) -> None:
    while pods:
        lowest = pods & -pods
        lengths[lowest.bit_length() - 1] = length
        pods ^= lowest
