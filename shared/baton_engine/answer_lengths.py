"""How long answers are, by those that ended lately."""

import numpy as np

# The lengths at which the estimate has a value of its own: four in each octave.
_EDGES = np.unique(np.round(2 ** (np.arange(85) / 4)).astype(np.int64))
_POSITIONS = np.log2(_EDGES)
_MEMORY = 512  # answers after which one counts e times less
# Before any answer has ended, half of them are taken to end within so many tokens. This belief counts like so many
# answers.
_USUAL_TOKENS = 1024
_BELIEF = 4.0


class AnswerLengths:
    """Estimates the chance that an answer goes on, from the number of tokens that it has.

    It is the life table of Cutler and Ederer (1958) with a prior and with forgetting. It also learns from answers that
    were cut off at their limit, of which only a least length is known.
    """

    def __init__(self) -> None:
        going_on = 1 / (1 + _EDGES / _USUAL_TOKENS)
        # By range between two edges: answers that reached its begin, of which those cut off within it count half, and
        # those that ended within it by themselves.
        self._reached = np.full(len(_EDGES) - 1, _BELIEF)
        self._ended = _BELIEF * (1 - going_on[1:] / going_on[:-1])
        self._prior = self._reached.copy(), self._ended.copy()
        self._logs = np.empty(0)
        self._estimate()

    def add(self, tokens: int, ended: bool) -> None:
        """Learn from an answer. ended: by itself; False = it was cut off."""
        at = int(np.searchsorted(_EDGES, tokens, side="right")) - 1
        for counts, prior in zip((self._reached, self._ended), self._prior, strict=True):
            counts += (prior - counts) / _MEMORY
        self._reached[:at] += 1
        self._reached[at : at + 1] += 1 if ended else 0.5
        self._ended[at : at + 1] += ended
        self._estimate()

    def going_on(self, tokens: np.ndarray, more: np.ndarray) -> np.ndarray:
        """Return the chance that an answer of so many tokens, at least one, has more than `more` further ones."""
        first, last = (np.interp(np.log2(count), _POSITIONS, self._logs) for count in (tokens, tokens + more))
        chances: np.ndarray = np.exp(last - first)
        return chances

    def _estimate(self) -> None:
        chances = np.minimum(self._ended / self._reached, 1 - 1e-6)
        self._logs = np.concatenate([[0.0], np.cumsum(np.log1p(-chances))])
