"""Predicts how long a step takes from its tokens, its sequences and their context."""

import math

import msgspec

from baton_common.buckets import STEP_RATIO_BUCKETS
from baton_common.histogram import Histogram

from .least_squares import LeastSquares
from .step_plan import StepPlan
from .step_sizes import StepSizes

# A step with fewer prompt tokens mostly waits for the weights, so it tells nothing about the time of a token.
_LEAST_LEARNED = 512


class StepWork(msgspec.Struct, frozen=True):
    """The quantities that a step's time depends on.

    prompt_tokens: tokens of chunks of several tokens. pairs: pairs of such a token and a token that it sees, itself
    included. decodes: chunks of one token. keys: tokens that the decodes see.
    """

    prompt_tokens: int
    pairs: int
    decodes: int
    keys: int

    @classmethod
    def of(cls, plan: StepPlan) -> "StepWork":
        if not plan.has_prompts:
            return cls(0, 0, len(plan.rows), sum(plan.ends))
        pairs = keys = 0
        for count, end in zip(plan.counts, plan.ends, strict=True):
            if count == 1:
                keys += end
            else:
                pairs += count * (end - count) + count * (count + 1) // 2
        decodes = plan.counts.count(1)
        return cls(plan.num_tokens - decodes, pairs, decodes, keys)


class StepTimes:
    """Predicts the seconds of steps.

    Steps with prompts and steps with decodes only have separate models, because the former are bound by arithmetic and
    the latter by memory. For a step with a short prompt the prediction is too low.

    ratios: by kind of step, the measured seconds of steps divided by the predicted ones. sizes: as measured at start.
    """

    def __init__(self) -> None:
        self.ratios = {"prompts": Histogram(STEP_RATIO_BUCKETS), "decodes": Histogram(STEP_RATIO_BUCKETS)}
        self.sizes = StepSizes()
        self._prompts, self._decodes = LeastSquares(5), LeastSquares(3)
        self._typical = 0  # prompt tokens of the largest step that was measured

    @classmethod
    def of_rate(cls, rate: float) -> "StepTimes":
        """Return StepTimes for which only the rate of prompts without context is known, in tokens per second."""
        times = cls()
        times.begin([(StepWork(tokens, 0, 0, 0), tokens / rate) for tokens in (1, 1_000)])
        return times

    def begin(self, samples: list[tuple[StepWork, float]]) -> None:
        """Fit the models to the steps that were measured at start, with their seconds."""
        prompts = [(_prompt_terms(work), seconds) for work, seconds in samples if work.prompt_tokens]
        decodes = [(_decode_terms(work), seconds) for work, seconds in samples if not work.prompt_tokens]
        if prompts:
            self._prompts.begin(prompts)
            self._typical = max(work.prompt_tokens for work, _ in samples)
        if decodes:
            self._decodes.begin(decodes)

    def predict(self, work: StepWork) -> float:
        """Return the seconds of a step; 0 = unknown."""
        if work.prompt_tokens:
            return self._prompts.predict(_prompt_terms(work))
        return self._decodes.predict(_decode_terms(work))

    def observe(self, work: StepWork, predicted: float, seconds: float) -> None:
        """Learn from a step that took some seconds. predicted: what `predict` had returned for it."""
        if predicted <= 0 or seconds <= 0:
            return
        self.ratios["prompts" if work.prompt_tokens else "decodes"].observe(seconds / predicted)
        if work.prompt_tokens >= min(_LEAST_LEARNED, max(self._typical, 1)):
            self._prompts.add(_prompt_terms(work), seconds, predicted)
        elif not work.prompt_tokens:
            self._decodes.add(_decode_terms(work), seconds, predicted)

    @property
    def token_s(self) -> float:
        """The seconds of a prompt token in a large step, without the time of its attention; 0 = unknown."""
        fixed, token = self._prompts.coefficients[:2]
        return float(fixed / self._typical + token) if self._typical else 0.0

    @property
    def step_cost(self) -> float:
        """How many more prompt tokens a step computes in the time that it takes without any; inf = unknown."""
        fixed, token = self._prompts.coefficients[:2]
        return max(float(fixed / token), 0.0) if token > 0 else math.inf

    @property
    def pair_s(self) -> float:
        """The seconds of a pair of a prompt token and a token that it sees."""
        return float(self._prompts.coefficients[2])

    @property
    def prefill_rate(self) -> float:
        """Tokens a second of the largest prompt that fits into a step; 0 = unknown."""
        seconds = self.token_s + self.pair_s * self._typical / 2
        return 1 / seconds if seconds else 0.0

    @property
    def context_cost(self) -> float:
        """The part by which each token of context makes a prompt token take longer."""
        return self.pair_s / self.token_s if self.token_s else 0.0


def prompt_work(context_cost: float, first: int, count: int) -> float:
    """Return the work of the tokens [first, first + count) of a prompt, in tokens without context.

    context_cost: as StepTimes has it.
    """
    return count * (1 + context_cost * (first + count / 2))


def _prompt_terms(work: StepWork) -> list[float]:
    return [1.0, work.prompt_tokens, work.pairs, work.decodes, work.keys]


def _decode_terms(work: StepWork) -> list[float]:
    return [1.0, work.decodes, work.keys]
