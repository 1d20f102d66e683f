"""Copies of KV blocks in 16 bits, for attention that reads no codes of 8 bits."""

import torch
import triton
import triton.language as tl

from .reference.paged_attention import AttentionVariant
from .windows import oldest_key


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["table_stride"])
def _widen_kernel(
    keys, values, tables, lengths, starts, sequences, places, scales, wide_keys, wide_values, table_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    target, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences + target)
    place = tl.load(places + target)
    length = tl.load(lengths + sequence)
    oldest = 0
    if WINDOW > 0:
        queries = tl.load(starts + sequence + 1) - tl.load(starts + sequence)
        oldest = oldest_key(length - queries, WINDOW, CHUNKED)
    # The table has nothing for other blocks, which no query sees.
    if (place * PAGE < length) & ((place + 1) * PAGE > oldest):
        block = tl.load(tables + sequence.to(tl.int64) * table_stride + place).to(tl.int64)
        row, column = tl.arange(0, PAGE)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
        at = (row * KV_HEADS + head) * DIM + column
        source, copy = block * PAGE * KV_HEADS * DIM + at, target.to(tl.int64) * PAGE * KV_HEADS * DIM + at
        inside = (row < PAGE) & (column < DIM)
        k = tl.load(keys + source, mask=inside).to(tl.float32) * tl.load(scales + head)
        tl.store(wide_keys + copy, k.to(wide_keys.dtype.element_ty), mask=inside)
        v = tl.load(values + source, mask=inside).to(tl.float32) * tl.load(scales + KV_HEADS + head)
        tl.store(wide_values + copy, v.to(wide_values.dtype.element_ty), mask=inside)


def widen_blocks(
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor],
    scales: torch.Tensor,
    variant: AttentionVariant,
    wide_keys: torch.Tensor,
    wide_values: torch.Tensor,
) -> None:
    """Write numbers instead of codes into the first n blocks of wide_keys and wide_values, which are [blocks, page,
    kv_heads, dim] bfloat16. The page is a power of two.

    keys, values, tables, lengths, starts, scales: as in prefill_attention, keys and values contiguous. blocks: for each
    of the n blocks the sequence to which it belongs and its place in that sequence's table, [n] int32 each. Blocks that
    none of the sequence's new tokens sees are left as they are.
    """
    page, kv_heads, dim = keys.shape[1:]
    _widen_kernel[(len(blocks[0]), kv_heads)](
        keys, values, tables, lengths, starts, *blocks, scales, wide_keys, wide_values, tables.stride(0),
        KV_HEADS=kv_heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), PAGE=page,
        WINDOW=variant.window, CHUNKED=variant.chunked, num_warps=4,
    )  # fmt: skip
