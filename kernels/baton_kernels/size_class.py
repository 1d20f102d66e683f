"""Classes of batch sizes: the compile-time values of kernels depend on the class of a batch's size, not on the size."""

import triton


def size_class(count: int) -> int:
    """Return the next power of two of a number of tokens, rows or sequences.

    Compilation would halt a service for half a second. Before it serves, an engine therefore runs each kernel with a
    batch of each class (baton_engine/warm_up.py), which is enough if all batches of a class use the same kernels.
    """
    size: int = triton.next_power_of_2(count)
    return size
