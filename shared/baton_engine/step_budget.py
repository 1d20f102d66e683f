"""The remaining budget of a step while it is being scheduled."""

import math

from .step import Step
from .step_times import prompt_work

_ROUNDING = 1e-6
# The last tokens of a prompt join the chunk before them if they are at most this fraction of it. A separate step would
# take longer, since each step reads all weights.
_EXCESS = 1 / 16
# A GPU computes tokens in tiles, and a part of a tile takes as long as a whole one. So a prompt is cut where the tiles
# of a step end, unless the chunk has so few tokens that this would change its time much.
_TILE = 128
_LEAST_ROUNDED = 1024


class StepBudget:
    """The most tokens of a step, and a limit of the work of its prompts, in tokens without context (step_times.py)."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._work = math.inf
        self._context_cost = 0.0
        self._used = False

    def limit_prompts(self, work: float, context_cost: float) -> None:
        self._work, self._context_cost = work, context_cost

    def room(self, step: Step, first: int) -> int:
        """Return how many more tokens of a prompt, from index `first` on, fit into the step.

        At least one token fits when the step has no prompt yet, however long its context is.
        """
        left = self.tokens - step.plan.num_tokens
        if left <= 0 or self._work == math.inf:
            return left
        # The solution of prompt_work(context_cost, first, count) = work.
        token = 1 + self._context_cost * first
        root = math.sqrt(token * token + 2 * self._context_cost * max(self._work, 0.0))
        count = int(2 * self._work / (token + root) + _ROUNDING)
        return min(left, count if self._used else max(count, 1))

    def chunk(self, step: Step, first: int, missing: int) -> int:
        """Return how many of a prompt's `missing` tokens the step should compute, from index `first` on."""
        room, others = self.room(step, first), step.plan.num_tokens
        if missing <= min(room * (1 + _EXCESS), self.tokens - others):
            return missing
        if room < _LEAST_ROUNDED:
            return room
        return min(round((others + room) / _TILE) * _TILE, self.tokens) - others

    def take(self, first: int, count: int) -> None:
        """Note that the step computes the tokens [first, first + count) of a prompt."""
        self._used = True
        self._work -= prompt_work(self._context_cost, first, count)
