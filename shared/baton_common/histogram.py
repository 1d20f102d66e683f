"""A histogram for values that come by the thousand a second."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec


class Histogram(msgspec.Struct, array_like=True):
    """Counts of values up to each bound, the last count of those above all; of one thread."""

    bounds: Sequence[float]
    counts: list[int] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
