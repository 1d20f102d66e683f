"""Classes of batch sizes: what a kernel is compiled for depends on the size of a batch through its class alone."""

import triton


def size_class(count: int) -> int:
    """Return the next power of two of a number of tokens, rows or sequences.

    Compilation would halt a service for half a second. An engine therefore uses each kernel once with a batch of each
    class before it serves (baton_engine/warm_up.py), which is enough if batches of one class share their kernels.
    """
    size: int = triton.next_power_of_2(count)
    return size
