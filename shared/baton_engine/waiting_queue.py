"""The queue of the sequences that wait for their blocks and a row, in which tenants take turns."""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from operator import attrgetter

from .sequence import Sequence

ORDER = attrgetter("order")


class WaitingQueue:
    """sequences: all of them, the most urgent first. by_tenant: those of each tenant that has any, in the same order.
    imports: how many of them need KV that a source brings.

    Of the most urgent sequences of all tenants, that of the tenant which would then have the fewest rows goes first.
    """

    def __init__(self, held: Counter[bytes]) -> None:
        """held: as in Admitted, which keeps it up to date."""
        self.sequences: list[Sequence] = []
        self.by_tenant: dict[bytes, list[Sequence]] = {}
        self.imports = 0
        self._held = held

    def add(self, sequence: Sequence) -> None:
        insort(self.sequences, sequence, key=ORDER)
        insort(self.by_tenant.setdefault(sequence.tenant, []), sequence, key=ORDER)
        self.imports += sequence.imports

    def remove(self, sequence: Sequence) -> None:
        remove_sorted(self.sequences, sequence)
        own = self.by_tenant[sequence.tenant]
        remove_sorted(own, sequence)
        if not own:
            del self.by_tenant[sequence.tenant]
        self.imports -= sequence.imports

    def first(self) -> Sequence:
        """Return the sequence whose turn it is. There must be one."""
        if len(self.by_tenant) == 1:
            return self.sequences[0]
        return min((own[0] for own in self.by_tenant.values()), key=lambda head: _turn(head, self._held))

    def in_turn(self) -> Iterator[Sequence]:
        """Yield the sequences in the order of their turns, as if each got its rows."""
        if len(self.by_tenant) == 1:
            yield from self.sequences.copy()
            return
        held, queues = self._held.copy(), {tenant: deque(own) for tenant, own in self.by_tenant.items()}
        while queues:
            tenant = min(queues, key=lambda each: _turn(queues[each][0], held))
            sequence = queues[tenant].popleft()
            held[tenant] += sequence.rows_needed
            if not queues[tenant]:
                del queues[tenant]
            yield sequence

    def check_integrity(self) -> None:
        """Raise RuntimeError if the sequences by tenant are not all sequences, or the count of imports is wrong."""
        if sorted((each for own in self.by_tenant.values() for each in own), key=ORDER) != self.sequences:
            raise RuntimeError("the waiting sequences by tenant are wrong")
        if self.imports != sum(sequence.imports for sequence in self.sequences):
            raise RuntimeError("the count of waiting imports is wrong")


def remove_sorted(sequences: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a list that is sorted by `order`."""
    del sequences[bisect_left(sequences, sequence.order, key=ORDER)]


def _turn(sequence: Sequence, held: Counter[bytes]) -> tuple[int, int, tuple[int, ...]]:
    """Return what decides on the turns of tenants; smaller is first. It counts the rows that the tenant would have."""
    return sequence.request.priority, held[sequence.tenant] + sequence.rows_needed, sequence.order
