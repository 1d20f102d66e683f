"""How well two models predict a text."""

import math
from collections.abc import Callable

import torch

_ROWS = 128  # of logits that are in memory at once


class Comparison:
    """Predictions of each token of a text, by a model before and after it was quantized."""

    def __init__(self) -> None:
        self.tokens = 0
        self._losses = [0.0, 0.0]
        self._right = [0, 0]
        self._agreed = 0
        self._divergence = 0.0

    def add(
        self,
        ids: torch.Tensor,
        hidden: tuple[torch.Tensor, torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """ids: [T] of a sequence. hidden: after the last layer, [T, hidden], before and after. logits: of hidden
        states."""
        for first in range(0, len(ids) - 1, _ROWS):
            rows = slice(first, min(first + _ROWS, len(ids) - 1))
            following = ids[rows.start + 1 : rows.stop + 1]
            before, after = (logits(states[rows]).float().log_softmax(dim=1).cpu() for states in hidden)
            for side, logprobs in enumerate((before, after)):
                self._losses[side] -= logprobs.gather(1, following[:, None]).sum().item()
                self._right[side] += int((logprobs.argmax(dim=1) == following).sum())
            self._agreed += int((before.argmax(dim=1) == after.argmax(dim=1)).sum())
            self._divergence += (before.exp() * (before - after)).sum().item()
            self.tokens += len(following)

    def perplexity(self, side: int) -> float:
        """side: 0 = before, 1 = after."""
        mean = self._losses[side] / self.tokens
        # The exponential of a larger number is no float.
        return math.exp(mean) if mean < 700 else math.inf

    def accuracy(self, side: int) -> float:
        """Return the fraction of tokens that are the most probable one."""
        return self._right[side] / self.tokens

    @property
    def divergence(self) -> float:
        """The mean Kullback-Leibler divergence, in nats, of the probabilities after from those before."""
        return self._divergence / self.tokens

    @property
    def agreement(self) -> float:
        """The fraction of tokens for which both models find the same one most probable."""
        return self._agreed / self.tokens
