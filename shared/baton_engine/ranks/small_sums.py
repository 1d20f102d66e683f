"""All-reduces of messages that are too small for NCCL's rings to be fast, such as those of decode steps."""

import logging
from collections.abc import Callable
from functools import partial

import torch

from baton_kernels.rank_sums import VECTOR_BYTES

from .symmetric_memory import SymmetricMemory

log = logging.getLogger(__name__)

# Bytes of the messages that are timed. Larger ones always use NCCL: not all programs of their kernel could run at once,
# but each waits for programs of the other ranks.
_TIMED = tuple(1 << exponent for exponent in range(13, 23))


class SmallSums:
    """All-reduces messages in memory that all ranks read and write. The smallest are pushed, larger ones are added up
    in one step, and still larger ones in two steps, which move fewer bytes but wait for the other ranks twice. NCCL is
    faster from some size on."""

    def __init__(self, memory: SymmetricMemory, pushed: int, at_once: int, most: int) -> None:
        """memory: connected. pushed, at_once, most: bytes of the largest message that is pushed, of the largest one
        that is not added up in two steps, and of the largest one that is added up here; at most the sizes that the
        memory was allocated for."""
        self._memory, self._pushed, self._at_once, self._most = memory, pushed, at_once, most

    def sum(self, y: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of the ranks' y, which is contiguous; None if NCCL adds it up."""
        if not 0 < y.nbytes <= self._most or y.nbytes % VECTOR_BYTES:
            return None
        if y.nbytes <= self._pushed:
            return self._memory.add_up_pushed(y)
        return self._memory.add_up_at_once(y) if y.nbytes <= self._at_once else self._memory.add_up_in_steps(y)


def find_small_sums(
    memory: SymmetricMemory,
    large: Callable[[torch.Tensor], object],
    least: Callable[[int], int],
    seconds: Callable[[Callable[[], object]], float],
) -> SmallSums | None:
    """Measure up to which sizes each way over symmetric memory is the fastest; return None if `large` always is.

    All ranks call this together, and come to the same result. memory: neither allocated nor connected. large:
    all-reduces a tensor over NCCL. least: as in Ranks. seconds: returns how long the work launched by a function takes.
    """
    steps: list[Callable[[], None]] = [lambda: memory.allocate(_TIMED[-1]), memory.connect, memory.check]
    for step in steps:
        if not least(int(_succeeds(step))):
            log.info("NCCL adds up what ranks have computed: symmetric memory is not available on all of them")
            return None
    # From the way for the largest messages to the one for the smallest.
    ways = [large, memory.add_up_in_steps, memory.add_up_at_once, memory.add_up_pushed]
    limits, way = [0] * len(ways), len(ways) - 1
    for size in _TIMED:
        message = torch.zeros(size // 2, dtype=torch.bfloat16, device=memory.device)
        possible = ways if size <= memory.most_pushed else ways[:-1]
        # A way that was too slow for a smaller message is too slow for this one, too.
        times = [seconds(partial(add_up, message)) for add_up in possible[: way + 1]]
        way = least(times.index(min(times)))
        if way == 0:
            break
        limits[1 : way + 1] = [size] * way
    _, most, at_once, pushed = limits
    log.info(
        "sums of ranks go over symmetric memory: those of at most %d bytes are pushed, of at most %d bytes added up in "
        "one step, and of at most %d bytes in two; NCCL does the rest", pushed, at_once, most,
    )  # fmt: skip
    return SmallSums(memory, pushed, at_once, most) if most else None


def _succeeds(step: Callable[[], None]) -> bool:
    try:
        step()
    # The type of the error depends on what the driver, the container or the version of torch lacks.
    except Exception as error:
        log.warning("symmetric memory cannot be used: %s", error)
        return False
    return True
