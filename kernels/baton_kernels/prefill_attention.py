"""Causal attention of chunks of new tokens over the paged cache, which already holds the keys of these tokens.

FlashAttention (Dao, 2023) over block tables: one program per tile of queries and head. Where a tile of keys is a whole
block, TMA loads it, which is a third faster. The codes of an FP8 cache are multiplied as float16; their scales are
factors of the scores and of the result.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .alibi import rounded_alibi
from .e4m3 import WEIGHT_SCALE, query_for_codes
from .overlap import let_next_start, overlap_options, wait_for_inputs
from .prefill_cuts import TileCuts, join_parts
from .reference.paged_attention import AttentionVariant
from .windows import oldest_key, reach

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    acc, peak, total, query, position, oldest, begin, end, gap_begin, gap, keys, values, table,
    slope, alibi_scale, scale, softcap, kv_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, PAGE: tl.constexpr, HEAD_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, CODES: tl.constexpr,
    WHOLE: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries over keys [begin, end). Without MASKED, every query must see all of these keys.
    With WINDOW or CUT, a query may see none.

    oldest: position of the first key that any of the queries sees. gap_begin, gap: the first key that is left out, and
    the number of keys left out; multiples of BLOCK_KEYS. These three are read with MASKED and WINDOW only.
    WHOLE: keys and values are descriptors that load a whole block, from the block's first row and the head's column.
    """
    column, value_column = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    whole, whole_value = column < DIM, value_column < VALUE_DIM
    for at_key in range(begin, end - gap, BLOCK_KEYS):
        first = at_key
        if WINDOW > 0 and MASKED:
            first += tl.where(at_key >= gap_begin, gap, 0)
        key = first + tl.arange(0, BLOCK_KEYS)
        # Cache slots that no query sees may hold NaN, and 0 * NaN is NaN, so their values are replaced by 0.
        known = key < end
        if WINDOW > 0 and MASKED:
            known = known & (key >= oldest)
        if WHOLE:
            page_row = tl.load(table + first // PAGE) * PAGE
            k = keys.load([page_row, kv_head * HEAD_STRIDE])
            if CODES:
                k = k.to(query.dtype)
            k = tl.trans(k)
        else:
            page = tl.load(table + key // PAGE, mask=known, other=0).to(tl.int64)
            head_at = (page * PAGE + key % PAGE) * KV_HEADS + kv_head
            k_at = (head_at * HEAD_STRIDE)[None, :] + column[:, None]
            k = tl.load(keys + k_at, mask=known[None, :] & whole[:, None], other=0.0)
            if CODES:
                k = k.to(query.dtype)
        scores = tl.dot(query, k, input_precision="ieee")
        if SOFTCAP:
            scores = scores * scale
            scores = softcap * _LOG2E * (1 - 2 / (tl.exp(scores * (2 / softcap)) + 1))
        else:
            scores = scores * (scale * _LOG2E)
        age = position[:, None] - key[None, :]
        if ALIBI == 2:
            scores += (alibi_scale * _LOG2E) * rounded_alibi(slope, key[None, :])
        elif ALIBI == 1:
            scores -= slope * _LOG2E * age
        if MASKED:
            seen = (age >= 0) & known[None, :]
            if WINDOW > 0:
                seen = seen & (age < reach(position, WINDOW, CHUNKED))
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A tile without a visible key leaves the peak at -inf, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if (WINDOW > 0 or CUT) and MASKED else new_peak
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        if WHOLE:
            # Columns beyond VALUE_DIM belong to the next head. They only affect columns of acc that are not stored.
            v = values.load([page_row, kv_head * VALUE_STRIDE])
            if CODES:
                v = v.to(query.dtype)
            if MASKED:
                v = tl.where(known[:, None], v, 0.0)
        else:
            v_at = (head_at * VALUE_STRIDE)[:, None] + value_column[None, :]
            v = tl.load(values + v_at, mask=known[:, None] & whole_value[None, :], other=0.0)
            if CODES:
                v = v.to(query.dtype)
        acc = acc * shrink[:, None]
        if CODES:
            weights *= WEIGHT_SCALE
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, peak, total


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q, keys, values, tables, lengths, starts, tile_sequences, tile_starts, alibi, sinks, scales, out,
    cuts, partial, logsums, scale, softcap, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, PAGE: tl.constexpr, HEAD_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    CODES: tl.constexpr, WHOLE: tl.constexpr, UNIFORM: tl.constexpr, CUT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    tiles = tl.num_programs(1)
    head, tile = tl.program_id(0), tiles - 1 - tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    sequence = tl.load(tile_sequences + tile)
    first_row = tl.load(tile_starts + tile)
    end_row = tl.load(starts + sequence + 1)
    length = tl.load(lengths + sequence)
    row = first_row + tl.arange(0, BLOCK_QUERIES)
    real = row < end_row
    # The queries are the sequence's last tokens.
    position = length - end_row + row
    column = tl.arange(0, BLOCK_DIM)
    q_at = (row.to(tl.int64)[:, None] * HEADS + head) * DIM + column[None, :]
    query = tl.load(q + q_at, mask=real[:, None] & (column < DIM)[None, :], other=0.0)
    slope, alibi_scale = 0.0, scale
    if ALIBI > 0:
        slope = tl.load(alibi + head)
    if CODES:
        query, scale = query_for_codes(query, scale * tl.load(scales + kv_head))
        value_scale = tl.load(scales + KV_HEADS + kv_head) / WEIGHT_SCALE

    lowest = length - end_row + first_row
    highest = tl.minimum(lowest + BLOCK_QUERIES, length)
    table = tables + sequence * table_stride
    peak = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    if SINKS:
        # The softmax begins with the sink, whose value is 0.
        peak = tl.zeros([BLOCK_QUERIES], tl.float32) + tl.load(sinks + head) * _LOG2E
        total += 1.0
    if CUT:
        part = tl.load(cuts + tile)
        parts = tl.load(cuts + tiles + tile)
        slot = tl.load(cuts + 2 * tiles + tile)
        # The sink counts once, in the first part.
        peak = tl.where(part == 0, peak, float("-inf"))
        total = tl.where(part == 0, total, 0.0)
    acc = tl.zeros([BLOCK_QUERIES, BLOCK_VALUE], tl.float32)
    # All queries of the tile see the keys [inner, middle), which need no mask: none is newer than the first query, and
    # all are inside the window of the last one.
    begin, inner, middle, oldest = 0, 0, 0, 0
    if not UNIFORM:
        middle = (lowest + 1) // BLOCK_KEYS * BLOCK_KEYS
    if WINDOW > 0:
        oldest = oldest_key(lowest, WINDOW, CHUNKED)
        begin = tl.maximum(oldest, 0) // BLOCK_KEYS * BLOCK_KEYS
        inner = tl.maximum(oldest_key(highest - 1, WINDOW, CHUNKED) + BLOCK_KEYS - 1, 0) // BLOCK_KEYS * BLOCK_KEYS
        middle = tl.maximum(middle, inner)
    end = highest
    if CUT:
        # A part has whole tiles of keys. Each of the ranges above is limited to them.
        count = tl.cdiv(highest - begin, BLOCK_KEYS)
        low = begin + part * count // parts * BLOCK_KEYS
        end = tl.minimum(begin + (part + 1) * count // parts * BLOCK_KEYS, highest)
        begin = low
        inner = tl.minimum(tl.maximum(inner, low), end)
        middle = tl.minimum(tl.maximum(middle, low), end)
    if not UNIFORM:
        acc, peak, total = _attend(
            acc, peak, total, query, position, 0, inner, middle, 0, 0, keys, values, table,
            slope, alibi_scale, scale, softcap, kv_head,
            KV_HEADS, DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE, PAGE, HEAD_STRIDE, VALUE_STRIDE, BLOCK_KEYS,
            WINDOW, CHUNKED, SOFTCAP, ALIBI, CODES, WHOLE, False, CUT,
        )  # fmt: skip
    gap = middle - inner if WINDOW > 0 else 0
    acc, peak, total = _attend(
        acc, peak, total, query, position, oldest, begin if WINDOW > 0 else middle, end, inner, gap,
        keys, values, table, slope, alibi_scale, scale, softcap, kv_head,
        KV_HEADS, DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE, PAGE, HEAD_STRIDE, VALUE_STRIDE, BLOCK_KEYS,
        WINDOW, CHUNKED, SOFTCAP, ALIBI, CODES, WHOLE, True, CUT,
    )  # fmt: skip
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    if CODES:
        acc *= value_scale
    result = acc / total[:, None]
    value_column = tl.arange(0, BLOCK_VALUE)
    out_at = (row.to(tl.int64)[:, None] * HEADS + head) * VALUE_DIM + value_column[None, :]
    inside = real[:, None] & (value_column < VALUE_DIM)[None, :]
    if CUT:
        at = (slot.to(tl.int64) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)) * HEADS + head
        logsum = tl.where(blind, float("-inf"), peak + tl.log2(total))
        tl.store(logsums + at, logsum, mask=real & (parts > 1))
        tl.store(partial + at[:, None] * VALUE_DIM + value_column[None, :], result, mask=inside & (parts > 1))
        inside = inside & (parts == 1)
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=inside)


def queries_per_tile(head_dim: int, element_size: int, shared_memory: int) -> int:
    """Return the block_queries that is fastest for many queries.

    head_dim: of keys or of values, whichever is larger. element_size: in bytes. shared_memory: bytes that a program can
    have.
    """
    if head_dim > 256 and element_size == 4:
        return 32
    # The queries, and two tiles each of keys and values. For heads of up to 128 the queries are in registers instead.
    needed = (128 + 4 * 64) * triton.next_power_of_2(head_dim) * element_size
    fits = head_dim <= 128 or (head_dim <= 256 and needed <= shared_memory)
    return 128 if element_size == 2 and fits else 64


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
    block_keys: int = 0,
    num_stages: int = 2,
    uniform: bool = False,
    scales: torch.Tensor | None = None,
    cuts: TileCuts | None = None,
) -> torch.Tensor:
    """Compute paged_attention_reference for the sequences that have tiles; rows of other sequences are not written.

    tiles: the result of `prefill_tiles` for the same block_queries, as int32 on q's device. q and scales are
    contiguous, keys and values except for gaps between heads. tables, lengths and starts are int32. block_keys: 0 =
    as many as fit into shared memory, at most 64. cuts: from the result of `cut_tiles`, whose sequences and rows
    are then `tiles`; None = no tile is cut. uniform: the bits of a query's result do not depend on its tile, which
    is slower. Otherwise keys that a whole tile sees take a path without a mask, in which the compiler rounds
    differently.
    """
    heads, dim = q.shape[1:]
    (page, kv_heads), value_dim = keys.shape[1:3], values.shape[3]
    block_dim, block_value = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    widest = max(block_dim, block_value)
    if out is None:
        out = q.new_empty(len(q), heads, value_dim)
    # For wider heads, the queries and two tiles each of keys and values would not fit into shared memory.
    block_keys = block_keys or (64 if widest <= 256 else 64 // q.element_size())
    widths = [cache.stride(1) for cache in (keys, values)]
    strides = [width // kv_heads for width in widths]
    aligned = all(width * keys.element_size() % 16 == 0 for width in widths)
    # A tile may have more columns than a key. The queries are 0 there, but numbers in gaps between heads may be NaN.
    finite = block_dim == dim or strides[0] == dim
    whole = page == block_keys and widest <= 256 and q.element_size() == 2 and aligned and finite
    if whole:
        rows = keys.shape[0] * page
        keys, values = (
            TensorDescriptor(cache, [rows, width], [width, 1], [page, block])
            for cache, width, block in zip((keys, values), widths, (block_dim, block_value), strict=True)
        )
    partial = logsums = q
    if cuts is not None:
        partial = q.new_empty((cuts.slots, block_queries, heads, value_dim), dtype=torch.float32)
        logsums = q.new_empty((cuts.slots, block_queries, heads), dtype=torch.float32)
    _prefill_kernel[(heads, len(tiles[0]))](
        q, keys, values, tables, lengths, starts, *tiles, q if variant.alibi is None else variant.alibi,
        q if variant.sinks is None else variant.sinks, q if scales is None else scales, out,
        q if cuts is None else cuts.tiles, partial, logsums, variant.scale, variant.softcap, tables.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_DIM=block_dim, VALUE_DIM=value_dim, BLOCK_VALUE=block_value,
        PAGE=page, HEAD_STRIDE=strides[0], VALUE_STRIDE=strides[1], BLOCK_QUERIES=block_queries, BLOCK_KEYS=block_keys,
        WHOLE=whole, UNIFORM=uniform, CUT=cuts is not None,
        WINDOW=variant.window, CHUNKED=variant.chunked, SOFTCAP=variant.softcap > 0, ALIBI=variant.alibi_form,
        SINKS=variant.sinks is not None, CODES=scales is not None,
        num_warps=8 if block_queries * widest > 128 * 128 else 4, num_stages=num_stages, **overlap_options(q.device),
    )  # fmt: skip
    if cuts is not None:
        join_parts(partial, logsums, cuts, tiles, starts, out)
    return out
