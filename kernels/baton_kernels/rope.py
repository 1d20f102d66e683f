"""Rotates queries and keys and writes keys and values into the paged cache, in one pass over the projection's result.

Rotary embeddings after Su et al., "RoFormer" (2021); dimension i of a head pairs with i + head_dim / 2. Optionally each
query and key head is RMS-normed first (Qwen3). Models with other position encodings skip the rotation (BLOOM). A cache
in FP8 gets codes (reference/kv_codes.py). Values may have another size than keys (MiMo-V2-Flash).
"""

import torch
import triton
import triton.language as tl

from .e4m3 import to_e4m3
from .overlap import let_next_start, overlap_options, wait_for_inputs


# One compiled kernel serves all steps: positions and slots are rows of one tensor, and only some rows begin at a
# multiple of 16 bytes.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_and_cache_kernel(
    qkv, cos, sin, positions, slots, keys, values, q_out, q_norm, k_norm, inverses, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, HEAD_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, CODES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, HALF)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    middle = tl.where(is_v, VALUE_DIM // 2, DIM // 2)[:, None]
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (column[None, :] < middle)
    value_head = head - HEADS - KV_HEADS
    in_row = head * DIM + tl.where(is_v, value_head * (VALUE_DIM - DIM), 0)
    at = token * ((HEADS + KV_HEADS) * DIM + KV_HEADS * VALUE_DIM) + in_row[:, None] + column[None, :]
    slot = tl.load(slots + token)
    half = column < DIM // 2
    if NORM:
        w_q1, w_q2 = tl.load(q_norm + column, mask=half), tl.load(q_norm + DIM // 2 + column, mask=half)
        w_k1, w_k2 = tl.load(k_norm + column, mask=half), tl.load(k_norm + DIM // 2 + column, mask=half)
    if ROTATE:
        position = tl.load(positions + token).to(tl.int64)
        c = tl.load(cos + position * (DIM // 2) + column, mask=half, other=0.0)[None, :]
        s = tl.load(sin + position * (DIM // 2) + column, mask=half, other=0.0)[None, :]
    wait_for_inputs(OVERLAP)
    first = tl.load(qkv + at, mask=inside, other=0.0)
    second = tl.load(qkv + at + middle, mask=inside, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(square / DIM + eps)[:, None]
        w1 = tl.where(is_q[:, None], w_q1[None, :], w_k1[None, :])
        w2 = tl.where(is_q[:, None], w_q2[None, :], w_k2[None, :])
        first = tl.where(is_v[:, None], first, ((first * scale).to(w1.dtype) * w1).to(dtype).to(tl.float32))
        second = tl.where(is_v[:, None], second, ((second * scale).to(w2.dtype) * w2).to(dtype).to(tl.float32))
    if ROTATE:
        rotated_first = tl.where(is_v[:, None], first, first * c - second * s).to(dtype)
        rotated_second = tl.where(is_v[:, None], second, second * c + first * s).to(dtype)
    else:
        rotated_first, rotated_second = first.to(dtype), second.to(dtype)

    q_at = (token * HEADS + head[:, None]) * DIM + column[None, :]
    tl.store(q_out + q_at, rotated_first, mask=inside & is_q[:, None])
    tl.store(q_out + q_at + DIM // 2, rotated_second, mask=inside & is_q[:, None])
    if CODES:
        # The heads of the values follow those of the keys here, too.
        inverse = tl.load(inverses + head - HEADS, mask=is_k | is_v, other=1.0)[:, None]
        rotated_first = to_e4m3(rotated_first.to(tl.float32) * inverse)
        rotated_second = to_e4m3(rotated_second.to(tl.float32) * inverse)
    written = inside & (slot >= 0)
    k_at = (slot * KV_HEADS + head[:, None] - HEADS) * HEAD_STRIDE + column[None, :]
    tl.store(keys + k_at, rotated_first, mask=written & is_k[:, None])
    tl.store(keys + k_at + DIM // 2, rotated_second, mask=written & is_k[:, None])
    v_at = (slot * KV_HEADS + value_head[:, None]) * VALUE_STRIDE + column[None, :]
    tl.store(values + v_at, rotated_first, mask=written & is_v[:, None])
    tl.store(values + v_at + VALUE_DIM // 2, rotated_second, mask=written & is_v[:, None])


def rope_and_cache(
    qkv: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
    inverses: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute rope_and_cache_reference. qkv, keys, values, out and inverses must be contiguous, but heads of keys and
    values may be apart. Keys and values without heads only say whether the cache has codes."""
    (kv_heads, dim), value_dim = keys.shape[2:], values.shape[3]
    tokens, heads = qkv.shape[0], num_heads + 2 * kv_heads
    if out is None:
        out = qkv.new_empty(tokens, num_heads, dim)
    block = min(triton.next_power_of_2(heads), 8)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    cos, sin = rotary if rotary is not None else (qkv, qkv)
    _rope_and_cache_kernel[(tokens, triton.cdiv(heads, block))](
        qkv, cos, sin, positions, slots, keys, values, out, q_norm, k_norm,
        qkv if inverses is None else inverses, eps,
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim,
        HALF=triton.next_power_of_2(max(dim, value_dim) // 2), BLOCK_HEADS=block,
        HEAD_STRIDE=keys.stride(1) // max(kv_heads, 1), VALUE_STRIDE=values.stride(1) // max(kv_heads, 1),
        NORM=norms is not None, ROTATE=rotary is not None, CODES=inverses is not None,
        num_warps=4 if block == 8 else 1, **overlap_options(qkv.device),
    )  # fmt: skip
    return out
