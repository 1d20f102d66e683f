"""Causal attention of chunks of new tokens over the paged cache, which holds their own keys already.

FlashAttention (Dao, 2023) over block tables: one program per tile of queries and head.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from .paged_attention import AttentionVariant

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _prefill_kernel(
    q, keys, values, tables, lengths, starts, tile_sequences, tile_starts, alibi, out, scale, softcap, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    sequence = tl.load(tile_sequences + tile)
    end_row = tl.load(starts + sequence + 1)
    length = tl.load(lengths + sequence)
    row = tl.load(tile_starts + tile) + tl.arange(0, BLOCK_QUERIES)
    real = row < end_row
    # The queries are the sequence's last tokens.
    position = length - end_row + row
    column = tl.arange(0, BLOCK_DIM)
    whole = column < DIM
    q_at = (row.to(tl.int64)[:, None] * HEADS + head) * DIM + column[None, :]
    query = tl.load(q + q_at, mask=real[:, None] & whole[None, :], other=0.0)
    if ALIBI:
        slope = tl.load(alibi + head)

    lowest = length - end_row + tl.load(tile_starts + tile)
    highest = tl.minimum(lowest + BLOCK_QUERIES, length)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
    peak = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    acc = tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32)
    for first in range(begin, highest, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        known = key < highest
        page = tl.load(tables + sequence * table_stride + key // PAGE, mask=known, other=0).to(tl.int64)
        at = ((page * PAGE + key % PAGE) * KV_HEADS + kv_head) * DIM
        k = tl.load(keys + at[None, :] + column[:, None], mask=known[None, :] & whole[:, None], other=0.0)
        scores = tl.dot(query, k, input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        age = position[:, None] - key[None, :]
        if ALIBI:
            scores -= slope * age
        seen = (age >= 0) & known[None, :]
        if WINDOW > 0:
            seen = seen & (age < WINDOW)
        scores = tl.where(seen, scores * _LOG2E, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(values + at[:, None] + column[None, :], mask=known[:, None] & whole[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + q_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None] & whole[None, :])


def prefill_tiles(
    starts: list[int], block_queries: int, which: Iterable[int] | None = None
) -> tuple[list[int], list[int]]:
    """Return for each tile of queries its sequence and its first row.

    starts: as in prefill_attention. which: the sequences to compute; None = all.
    """
    sequences, rows = [], []
    for sequence in range(len(starts) - 1) if which is None else which:
        for row in range(starts[sequence], starts[sequence + 1], block_queries):
            sequences.append(sequence)
            rows.append(row)
    return sequences, rows


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor],
    variant: AttentionVariant,
    out: torch.Tensor | None = None,
    block_queries: int = 64,
    block_keys: int = 64,
    num_warps: int = 4,
    num_stages: int = 2,
) -> torch.Tensor:
    """As paged_attention_reference, for the sequences that have tiles; the rows of others are left alone.

    tiles: `prefill_tiles` of the same block_queries, int32 on q's device.

    q, keys and values are contiguous; tables, lengths and starts int32.
    """
    heads, dim = q.shape[1:]
    page, kv_heads = keys.shape[1:3]
    if out is None:
        out = torch.empty_like(q)
    _prefill_kernel[(len(tiles[0]), heads)](
        q, keys, values, tables, lengths, starts, *tiles, q if variant.alibi is None else variant.alibi, out,
        variant.scale, variant.softcap, tables.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), PAGE=page,
        BLOCK_QUERIES=block_queries, BLOCK_KEYS=block_keys,
        WINDOW=variant.window, SOFTCAP=variant.softcap > 0, ALIBI=variant.alibi is not None,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out
