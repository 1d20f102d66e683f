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

# The next step is launched before the predicted end of the current one. The lead is the longest of the last launches of
# steps with prompts, at least _LEAD_S, plus the share of the current step's time by which a prediction may be wrong
# (_LEAD_SHARE).
_LEAD_S = 0.012
_LAUNCHES = 8
_LEAD_SHARE = 0.05
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
        self._steps.append((step, launch(step.plan)))
        if step.plan.has_prompts:
            self._launches.append(time.monotonic() - now)

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

    def is_full(self) -> bool:
        """Whether the launch of the next step can wait without leaving a device idle. That is only known while each
        stage has a step and the oldest step computes prompts. Other steps end too soon to delay the launch."""
        if len(self._steps) != self._stages or not self._steps[0][0].plan.has_prompts:
            return False
        _, seconds = self._predicted[0]
        if not seconds or self.done():
            return False
        lead = max([_LEAD_S, *self._launches])
        return time.monotonic() < self._began_at + seconds * (1 - _LEAD_SHARE) - lead
