"""The blocks that admitted sequences are expected to need beyond those that they have."""

import math
from collections.abc import Iterable

import numpy as np

from .answer_lengths import AnswerLengths
from .sequence import Sequence

# How many of the sequences' limits are among the times at which growth is computed.
_LIMITS = 32


class KvGrowth:
    """Predicts how many more blocks sequences hold at times to come, when some have grown and others have ended.

    A time is a number of tokens that each sequence has generated until then. sequences: at least one. block_tokens: by
    how many tokens a sequence grows until it needs one more block of any group of layers.
    """

    def __init__(self, lengths: AnswerLengths, sequences: Iterable[Sequence], block_tokens: float) -> None:
        self._lengths, self._block_tokens = lengths, block_tokens
        tokens, certain, left, rows, own = np.array([_facts(each) for each in sequences]).T
        limits = np.unique(np.quantile(left, np.linspace(0, 1, _LIMITS), method="lower"))
        powers = 2 ** np.arange(int(limits[-1]).bit_length())
        # All sequences that have the same limit end at the same time, and hold the most just before.
        self._times = np.unique(np.concatenate([limits, powers[powers <= limits[-1]]]))
        going_on = self._going_on(tokens[:, None], certain[:, None]) * (self._times <= left[:, None])
        # The same sums as in _of. They are no matrix product, as a library's threads would wait for one another.
        sums = np.einsum("fs,st->ft", np.stack([rows, own]).astype(np.float64), going_on)
        self._blocks = (self._times * sums[0] + sums[1] - own.sum()) / block_tokens
        self._chances: dict[tuple[int, int], np.ndarray] = {}

    def add(self, sequence: Sequence) -> None:
        """Count one more sequence."""
        self._blocks += self._of(sequence)

    def remove(self, sequence: Sequence) -> None:
        """No longer count a sequence."""
        self._blocks -= self._of(sequence)

    def most_with(self, sequence: Sequence) -> int:
        """Return the most blocks that all sequences, and one more, need at any time beyond those that they have now."""
        return max(math.ceil(float((self._blocks + self._of(sequence)).max())), 0)

    def _of(self, sequence: Sequence) -> np.ndarray:
        """Return the expected growth of a sequence, in blocks, at each time."""
        tokens, certain, left, rows, own = _facts(sequence)
        # Most sequences that wait are new, and have the same chances.
        chances = self._chances.get((tokens, certain))
        if chances is None:
            chances = self._chances[tokens, certain] = self._going_on(tokens, certain)
        # A sequence has grown by the time, or has ended and given back what it had.
        growth: np.ndarray = chances * (self._times * rows + own)
        growth[self._times.searchsorted(left, side="right") :] = 0
        growth -= own
        growth /= self._block_tokens
        return growth

    def _going_on(self, tokens: np.ndarray | int, certain: np.ndarray | int) -> np.ndarray:
        """Return the chances that answers of so many tokens, some of them certain, have not ended at each time."""
        uncertain_from = np.maximum(tokens + 1, certain)
        return self._lengths.going_on(uncertain_from, np.maximum(tokens + self._times - uncertain_from, 0))


def _facts(sequence: Sequence) -> tuple[int, int, int, int, int]:
    """Return a sequence's output tokens, the number of them that is certain, how many are to come at most, its rows,
    and the known tokens that are in blocks of its own."""
    return (
        sequence.output_len,
        sequence.certain_tokens,
        most_growth(sequence),
        sequence.rows_needed,
        sequence.known - sequence.cached,
    )


def most_growth(sequence: Sequence) -> int:
    """Return how many tokens each choice of a sequence may still get here."""
    return 1 if sequence.exports else max(sequence.most_tokens - sequence.known, 1)
