"""The remaining budget of a step while it is being scheduled."""

import math

from .step import Step
from .step_sizes import StepSizes
from .step_times import prompt_work

_ROUNDING = 1e-6
# The last tokens of a prompt join the chunk before them if they are at most this fraction of it. A separate step would
# take longer, since each step reads all weights.
_EXCESS = 1 / 16
# A GPU computes tokens in tiles, and a part of a tile takes as long as a whole one. So a prompt is cut where the step
# has a number of tokens that is computed well or, where none was measured, where its tiles end. The chunk must have so
# many tokens that this does not change its time much.
_TILE = 128
_LEAST_ROUNDED = 1024
# With fewer tokens of a further prompt, a step has one more chunk for next to nothing.
_LEAST_FILLED = 64


class StepBudget:
    """The most tokens of a step, and a limit of the work of its prompts, in tokens without context (step_times.py).

    sizes: which numbers of tokens the device computes well.
    """

    def __init__(self, tokens: int, sizes: StepSizes) -> None:
        self.tokens = tokens
        self._sizes = sizes
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
        size = self._sizes.best_near(others + room) or round((others + room) / _TILE) * _TILE
        return min(min(size, self.tokens) - others, missing)

    def filling(self, step: Step) -> int:
        """Return how many tokens of a further prompt the step could compute at little cost."""
        tokens = step.plan.num_tokens
        count = min(self._sizes.filled(tokens), self.tokens) - tokens
        return count if count >= _LEAST_FILLED else 0

    def close(self) -> None:
        """Let the step have no more tokens."""
        self.tokens = 0

    def take(self, first: int, count: int) -> None:
        """Note that the step computes the tokens [first, first + count) of a prompt."""
        self._used = True
        self._work -= prompt_work(self._context_cost, first, count)
