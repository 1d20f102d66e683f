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
        facts = _facts(sequences)
        limits = np.unique(np.quantile(facts[2], np.linspace(0, 1, _LIMITS), method="lower"))
        powers = 2 ** np.arange(int(limits[-1]).bit_length())
        # All sequences that have the same limit end at the same time, and hold the most just before.
        self._times = np.unique(np.concatenate([limits, powers[powers <= limits[-1]]]))
        self._blocks = self._of(facts)

    def add(self, sequence: Sequence) -> None:
        """Count one more sequence."""
        self._blocks = self._blocks + self._of(_facts([sequence]))

    def remove(self, sequence: Sequence) -> None:
        """No longer count a sequence."""
        self._blocks = self._blocks - self._of(_facts([sequence]))

    def most_with(self, sequence: Sequence) -> int:
        """Return the most blocks that all sequences, and one more, need at any time beyond those that they have now."""
        return max(int(np.ceil((self._blocks + self._of(_facts([sequence]))).max())), 0)

    def _of(self, facts: np.ndarray) -> np.ndarray:
        """Return the expected growth of sequences, in blocks, at each time."""
        tokens, certain, left = facts[:3, :, None]
        uncertain_from = np.maximum(tokens + 1, certain)
        going_on = self._lengths.going_on(uncertain_from, np.maximum(tokens + self._times - uncertain_from, 0))
        going_on *= self._times <= left
        rows, own = facts[3:]
        # A sequence has grown by the time, or has given back what it had.
        growth: np.ndarray = rows @ going_on * self._times - own @ (1 - going_on)
        return growth / self._block_tokens


def _facts(sequences: Iterable[Sequence]) -> np.ndarray:
    """Return [5, sequences]: output tokens, certain ones of all, tokens to come at most, rows, and known tokens whose
    blocks a sequence has for itself."""
    facts = [
        (each.output_len, each.certain_tokens, most_growth(each), each.rows_needed, each.known - each.cached)
        for each in sequences
    ]
    return np.array(facts).T


def most_growth(sequence: Sequence) -> int:
    """Return how many tokens each choice of a sequence may still get here."""
    return 1 if sequence.exports else max(sequence.most_tokens - sequence.known, 1)
