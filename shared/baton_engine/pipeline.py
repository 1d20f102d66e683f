"""The steps that a device is at."""

import time
from collections import deque
from collections.abc import Callable

from .executor import Launched
from .results import Results
from .step import Step
from .step_plan import StepPlan

# How long before the device is done the next step is launched: what that takes, and how far off a prediction may be.
_LEAD_S = 0.012
_LEAD_SHARE = 0.05
# Prompt tokens of a step that tells how fast the device is, and how much the last such step counts.
_LEAST_TOKENS = 512
_NEWEST_SHARE = 0.1
_ON_TIME_S = 0.002


class Pipeline:
    """Steps that were launched and are not read yet, in their order."""

    def __init__(self, prefill_rate: float) -> None:
        """prefill_rate: prompt tokens that the device computes in a second, from which it is followed; 0 = unknown."""
        self.prefill_rate = prefill_rate
        self._steps: deque[tuple[Step, Launched]] = deque()
        self._began_at = 0.0  # when the device began the oldest, or before
        self._timed = False  # whether it was then, and not idle before
        self._busy_at = 0.0  # when it was last seen not to be done

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> tuple[Step, Launched]:
        return self._steps[0]

    def put(self, step: Step, launch: Callable[[StepPlan], Launched]) -> None:
        """Launch a step behind the others."""
        # An idle device begins with the first kernel of a step, long before the last is launched.
        if not self._steps:
            self._began_at, self._timed = time.monotonic(), False
        self._steps.append((step, launch(step.plan)))

    def done(self) -> bool:
        """Whether the oldest can be read at once."""
        if self._steps[0][1].done():
            return True
        self._busy_at = time.monotonic()
        return False

    def read(self) -> tuple[Step, Results]:
        """Wait for the oldest, and remove it; returns it with its results."""
        waited = not self.done()
        step, launched = self._steps.popleft()
        results = launched.wait()
        now = time.monotonic()
        on_time = waited or now - self._busy_at < _ON_TIME_S
        tokens = step.plan.num_tokens
        if on_time and self._timed and self.prefill_rate and _is_prompts(step) and tokens >= _LEAST_TOKENS:
            self.prefill_rate += _NEWEST_SHARE * (tokens / (now - self._began_at) - self.prefill_rate)
        self._began_at, self._timed = (now, True) if on_time else (self._busy_at, False)
        return step, results

    def is_full(self) -> bool:
        """Whether the next step may wait without the device having to: a step of prompts alone is under way, of which
        one knows how long it takes."""
        if len(self._steps) != 1 or not self.prefill_rate or not _is_prompts(self._steps[0][0]) or self.done():
            return False
        seconds = self._steps[0][0].plan.num_tokens / self.prefill_rate
        return time.monotonic() < self._began_at + seconds * (1 - _LEAD_SHARE) - _LEAD_S


def _is_prompts(step: Step) -> bool:
    return step.plan.counts[0] > 1
