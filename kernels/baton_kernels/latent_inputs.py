"""Rotates the ends of queries and keys of latent attention, norms the latents and writes them into the paged cache, in
one pass over the projections' results. reference/latent.py defines the layout."""

import torch
import triton
import triton.language as tl

from .latent_rows import row_stride
from .overlap import let_next_start, overlap_options, wait_for_inputs


# One compiled kernel serves all steps: positions and slots are rows of one tensor, and only some rows begin at a
# multiple of 16 bytes.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _latent_rope_and_cache_kernel(
    q, kv, norm, rope_norm, cos, sin, positions, slots, latents, out, eps, q_stride, kv_stride, latent_stride,
    HEADS: tl.constexpr, KEY: tl.constexpr, BLOCK_KEY: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROPE_NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The programs of the last head block compute the latents, the others queries."""
    let_next_start(OVERLAP)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    rotates = pair < HALF
    if INTERLEAVED:
        first_at, second_at = 2 * pair, 2 * pair + 1
    else:
        first_at, second_at = pair, HALF + pair
    wait_for_inputs(OVERLAP)
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * HALF + pair, mask=rotates, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + pair, mask=rotates, other=0.0)[None, :]
    if block < tl.num_programs(1) - 1:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        inside = (head < HEADS) & rotates[None, :]
        from_at = q + token * q_stride + head * (KEY + 2 * HALF)
        to = out + (token * HEADS + head) * (KEY + 2 * HALF)
        first = tl.load(from_at + KEY + first_at[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(from_at + KEY + second_at[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(to + KEY + pair[None, :], (first * c - second * s).to(out.dtype.element_ty), mask=inside)
        tl.store(to + KEY + HALF + pair[None, :], (second * c + first * s).to(out.dtype.element_ty), mask=inside)
        column = tl.arange(0, BLOCK_KEY)[None, :]
        whole = (head < HEADS) & (column < KEY)
        tl.store(to + column, tl.load(from_at + column, mask=whole, other=0.0), mask=whole)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    column = tl.arange(0, BLOCK_RANK)
    whole = column < RANK
    from_row, to_row = kv + token * kv_stride, latents + slot * latent_stride
    values = tl.load(from_row + column, mask=whole, other=0.0)
    wide = values.to(tl.float32)
    scales = tl.load(norm + column, mask=whole, other=0.0)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / RANK + eps)).to(scales.dtype) * scales
    tl.store(to_row + column, normed.to(values.dtype), mask=whole)
    first = tl.load(from_row + RANK + first_at, mask=rotates, other=0.0).to(tl.float32)[None, :]
    second = tl.load(from_row + RANK + second_at, mask=rotates, other=0.0).to(tl.float32)[None, :]
    if ROPE_NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second) / (2 * HALF) + eps)
        first_scales = tl.load(rope_norm + first_at, mask=rotates, other=0.0)[None, :]
        second_scales = tl.load(rope_norm + second_at, mask=rotates, other=0.0)[None, :]
        # The norm's result is rounded before it is rotated.
        first = ((first * scale).to(scales.dtype) * first_scales).to(values.dtype).to(tl.float32)
        second = ((second * scale).to(scales.dtype) * second_scales).to(values.dtype).to(tl.float32)
    to_rope = to_row + RANK + pair[None, :]
    tl.store(to_rope, (first * c - second * s).to(latents.dtype.element_ty), mask=rotates[None, :])
    tl.store(to_rope + HALF, (second * c + first * s).to(latents.dtype.element_ty), mask=rotates[None, :])


def latent_rope_and_cache(
    q: torch.Tensor,
    kv: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    interleaved: bool,
    positions: torch.Tensor,
    slots: torch.Tensor,
    latents: torch.Tensor,
    num_heads: int,
    out: torch.Tensor | None = None,
    rope_norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute latent_rope_and_cache_reference. Rows of q, kv and latents are contiguous; all other tensors are
    altogether."""
    tokens, rank = len(q), len(norm)
    half = (kv.shape[1] - rank) // 2
    width = q.shape[1] // num_heads
    key = width - 2 * half
    if out is None:
        out = q.new_empty(tokens, num_heads, width)
    block = min(triton.next_power_of_2(num_heads), 8)
    _latent_rope_and_cache_kernel[(tokens, triton.cdiv(num_heads, block) + 1)](
        q, kv, norm, norm if rope_norm is None else rope_norm, *rotary, positions, slots, latents, out, eps,
        q.stride(0), kv.stride(0), row_stride(latents),
        HEADS=num_heads, KEY=key, BLOCK_KEY=triton.next_power_of_2(key),
        RANK=rank, BLOCK_RANK=triton.next_power_of_2(rank),
        HALF=half, BLOCK_HALF=max(triton.next_power_of_2(half), 1), BLOCK_HEADS=block, INTERLEAVED=interleaved,
        ROPE_NORM=rope_norm is not None, num_warps=4, **overlap_options(q.device),
    )  # fmt: skip
    return out
