"""Runs plans on the stages of a pipeline. This process belongs to the first stage, and also schedules."""

import math
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from baton_engine.config import EngineConfig
from baton_engine.executor import Launched, WithoutLayers
from baton_engine.loading import Progress
from baton_engine.model_config import ModelConfig
from baton_engine.results import Results
from baton_engine.step_plan import StepPlan

from .executor import LONGEST_STEP_S, RanksExecutor
from .messages import DrawMasked, Launch
from .processes import RankDied, RankProcesses


class StagesExecutor(RanksExecutor):
    """Implements Executor. As many steps are in flight as there are stages. A decoding sequence is in only one of them;
    chunks of one prompt may be in several.

    The last stage draws. Its results come to this process, and the tokens go to the other stages with a later plan.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        device: str,
        progress: Progress | None,
        processes: RankProcesses | None = None,
    ) -> None:
        super().__init__(config, model, device, progress, processes)
        self.stages = config.pipeline_parallel
        self.depth = self.stages - 1
        self._longest_s = self.stages * LONGEST_STEP_S if device == "cuda" else math.inf
        self._in_flight: deque[_Step] = deque()
        self._drawn: list[tuple[int, int]] = []  # rows and tokens that the other stages do not know yet

    def launch(self, plan: StepPlan) -> Launched:
        self._processes.check()
        for step in self._in_flight:
            # Tokens that these steps draw for rows that now belong to other sequences are dropped.
            step.rows_in_use.difference_update(new.row for new in plan.new_rows)
        drawn, self._drawn = self._drawn, []
        self._processes.send(Launch(plan, drawn))
        self._launches += 1
        with self._processes.explained(RankDied):
            self._runner.learn(drawn)
            self._runner.launch(plan)
        self._in_flight.append(_Step(plan, self._processes, self._read, self._longest_s))
        return self._in_flight[-1]

    def _read(self) -> Results:
        """Return the results of the oldest step in flight."""
        results = self._processes.receive_results()
        step = self._in_flight.popleft()
        for row, choices in zip(step.rows, results.choices, strict=True):
            if choices and row in step.rows_in_use:
                # The other choices get rows of their own when they fork.
                self._drawn.append((row, choices[0].token))
        return results


class _Step(WithoutLayers):
    """A step that all stages have been told to compute. A layer that one stage has completed says nothing about the
    other stages, so the step reports no layers."""

    def __init__(self, plan: StepPlan, processes: RankProcesses, read: Callable[[], Results], longest_s: float) -> None:
        self.rows, self.rows_in_use = plan.rows, set(plan.rows)
        self._processes, self._read = processes, read
        self._longest_s = longest_s
        self._ends_by = time.monotonic() + longest_s

    def draw_masked(self, masks: np.ndarray) -> None:
        self._processes.send(DrawMasked(masks))

    def wait(self) -> Results:
        return self._read()

    def done(self) -> bool:
        done = self._processes.results_arrived()
        if not done and time.monotonic() > self._ends_by:
            raise RankDied(f"a step has not ended for {self._longest_s:g} s: GPUs of the stages wait for each other")
        return done
