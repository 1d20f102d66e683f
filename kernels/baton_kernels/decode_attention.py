"""Attention of one new token per sequence over the paged cache.

Split-KV, after Flash-Decoding (Dao et al., 2023): a sequence's keys are cut into parts that run side by side, and a
second kernel joins their softmaxes. The query heads of one KV head form one tile, so that keys are read once per group.
"""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .paged_attention import AttentionVariant

MOST_SPLITS = 32
_LOG2E = tl.constexpr(1.4426950408889634)


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["table_stride", "splits"])
def _decode_kernel(
    q, keys, values, tables, rows, lengths, alibi, out, partial, logsums, scale, softcap, table_stride, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_inputs(OVERLAP)
    length = tl.load(lengths + sequence)
    table = tables + tl.load(rows + sequence) * table_stride
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0) // BLOCK_KEYS * BLOCK_KEYS
    tiles = tl.cdiv(tl.cdiv(length - begin, BLOCK_KEYS), splits)
    first = begin + split * tiles * BLOCK_KEYS
    last = tl.minimum(first + tiles * BLOCK_KEYS, length)

    member = tl.arange(0, BLOCK_GROUP)
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_DIM)
    whole = column < DIM
    q_at = (sequence.to(tl.int64) * HEADS + head[:, None]) * DIM + column[None, :]
    real = (member < GROUP)[:, None] & whole[None, :]
    query = tl.load(q + q_at, mask=real, other=0.0)
    if ALIBI:
        slope = tl.load(alibi + head, mask=member < GROUP, other=0.0)

    peak = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for tile in range(first, last, BLOCK_KEYS):
        key = tile + tl.arange(0, BLOCK_KEYS)
        known = key < last
        if PAGE % BLOCK_KEYS == 0:
            page = tl.load(table + tile // PAGE).to(tl.int64)
        else:
            page = tl.load(table + key // PAGE, mask=known, other=0).to(tl.int64)
        row = ((page * PAGE + key % PAGE) * KV_HEADS + kv_head) * DIM
        k = tl.load(keys + row[None, :] + column[:, None], mask=known[None, :] & whole[:, None], other=0.0)
        scores = tl.dot(query, k, input_precision="ieee") * scale
        if SOFTCAP:
            # tanh through exp: softcap * (1 - 2 / (e^2x + 1)).
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        if ALIBI:
            scores -= slope[:, None] * (length - 1 - key)[None, :]
        seen = known
        if WINDOW > 0:
            seen = known & (key >= length - WINDOW)
        scores = tl.where(seen[None, :], scores * _LOG2E, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A tile without a visible key leaves the peak at -inf, and -inf - -inf is no number.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(values + row[:, None] + column[None, :], mask=known[:, None] & whole[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    if not SPLIT:
        tl.store(out + q_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        safe = tl.where(total == 0.0, 1.0, total)
        part = (sequence.to(tl.int64) * HEADS + head) * splits + split
        tl.store(partial + part[:, None] * DIM + column[None, :], acc / safe[:, None], mask=real)
        tl.store(logsums + part, tl.where(total == 0.0, float("-inf"), peak + tl.log2(safe)), mask=member < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    partial, logsums, out, splits, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MOST: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MOST)
    column = tl.arange(0, BLOCK_DIM)
    wait_for_inputs(OVERLAP)
    logsum = tl.load(logsums + row * splits + split, mask=split < splits, other=float("-inf"))
    weight = tl.exp2(logsum - tl.max(logsum, axis=0))
    at = (row * splits + split[:, None]) * DIM + column[None, :]
    parts = tl.load(partial + at, mask=(column < DIM)[None, :] & (weight > 0)[:, None], other=0.0)
    joined = tl.sum(parts * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + row * DIM + column, joined.to(out.dtype.element_ty), mask=column < DIM)


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    variant: AttentionVariant,
    rows: torch.Tensor,
    splits: int = 1,
    out: torch.Tensor | None = None,
    block_keys: int = 64,
    num_warps: int = 2,
    num_stages: int = 3,
) -> torch.Tensor:
    """As paged_attention_reference with one query per sequence.

    q: [S, heads, head_dim], contiguous as the caches are. tables: [rows, most blocks] int32. lengths: [S] int32, at
    least 1. rows: [S] int64, which row of tables is whose. splits: at most MOST_SPLITS; more parts per sequence fill
    the device when there are few sequences. out: where the result goes, contiguous; None = a new tensor.
    """
    sequences, heads, dim = q.shape
    page, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    if out is None:
        out = torch.empty_like(q)
    partial = q.new_empty((sequences, heads, splits, dim), dtype=torch.float32) if splits > 1 else q
    logsums = q.new_empty((sequences, heads, splits), dtype=torch.float32) if splits > 1 else q
    block_dim = triton.next_power_of_2(dim)
    options = overlap_options(q.device)
    _decode_kernel[(sequences, kv_heads, splits)](
        q, keys, values, tables, rows, lengths,
        q if variant.alibi is None else variant.alibi, out, partial, logsums,
        variant.scale, variant.softcap, tables.stride(0), splits,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_DIM=block_dim, PAGE=page,
        GROUP=group, BLOCK_GROUP=max(16, triton.next_power_of_2(group)), BLOCK_KEYS=block_keys, SPLIT=splits > 1,
        WINDOW=variant.window, SOFTCAP=variant.softcap > 0, ALIBI=variant.alibi is not None,
        num_warps=num_warps, num_stages=num_stages, **options,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(sequences * heads,)](
            partial, logsums, out, splits, DIM=dim, BLOCK_DIM=block_dim, MOST=MOST_SPLITS, num_warps=1, **options
        )
    return out
