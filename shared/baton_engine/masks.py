"""Which tokens the grammars of some sequences allow next, packed as bits."""

import math

import numpy as np
from llguidance import LLExecutor

from baton_common.cores import available_cores

from .matcher import fill_masks
from .sequence import Sequence, State

# With this many threads, 64 masks take no longer than a step of a large model.
_MOST_THREADS = 16


class Masks:
    """Computes masks in several threads at once, since one may take milliseconds."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        # A matcher's token for the end may lie one beyond the model's vocabulary.
        self._filled = -(-(vocab_size + 1) // 32)
        self._executor: LLExecutor | None = None

    def compute(self, sequences: list[Sequence]) -> np.ndarray:
        """Return [sequences, words] int32: bit i % 32 of word i // 32 is 1 where token i may follow.

        All tokens of the sequences must be known. After a sequence that has ended every token is allowed.
        """
        self._executor = self._executor or LLExecutor(max(min(math.floor(available_cores()), _MOST_THREADS), 1))
        masks = np.full((len(sequences), self._filled), -1, dtype=np.int32)
        matchers = [
            (sequence.matcher, row)
            for row, sequence in enumerate(sequences)
            if sequence.matcher is not None and sequence.state is not State.FINISHED
        ]
        if matchers:
            fill_masks(self._executor, matchers, masks)
        for matcher, row in matchers:
            sampling = sequences[row].sampling
            matcher.set_ends(masks[row], (*sampling.eos_token_ids, *sampling.stop_token_ids))
        return np.ascontiguousarray(masks[:, : self._words])
