"""Follows the output of one sequence through a grammar and tells which tokens may come next."""

from collections.abc import Iterable

import numpy as np
from llguidance import LLExecutor, LLMatcher


class Matcher:
    """A compiled grammar and how much of an output it has read. Copies are independent.

    timed: a client wrote the grammar's rules, so that nothing bounds the time of a mask (timed_masks.py).
    """

    def __init__(self, state: LLMatcher, vocab_size: int, end: int, timed: bool) -> None:
        """end: the token id that stands for the end of the text where `state` allows one."""
        self._state = state
        self._vocab_size = vocab_size
        self._end = end
        self._read = 0
        self.given_up = False
        self.timed = timed

    def copy(self) -> "Matcher":
        other = Matcher(self._state.deep_copy(), self._vocab_size, self._end, self.timed)
        other._read = self._read
        return other

    def give_up(self) -> None:
        """Let the matcher fail. From now on it may be in use by a thread that nothing waits for."""
        self.given_up = True

    def follow(self, output: list[int]) -> bool:
        """Read the new tokens of a sequence's output. Returns False if the grammar forbids them or earlier ones."""
        new = output[self._read :]
        self._read += len(new)
        followed: bool = self._state.consume_tokens(new)
        return followed

    @property
    def failed(self) -> bool:
        """Whether the output does not follow the grammar, or the parser has exceeded one of its limits."""
        return self.given_up or self._state.is_error()

    @property
    def complete(self) -> bool:
        """Whether the grammar allows no further token."""
        return self._state.is_stopped() and not self.failed

    def fill(self, mask: np.ndarray) -> None:
        """Fill a mask, [words] int32, as `fill_masks` does, in this thread and without the interpreter lock."""
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def set_ends(self, mask: np.ndarray, ends: Iterable[int]) -> None:
        """Allow the stop tokens `ends` in a mask that `fill_masks` has filled if the text may end here, else forbid
        them."""
        # The bit of `_end` does not tell: a grammar may allow that token by its id.
        may_end = self._state.is_accepting()
        mask[self._end // 32] &= ~_bit(self._end)
        for token in ends:
            if token < self._vocab_size:
                mask[token // 32] &= ~_bit(token)
                if may_end:
                    mask[token // 32] |= _bit(token)


def fill_masks(executor: LLExecutor, matchers: list[tuple[Matcher, int]], masks: np.ndarray) -> None:
    """Compute which tokens may follow for each matcher, in the executor's threads and without the interpreter lock.

    matchers: with the row of `masks`, [rows, words] int32, that each fills: bit i % 32 of word i // 32 for token i.
    """
    rows, words = masks.shape
    states = [(matcher._state, row) for matcher, row in matchers]
    executor.unsafe_compute_mask_ptr(states, masks.ctypes.data, words * masks.itemsize, rows)


def _bit(token: int) -> np.int32:
    """Return the bit of a token in its word."""
    return np.uint32(1 << token % 32).astype(np.int32)
