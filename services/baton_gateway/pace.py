"""Long work inside the event loop, in pieces."""

import asyncio
import time

SLICE_S = 0.002


class Pace:
    """Lets everybody else have a turn in the middle of work of many steps."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def breathe(self) -> None:
        """To be called between two steps; costs next to nothing until a slice of time is over."""
        if time.perf_counter() - self._began > SLICE_S:
            await asyncio.sleep(0)
            self._began = time.perf_counter()
