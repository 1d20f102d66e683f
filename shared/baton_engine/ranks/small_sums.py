"""Sums over ranks of messages that are too small for NCCL's rings to be fast, as those of decode steps are."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from .symmetric_memory import SymmetricMemory

log = logging.getLogger(__name__)

# Those that torch's kernel adds up.
_DTYPES = (torch.bfloat16, torch.float32)
# Bytes of the messages that are timed, and so of the largest one that may be faster than over NCCL.
_TIMED = tuple(1 << exponent for exponent in range(13, 23))


class SmallSums:
    """Each rank reads the messages of all ranks and adds them up by itself (one-shot all-reduce).

    That takes one exchange, where a ring takes one for each rank and more. A ring moves fewer bytes, so it is faster
    from some size on.
    """

    def __init__(self, memory: SymmetricMemory, most: int) -> None:
        """memory: connected. most: bytes of the largest message; at most those of the memory."""
        self._memory, self._most = memory, most

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return the memory of a message, which `sum` then need not copy; None if `sum` does not take such a message.

        All messages have the same memory, so only one is in use at a time.
        """
        size = math.prod(shape) * dtype.itemsize
        if dtype not in _DTYPES or not 0 < size <= self._most or size % 4:
            return None
        return self._memory.buffer[:size].view(dtype).view(shape)

    def sum(self, y: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of the ranks' y, or None if `place` has no memory for it. y may be overwritten."""
        message = self.place(y.shape, y.dtype)
        if message is None:
            return None
        if message.data_ptr() == y.data_ptr():
            y = torch.empty_like(message)
        else:
            message.copy_(y)
        self._memory.add_up(message, y)
        return y


def find_small_sums(
    memory: SymmetricMemory,
    large: Callable[[torch.Tensor], object],
    least: Callable[[int], int],
    seconds: Callable[[Callable[[], object]], float],
) -> SmallSums | None:
    """Return the sums of the messages that are added up faster than by `large`; None where there are none.

    All ranks call this together, and decide alike. memory: neither allocated nor connected. large: adds up a tensor
    over NCCL. least: as in Ranks. seconds: returns how long the work that a function launches takes.
    """
    steps: list[Callable[[], None]] = [lambda: memory.allocate(_TIMED[-1]), memory.connect, memory.check]
    for step in steps:
        if not least(int(_succeeds(step))):
            log.info("NCCL adds up what ranks have computed: symmetric memory is not available on all of them")
            return None
    sums, most = SmallSums(memory, _TIMED[-1]), 0
    for size in _TIMED:
        message = sums.place([size // 2], torch.bfloat16)
        assert message is not None
        small = seconds(partial(sums.sum, message))
        if not least(int(small < seconds(partial(large, torch.zeros_like(message))))):
            break
        most = size
    log.info(
        "up to %d bytes of what ranks have computed are added up in symmetric memory, and NCCL does the rest", most
    )
    return SmallSums(memory, most) if most else None


def _succeeds(step: Callable[[], None]) -> bool:
    try:
        step()
    # What torch raises depends on what the driver, the container or the version of torch lacks.
    except Exception as error:
        log.warning("symmetric memory cannot be used: %s", error)
        return False
    return True
