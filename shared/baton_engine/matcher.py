"""Where the output of one sequence stands in a grammar, and which tokens may follow."""

from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher


class Matcher:
    """A compiled grammar and how much of an output it has read. Copies are independent."""

    def __init__(self, state: LLMatcher, vocab_size: int, end: int) -> None:
        """end: the token id that stands for the end of the text where `state` allows one."""
        self._state = state
        self._vocab_size = vocab_size
        self._end = end
        self._read = 0

    def copy(self) -> "Matcher":
        other = Matcher(self._state.deep_copy(), self._vocab_size, self._end)
        other._read = self._read
        return other

    def follow(self, output: list[int]) -> bool:
        """Read what is new of a sequence's output; False when the grammar does not allow it, now or before."""
        new = output[self._read :]
        self._read += len(new)
        followed: bool = self._state.consume_tokens(new)
        return followed

    @property
    def failed(self) -> bool:
        """Whether the output does not follow the grammar, or following it took too much."""
        return self._state.is_error()

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return self._state.is_stopped() and not self.failed

    def allowed(self, ends: Iterable[int]) -> np.ndarray:
        """Return [vocab] bool: the tokens that may follow. ends: those that end a text, allowed when it may end."""
        bits = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        may_end = bool(allowed[self._end])
        allowed[self._end] = False
        allowed[[token for token in ends if token < self._vocab_size]] = may_end
        return allowed
