"""Long work inside the event loop, in pieces."""

import asyncio
import time

SLICE_S = 0.002


class Pace:
    """Lets everybody else have a turn in the middle of work of many steps."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def over(self) -> bool:
        """Whether the slice of time is over; asking costs next to nothing."""
        return time.perf_counter() - self._began > SLICE_S

    async def breathe(self) -> None:
        """To be called between two steps: wait for the others if the slice of time is over."""
        if self.over:
            await asyncio.sleep(0)
            self._began = time.perf_counter()
