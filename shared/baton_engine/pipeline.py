"""The steps that a device is at."""

import time
from collections import deque

from .runner import Choice, Launched
from .sequence import Step

# What it takes to launch the next step, and how far off the prediction of the one before may be.
_LEAD_S = 0.004
_LEAD_SHARE = 0.1
# Of prompts, in a step that tells how fast the device is, and how much the last such step counts.
_LEAST_TOKENS = 512
_NEWEST_SHARE = 0.1


class Pipeline:
    """Steps that were launched and are not read yet, in their order."""

    def __init__(self, prefill_rate: float) -> None:
        """prefill_rate: prompt tokens that the device computes in a second, from which it is followed; 0 = unknown."""
        self.prefill_rate = prefill_rate
        self._steps: deque[tuple[Step, Launched]] = deque()
        self._followed = False  # whether the oldest was launched before the one before it was read
        self._began_at = 0.0  # of the oldest: when it was launched, or the one before it read

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> tuple[Step, Launched]:
        return self._steps[0]

    def put(self, step: Step, launched: Launched) -> None:
        if not self._steps:
            self._began_at, self._followed = time.monotonic(), False
        self._steps.append((step, launched))

    def read(self) -> tuple[Step, list[list[Choice]]]:
        """Wait for the oldest, and remove it; returns it with its results."""
        step, launched = self._steps.popleft()
        results = launched.wait()
        now = time.monotonic()
        if self._followed and self.prefill_rate and _is_prompts(step) and step.num_tokens >= _LEAST_TOKENS:
            self.prefill_rate += _NEWEST_SHARE * (step.num_tokens / (now - self._began_at) - self.prefill_rate)
        self._began_at, self._followed = now, True
        return step, results

    def is_full(self) -> bool:
        """Whether the next step may wait without the device having to: a step of prompts alone is under way, of which
        one knows how long it takes."""
        if len(self._steps) != 1 or not self.prefill_rate:
            return False
        [(step, launched)] = self._steps
        if not _is_prompts(step) or launched.done():
            return False
        seconds = step.num_tokens / self.prefill_rate
        return time.monotonic() < self._began_at + seconds * (1 - _LEAD_SHARE) - _LEAD_S


def _is_prompts(step: Step) -> bool:
    return step.counts[0] > 1
