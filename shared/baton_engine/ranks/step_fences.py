"""Finds the place in this rank's work that a StepMark of the engine process names."""

from collections import deque
from typing import NamedTuple

from baton_engine.executor import Fence, LaunchedHere, StepMark

# Older steps are over, since fewer than this are in flight.
_STEPS = 8


class _Step(NamedTuple):
    number: int
    launched: LaunchedHere
    end: Fence | None


class StepFences:
    """The latest steps of a rank, and the fences behind them."""

    def __init__(self) -> None:
        self._launches = 0
        self._steps: deque[_Step] = deque(maxlen=_STEPS)

    def add(self, launched: LaunchedHere, end: Fence | None) -> None:
        """Note the next step. end: behind all of it."""
        self._launches += 1
        self._steps.append(_Step(self._launches, launched, end))

    def at(self, mark: StepMark) -> Fence | None:
        """Return a fence at the mark or behind a later step; None = the work before the mark is over."""
        for step in self._steps:
            if step.number == mark.launched and mark.layers:
                return step.launched.behind_layers(mark.layers)
            if step.number >= mark.launched:
                return step.end
        return None
