"""The steps in flight on a device."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

from .executor import Launched
from .results import Results
from .step import Step
from .step_plan import StepPlan
from .step_times import StepTimes, StepWork

# The next step is launched before the predicted end of the current one. If that one has prompts, the lead is the
# longest of the last launches of steps with prompts, at least _LEAD_S, plus the share of the current step's time by
# which a prediction may be wrong (_LEAD_SHARE).
_LEAD_S = 0.012
_LAUNCHES = 8
_LEAD_SHARE = 0.05
# After a step of decodes it is the longest of the last times that decodes took to be scheduled and launched, and a
# margin. The margin doubles whenever the device had to wait, and then shrinks slowly to _MARGIN_S again.
_MARGIN_S = 0.0005
_MOST_MARGIN_S = 0.008
_SHRINK = 0.99
# The end of a step counts as observed if the step was seen unfinished at most this long before.
_ON_TIME_S = 0.002


class Pipeline:
    """Steps that were launched and whose results have not been read, oldest first."""

    def __init__(self, times: StepTimes, stages: int = 1) -> None:
        """times: measured at start. They learn from the steps. stages: as in Executor."""
        self.times = times
        self._stages = stages
        self._steps: deque[tuple[Step, Launched]] = deque()
        self._predicted: deque[tuple[StepWork, float]] = deque()  # the seconds of each of these steps
        self._began_at = 0.0  # when the device began the oldest step, or an earlier moment
        self._timed = False  # whether _began_at is exact, as the device had finished the previous step just then
        self._busy_at = 0.0  # when the oldest step was last seen unfinished
        self._launches: deque[float] = deque(maxlen=_LAUNCHES)  # seconds of launches of steps with prompts
        self._decode_launches: deque[float] = deque(maxlen=_LAUNCHES)  # the same of decodes, with their scheduling
        self._asked_at = 0.0  # when `is_full` was last called since the last launch
        self._held = False  # whether the next launch has waited
        self._margin = _MARGIN_S

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> tuple[Step, Launched]:
        return self._steps[0]

    def independent(self) -> Iterator[tuple[Step, Launched]]:
        """Return the steps that depend on no draw of a step in flight."""
        return itertools.islice(self._steps, len(self._steps) if self._stages > 1 else 1)

    def put(self, step: Step, launch: Callable[[StepPlan], Launched]) -> None:
        """Launch a step behind the others."""
        # An idle device begins with a step's first kernel, long before the last one is launched: about now.
        now = time.monotonic()
        if not self._steps:
            self._began_at, self._timed = now, False
        work = StepWork.of(step.plan)
        self._predicted.append((work, self.times.predict(work)))
        launched = launch(step.plan)
        ended = time.monotonic()
        if step.plan.has_prompts:
            self._launches.append(ended - now)
        else:
            self._decode_launches.append(ended - (self._asked_at or now))
            if self._held and self._steps and not self._steps[0][0].plan.has_prompts:
                late = self.done()
                self._margin = min(2 * self._margin, _MOST_MARGIN_S) if late else max(_SHRINK * self._margin, _MARGIN_S)
        self._asked_at, self._held = 0.0, False
        self._steps.append((step, launched))

    def done(self) -> bool:
        """Whether the oldest step can be read without waiting."""
        if self._steps[0][1].done():
            return True
        self._busy_at = time.monotonic()
        return False

    def read(self) -> tuple[Step, Results]:
        """Wait for the oldest step, remove it and return it with its results."""
        waited = not self.done()
        step, launched = self._steps.popleft()
        results = launched.wait()
        now = time.monotonic()
        on_time = waited or now - self._busy_at < _ON_TIME_S
        work, predicted = self._predicted.popleft()
        if on_time and self._timed:
            self.times.observe(work, predicted, now - self._began_at)
        self._began_at, self._timed = (now, True) if on_time else (self._busy_at, False)
        return step, results

    def is_full(self, prompts_wait: bool) -> bool:
        """Whether the launch of the next step can wait without leaving a device idle: requests that arrive until then
        are part of it. That is only known while each stage has a step.

        prompts_wait: whether there are requests that the next step may begin. After a step of decodes they need not
        wait for others, of which few come in so short a time.
        """
        early = len(self._steps) == self._stages and self._is_early(prompts_wait)
        self._asked_at, self._held = time.monotonic(), self._held or early
        return early

    def _is_early(self, prompts_wait: bool) -> bool:
        has_prompts = self._steps[0][0].plan.has_prompts
        _, seconds = self._predicted[0]
        if not seconds or (prompts_wait and not has_prompts) or self.done():
            return False
        if has_prompts:
            lead = max([_LEAD_S, *self._launches])
        else:
            lead = max(self._decode_launches, default=_LEAD_S) + self._margin
        return time.monotonic() < self._began_at + seconds * (1 - _LEAD_SHARE) - lead
