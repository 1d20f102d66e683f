"""The record of everything that was done to a fleet, with times."""

import asyncio
import contextlib
from collections.abc import Iterator

from .plan import Scenario


class Journal:
    """Times are the event loop's, in seconds."""

    def __init__(self) -> None:
        self._entries: list[tuple[Scenario, float]] = []
        self._ends: dict[int, float] = {}  # by the scenario's number
        self._begun = asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def entry(self, scenario: Scenario) -> Iterator[None]:
        """Note the time from here to the end of the block as that of a scenario."""
        loop = asyncio.get_running_loop()
        self._entries.append((scenario, loop.time()))
        try:
            yield
        finally:
            self._ends[scenario.number] = loop.time()

    def since(self, moment: float) -> str:
        """Return the scenarios that lasted until then, or began later; one a line."""
        now = asyncio.get_running_loop().time()
        lines = []
        for scenario, begun in self._entries:
            ended = self._ends.get(scenario.number)
            if ended is None or ended >= moment:
                until = "goes on" if ended is None else f"ended {now - ended:.1f} s ago"
                lines.append(f"{scenario} (began {now - begun:.1f} s ago, {until})")
        return "\n".join(lines)
