"""What ALiBi adds to scores."""

import triton
import triton.language as tl


@triton.jit
def _to_bfloat16(x):
    """Return finite float32 numbers rounded to the nearest bfloat16, as float32. Triton's interpreter would truncate
    them."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def rounded_alibi(slope, key):
    """Compute rounded_alibi_reference. key: the positions of keys."""
    return _to_bfloat16(slope * _to_bfloat16(key.to(tl.float32)))
