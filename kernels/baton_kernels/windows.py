"""Which keys a query sees in attention with a window or with chunks."""

import triton
import triton.language as tl


@triton.jit
def oldest_key(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Compute oldest_key of reference/paged_attention.py, for positions of at least 0."""
    return position // WINDOW * WINDOW if CHUNKED else position - WINDOW + 1


@triton.jit
def reach(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return for queries [N] how many tokens they see, their own included, [N, 1]."""
    return (position % WINDOW + 1)[:, None] if CHUNKED else WINDOW
