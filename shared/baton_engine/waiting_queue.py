"""The queue of the sequences that wait for their blocks and a row, in which tenants take turns."""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Set
from operator import attrgetter

from .sequence import Sequence

ORDER = attrgetter("order")


class WaitingQueue:
    """sequences: all of them, the most urgent first.

    Of the most urgent sequences of all tenants, the one goes first with which its tenant would have the fewest rows.
    The methods take the rows that each tenant holds as `held`.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._by_tenant: dict[bytes, list[Sequence]] = {}

    @property
    def tenants(self) -> Set[bytes]:
        """The tenants that have a sequence here."""
        return self._by_tenant.keys()

    def add(self, sequence: Sequence) -> None:
        insort(self.sequences, sequence, key=ORDER)
        insort(self._by_tenant.setdefault(sequence.tenant, []), sequence, key=ORDER)

    def remove(self, sequence: Sequence) -> None:
        remove_sorted(self.sequences, sequence)
        own = self._by_tenant[sequence.tenant]
        remove_sorted(own, sequence)
        if not own:
            del self._by_tenant[sequence.tenant]

    def first(self, held: Counter[bytes]) -> Sequence:
        """Return the sequence whose turn it is. There must be one."""
        if len(self._by_tenant) == 1:
            return self.sequences[0]
        return min((own[0] for own in self._by_tenant.values()), key=lambda head: _turn(head, held))

    def in_turn(self, held: Counter[bytes]) -> Iterator[Sequence]:
        """Yield the sequences in the order of their turns, as if each got its rows."""
        if len(self._by_tenant) == 1:
            yield from self.sequences.copy()
            return
        held, queues = held.copy(), {tenant: deque(own) for tenant, own in self._by_tenant.items()}
        while queues:
            tenant = min(queues, key=lambda each: _turn(queues[each][0], held))
            sequence = queues[tenant].popleft()
            held[tenant] += sequence.rows_needed
            if not queues[tenant]:
                del queues[tenant]
            yield sequence

    def check(self) -> None:
        """Raise RuntimeError if the sequences by tenant are not all sequences."""
        if sorted((each for own in self._by_tenant.values() for each in own), key=ORDER) != self.sequences:
            raise RuntimeError("the waiting sequences by tenant are wrong")


def remove_sorted(sequences: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a list that is sorted by `order`."""
    del sequences[bisect_left(sequences, sequence.order, key=ORDER)]


def _turn(sequence: Sequence, held: Counter[bytes]) -> tuple[int, int, tuple[int, ...]]:
    """Return what decides on the turns of tenants; smaller is first. It counts the rows that the tenant would have."""
    return sequence.request.priority, held[sequence.tenant] + sequence.rows_needed, sequence.order
