"""The blocks that admitted sequences are expected to need beyond those that they have."""

from collections.abc import Iterable

import numpy as np

from .answer_lengths import AnswerLengths
from .sequence import Sequence

# How many of the sequences' limits are among the times at which growth is computed.
_LIMITS = 32


class KvGrowth:
    """Predicts how many more blocks sequences hold at times to come, when some have grown and others have ended.

    A time is a number of tokens that each sequence has generated until then. block_tokens: by how many tokens a
    sequence grows until it needs one more block of any group of layers.
    """

    def __init__(self, lengths: AnswerLengths, sequences: Iterable[Sequence], block_tokens: float) -> None:
        self._lengths, self._block_tokens = lengths, block_tokens
        own = list(sequences)
        limits = np.unique(
            np.quantile([most_growth(each) for each in own] or [1], np.linspace(0, 1, _LIMITS), method="lower")
        )
        powers = 2 ** np.arange(int(limits[-1]).bit_length())
        # All sequences that have the same limit end at the same time, and hold the most just before.
        self._times = np.unique(np.concatenate([limits, powers[powers <= limits[-1]]]))
        self._blocks = self._of(own)

    def add(self, sequence: Sequence) -> None:
        """Count one more sequence."""
        self._blocks = self._blocks + self._of([sequence])

    def remove(self, sequence: Sequence) -> None:
        """No longer count a sequence."""
        self._blocks = self._blocks - self._of([sequence])

    def most_with(self, sequence: Sequence) -> int:
        """Return the most blocks that all sequences, and one more, need at any time beyond those that they have now."""
        return max(int(np.ceil((self._blocks + self._of([sequence])).max())), 0)

    def _of(self, sequences: list[Sequence]) -> np.ndarray:
        """Return the expected growth of sequences, in blocks, at each time."""
        if not sequences:
            return np.zeros(len(self._times))
        facts = np.array(
            [
                (each.output_len, each.certain_tokens, most_growth(each), each.rows_needed, each.known - each.cached)
                for each in sequences
            ]
        )
        tokens, certain, left, rows, own = facts.T[:, :, None]
        uncertain_from = np.maximum(tokens + 1, certain)
        going_on = self._lengths.going_on(uncertain_from, np.maximum(tokens + self._times - uncertain_from, 0))
        going_on *= self._times <= left
        growth = going_on * rows * np.minimum(self._times, left) - (1 - going_on) * own
        blocks: np.ndarray = growth.sum(axis=0) / self._block_tokens
        return blocks


def most_growth(sequence: Sequence) -> int:
    """Return how many tokens each choice of a sequence may still get here."""
    return 1 if sequence.exports else max(sequence.most_tokens - sequence.known, 1)
