"""Divides long work in the event loop into slices of time."""

import asyncio
import time

SLICE_S = 0.002


class Pace:
    """Lets other tasks run between the steps of long work."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def over(self) -> bool:
        """Whether the current slice of time is over. This costs well below a microsecond."""
        return time.perf_counter() - self._began > SLICE_S

    async def yield_to_loop(self) -> None:
        """Call this between two steps. It yields to other tasks when the slice of time is over."""
        if self.over:
            await asyncio.sleep(0)
            self._began = time.perf_counter()
