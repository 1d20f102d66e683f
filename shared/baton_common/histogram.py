"""A histogram that is cheap enough for thousands of values a second."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec


class Histogram(msgspec.Struct, array_like=True):
    """Counts of the values in each bucket. The last count is for values above all bounds. Not thread-safe."""

    bounds: Sequence[float]
    counts: list[int] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
