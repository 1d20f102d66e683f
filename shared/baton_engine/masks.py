"""Which tokens the grammars of some sequences allow next, packed as bits."""

import math

import numpy as np
from llguidance import LLExecutor

from baton_common.cores import available_cores

from .matcher import Matcher, fill_masks
from .sequence import Sequence, State
from .timed_masks import TimedMasks

# With this many threads, 64 masks take no longer than a step of a large model.
_MOST_THREADS = 16


class Masks:
    """Computes masks in several threads at once, since one may take milliseconds."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        # A matcher's token for the end may lie one beyond the model's vocabulary.
        self._filled = -(-(vocab_size + 1) // 32)
        self._executor: LLExecutor | None = None
        self._timed = TimedMasks()

    def refuses(self, sequence: Sequence) -> bool:
        """Whether a sequence's grammar cannot be used at present, because those of its tenant take too long."""
        matcher = sequence.matcher
        return matcher is not None and matcher.timed and self._timed.refuses(sequence.request.cache_scope.salt)

    def compute(self, sequences: list[Sequence]) -> np.ndarray:
        """Return [sequences, words] int32: bit i % 32 of word i // 32 is 1 where token i may follow.

        All tokens of the sequences must be known. After a sequence that has ended every token is allowed, and after one
        whose mask takes too long, which makes its matcher fail.
        """
        self._executor = self._executor or LLExecutor(max(min(math.floor(available_cores()), _MOST_THREADS), 1))
        masks = np.full((len(sequences), self._filled), -1, dtype=np.int32)
        bounded: list[tuple[Matcher, int]] = []
        timed: list[tuple[Matcher, int]] = []
        for row, sequence in enumerate(sequences):
            if sequence.matcher is not None and sequence.state is not State.FINISHED:
                (timed if sequence.matcher.timed else bounded).append((sequence.matcher, row))
        begun = self._timed.begin(
            [(matcher, sequences[row].request.cache_scope.salt, masks[row]) for matcher, row in timed]
        )
        if bounded:
            fill_masks(self._executor, bounded, masks)
        self._timed.end(begun)
        for matcher, row in (*bounded, *timed):
            if not matcher.given_up:
                sampling = sequences[row].sampling
                matcher.set_ends(masks[row], (*sampling.eos_token_ids, *sampling.stop_token_ids))
        return np.ascontiguousarray(masks[:, : self._words])
