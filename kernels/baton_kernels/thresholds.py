"""min_p, top_k and top_p as one number per row: the lowest logit that may still be drawn.

The vocabulary is not sorted. Floats can be mapped to integer keys of the same order, since floats of one sign are
ordered like their bits. Bisection finds the highest key that has at least top_k tokens, or a softmax mass of at least
top_p, at or above it. Each pass over the row tries several keys at once.
"""

import torch
import triton
import triton.language as tl

# Every batch uses the same values and so the same order of additions: a row's result must not depend on other rows.
# These are the fastest of the values measured on an H200 for 1 and for 256 rows of 151,936 tokens.
_BLOCK = 8192
_PIVOTS = 4

# The number of low bits that are always zero in a logit of each dtype after widening to float32.
_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def float_key(value, SHIFT: tl.constexpr):
    """Return int64 keys with the order of float32 values. SHIFT: low bits of the values that are always zero."""
    bits = value.to(tl.int32, bitcast=True) >> SHIFT
    return (bits ^ ((bits >> 31) & (0x7FFFFFFF >> SHIFT))).to(tl.int64)


@triton.jit
def float_value(key, SHIFT: tl.constexpr):
    """Return the float32 values of keys of `float_key`."""
    bits = key.to(tl.int32)
    return ((bits ^ ((bits >> 31) & (0x7FFFFFFF >> SHIFT))) << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _at_or_above(row, vocab, pivots, top, scale, MASS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return for each pivot the number of tokens not below it, or with MASS their sum of exp((logit - top) * scale).

    The sum never grows with the pivot, even with rounding: a token's term has the same place in one tree of additions.
    """
    total = tl.zeros([PIVOTS, BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        if MASS:
            weight = tl.exp((logit - top) * scale)
        else:
            weight = tl.full([BLOCK], 1.0, tl.float32)
        total += tl.where(logit[None, :] >= pivots[:, None], weight[None, :], 0.0)
    return tl.sum(total, axis=1)


@triton.jit
def highest_with(
    least, low, high, row, vocab, top, scale,
    MASS: tl.constexpr, SHIFT: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the highest key in [low, high) for which `_at_or_above` gives at least `least`; low if there is none."""
    while high - low > 1:
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        pivots = float_value(low + step * (1 + tl.arange(0, PIVOTS)), SHIFT)
        enough = _at_or_above(row, vocab, pivots, top, scale, MASS, PIVOTS, BLOCK) >= least
        low += step * tl.sum(enough.to(tl.int64), axis=0)
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _thresholds_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, out, vocab,
    SHIFT: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    temperature = tl.load(temperatures + at)
    top_k, top_p, min_p = tl.load(top_ks + at), tl.load(top_ps + at), tl.load(min_ps + at)
    cuts = (top_k > 0) & (top_k < vocab)
    threshold = float("-inf")
    if (temperature > 0) & (cuts | (top_p < 1) | (min_p > 0)):
        row = logits + at.to(tl.int64) * vocab
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        bottoms = tl.full([BLOCK], float("inf"), tl.float32)
        for first in range(0, vocab, BLOCK):
            token = first + tl.arange(0, BLOCK)
            logit = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            tops = tl.maximum(tops, logit)
            bottoms = tl.minimum(bottoms, tl.where(logit > float("-inf"), logit, float("inf")))
        top = tl.max(tops, axis=0)
        if top > float("-inf"):
            low = float_key(tl.min(bottoms, axis=0), SHIFT)
            high = float_key(top, SHIFT) + 1
            if min_p > 0:
                # The sampler divides in the same way, so bisection over keys finds the lowest one that passes without
                # reading the logits.
                floor = tl.div_rn(top, temperature) + tl.log(min_p)
                below, passes = low - 1, high - 1
                while passes - below > 1:
                    middle = below + (passes - below) // 2
                    if tl.div_rn(float_value(middle, SHIFT), temperature) >= floor:
                        passes = middle
                    else:
                        below = middle
                low = passes
            if cuts:
                low = highest_with(
                    top_k.to(tl.float32), low, high, row, vocab, top, 0.0, False, SHIFT, PIVOTS, BLOCK
                )  # fmt: skip
            if top_p < 1:
                scale = 1.0 / temperature
                everything = float_value(low + tl.zeros([PIVOTS], tl.int64), SHIFT)
                mass = tl.max(_at_or_above(row, vocab, everything, top, scale, True, PIVOTS, BLOCK), axis=0)
                low = highest_with(top_p * mass, low, high, row, vocab, top, scale, True, SHIFT, PIVOTS, BLOCK)
            threshold = float_value(low, SHIFT)
    tl.store(out + at, threshold)


def thresholds(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Compute thresholds_reference for bfloat16, float16 and float32; logits must be contiguous.

    The bits of a row's threshold depend on that row alone. Where the kept mass equals top_p to within float32 rounding,
    another implementation may keep one value more or less.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _thresholds_kernel[(rows,)](
            logits, temperatures, top_k, top_p, min_p, out, vocab,
            SHIFT=_ZERO_BITS[logits.dtype], PIVOTS=_PIVOTS, BLOCK=_BLOCK, num_warps=16,
        )  # fmt: skip
    return out
