"""Conversions of float8_e4m3fn: 4 bits of exponent, 3 of mantissa, at most 448, with NaN and without infinity."""

import triton
import triton.language as tl

# Attention weights are at most 1. They are multiplied by this before they become float16, so that small ones keep bits.
WEIGHT_SCALE = tl.constexpr(1024.0)


@triton.jit
def round_e4m3(values):
    """Round float32 values of at most 448 to values of float8_e4m3fn, ties to even."""
    # Three bits of the mantissa remain: a carry goes into the exponent, as it should.
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Below 2 ** -6 the numbers are the multiples of 2 ** -9.
    small = (values + 24576.0) - 24576.0
    return tl.where(tl.abs(values) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def to_e4m3(values):
    """Convert float32 values to float8_e4m3fn: larger ones to the largest number, those that are not finite to NaN."""
    rounded = round_e4m3(tl.minimum(tl.maximum(values, -448.0), 448.0))
    bits = rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    # The code of NaN is set explicitly, since not every conversion of NaN gives it.
    return tl.where(tl.abs(values) < float("inf"), bits, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def query_for_codes(query, scale):
    """Return the queries, and the factor of their scores, for products with codes.

    Converting two codes to float16, which has all of their values, takes one instruction; to bfloat16 it would take
    three. The queries are divided by 16, so that even the largest ones fit into float16. That loses no bits.
    """
    if query.dtype != tl.float32:
        query = (query.to(tl.float32) * 0.0625).to(tl.float16)
        scale *= 16.0
    return query, scale


# Turns two pairs of codes, from two rows, into two values of the even column and two of the odd one.
_COLUMNS = tl.constexpr("""{
    .reg .b32 turned;
    .reg .b16 even, odd;
    prmt.b32 turned, $2, $2, 0x3120;
    mov.b32 {even, odd}, turned;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")


@triton.jit
def columns_of_pairs(pairs, DTYPE: tl.constexpr, ON_GPU: tl.constexpr):
    """Return the even and the odd columns of codes that were loaded as pairs, int16.

    The tensor cores take two rows of a column together from each thread. A GPU can transpose 16-bit elements while it
    loads them from shared memory, but has to load 8-bit elements one at a time.
    """
    if ON_GPU and tl.float16 == DTYPE:
        even, odd = tl.inline_asm_elementwise(
            _COLUMNS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
        odd = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return even, odd
