"""Heartbeats and progress counters of ranks in shared memory, by which hanging ranks are detected."""

from .ring import create_memory, map_memory

_FIELDS = 2
_BEATS, _WORK = range(_FIELDS)


class Board:
    """For each rank, a count of its heartbeats and a count of the pieces of work that it has reached.

    All ranks of a stage do the same work in the same order: commands and collective operations.
    """

    def __init__(self, memory: int) -> None:
        self._numbers = memoryview(map_memory(memory)).cast("q")

    @staticmethod
    def create(count: int) -> int:
        """Return the descriptor of the memory for so many ranks."""
        return create_memory("baton-board", count * _FIELDS * 8)

    def beat(self, rank: int) -> None:
        self._numbers[rank * _FIELDS + _BEATS] += 1

    def work(self, rank: int) -> None:
        """Note that a rank has reached the next piece of work."""
        self._numbers[rank * _FIELDS + _WORK] += 1

    def beats(self, rank: int) -> int:
        return self._numbers[rank * _FIELDS + _BEATS]

    def done(self, rank: int) -> int:
        """Return how many pieces of work a rank has reached."""
        return self._numbers[rank * _FIELDS + _WORK]
