"""The operation before the scores of an indexer: LayerNorm of the keys, rotation of queries and keys, cache writes."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs


# One compiled kernel serves all steps: positions and slots are rows of one tensor, and only some rows begin at a
# multiple of 16 bytes.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _index_rope_and_cache_kernel(
    q, k, weight, bias, cos, sin, positions, slots, index_keys, out, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The programs of the last head block compute the keys, the others queries."""
    let_next_start(OVERLAP)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK_DIM)
    inside = column < DIM
    turned = column < 2 * HALF
    # The results hold the first elements of all pairs, then the second ones.
    is_second = column >= HALF
    pair = tl.where(is_second, column - HALF, column)
    if INTERLEAVED:
        own = tl.where(turned, 2 * pair + is_second.to(tl.int32), column)
        other = 2 * pair + 1 - is_second.to(tl.int32)
    else:
        own = column
        other = tl.where(is_second, pair, pair + HALF)
    wait_for_inputs(OVERLAP)
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * HALF + pair, mask=turned, other=1.0)
    s = tl.load(sin + position * HALF + pair, mask=turned, other=0.0)
    # first * cos - second * sin, and second * cos + first * sin.
    s = tl.where(is_second, s, -s)
    if block < tl.num_programs(1) - 1:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        at = (token * HEADS + head) * DIM
        mask = (head < HEADS) & inside[None, :]
        plain = tl.load(q + at + own[None, :], mask=mask, other=0.0).to(tl.float32)
        partner = tl.load(q + at + other[None, :], mask=mask & turned[None, :], other=0.0).to(tl.float32)
        tl.store(out + at + column[None, :], (plain * c[None, :] + partner * s[None, :]).to(out.dtype.element_ty), mask)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    from_row = k + token * DIM
    values = tl.load(from_row + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values) / DIM
    centered = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered) / DIM + eps)
    dtype = index_keys.dtype.element_ty
    plain = _normed(from_row, weight, bias, own, inside, mean, scale, dtype)
    partner = _normed(from_row, weight, bias, other, turned, mean, scale, dtype)
    tl.store(index_keys + slot * DIM + column, (plain * c + partner * s).to(dtype), mask=inside)


@triton.jit
def _normed(row, weight, bias, column, mask, mean, scale, dtype: tl.constexpr):
    """Return elements of the norm of a row, rounded as the norm alone would be, in float32."""
    value = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    return ((value - mean) * scale * factor + offset).to(dtype).to(tl.float32)


def index_rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    interleaved: bool,
    positions: torch.Tensor,
    slots: torch.Tensor,
    index_keys: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Compute index_rope_and_cache_reference. All tensors are contiguous."""
    tokens, dim = k.shape
    out = q.new_empty(tokens, num_heads, dim)
    block = min(triton.next_power_of_2(num_heads), 8)
    _index_rope_and_cache_kernel[(tokens, triton.cdiv(num_heads, block) + 1)](
        q, k, weight, bias, *rotary, positions, slots, index_keys, out, eps,
        HEADS=num_heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), HALF=rotary[0].shape[1], BLOCK_HEADS=block,
        INTERLEAVED=interleaved, num_warps=4, **overlap_options(q.device),
    )  # fmt: skip
    return out
