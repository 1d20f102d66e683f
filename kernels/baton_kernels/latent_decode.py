"""Absorbed latent attention of a few new tokens per sequence over the paged cache (reference/latent.py).

A tile of latents is read once and serves as keys and values of all query heads, which form the rows of a tile.
Sequences are cut into parts (decode_parts.py), which run in parallel, and a second kernel merges their softmaxes, as in
Flash-Decoding (Dao et al., 2023). Several consecutive queries of a sequence may share a tile and then form a group. The
length of a group counts the tokens up to its last query.
"""

import torch
import triton
import triton.language as tl

from .decode_parts import TILE_KEYS, DecodeParts, load_part
from .latent_rows import row_stride
from .overlap import let_next_start, overlap_options, wait_for_inputs

# The most rows of a tile in 16 bits. For 128 heads there are two programs, which share the latents in the L2 cache.
_MOST_ROWS = 64
# The rows of a tile in float32. Its products need registers for whole rows.
_WIDE_ROWS = 16
# Of larger latents, the registers and the shared memory of a program have room for half as many rows.
_LARGE_RANK = 512
# In steps of at most this many groups, a program of the second kernel merges the parts of one head, otherwise of all.
_FEW_GROUPS = 64
_JOIN_COLUMNS = 128
_JOIN_PARTS = 8
_LOG2E = tl.constexpr(1.4426950408889634)


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["table_stride", "slots"])
def _latent_decode_kernel(
    q, latents, tables, plan, firsts, sinks, out, partial, logsums, scale, table_stride, slots, row_stride,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    slot = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    group, part, parts, length, table_row = load_part(plan, slot, slots)
    if group < 0:
        return
    query, count = group, 1
    if TOKENS > 1:
        query = tl.load(firsts + group)
        count = tl.load(firsts + group + 1) - query
    table = tables + table_row.to(tl.int64) * table_stride
    start = 0
    if WINDOW > 0:
        oldest = length - count + 1 - WINDOW  # the first key that the first query sees
        start = tl.maximum(oldest, 0) // TILE * TILE
    tiles = tl.cdiv(tl.cdiv(length - start, TILE), parts)
    begin = start + part * tiles * TILE
    end = tl.minimum(begin + tiles * TILE, length)

    member = tl.arange(0, TOKENS * BLOCK_HEADS)
    token = member // BLOCK_HEADS
    head = tl.program_id(1) * BLOCK_HEADS + member % BLOCK_HEADS
    real = (head < HEADS) & (token < count)
    seen_keys = length - count + 1 + token  # of each row
    column, rest = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    whole, whole_rest = column < RANK, rest < ROPE
    row = (query + token).to(tl.int64) * HEADS + head
    q_at = q + row[:, None] * (RANK + ROPE)
    latent_query = tl.load(q_at + column[None, :], mask=real[:, None] & whole[None, :], other=0.0)
    if ROPE > 0:
        rope_query = tl.load(q_at + RANK + rest[None, :], mask=real[:, None] & whole_rest[None, :], other=0.0)

    peak = tl.full([TOKENS * BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * BLOCK_HEADS], tl.float32)
    if SINKS:
        # The softmax of a sequence's first part begins with the sink, whose value is 0.
        sink = tl.load(sinks + head, mask=head < HEADS, other=0.0) * _LOG2E
        peak = tl.where(part == 0, sink, peak)
        total = tl.where(part == 0, 1.0, total)
    acc = tl.zeros([TOKENS * BLOCK_HEADS, BLOCK_RANK], tl.float32)
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        # Cache slots that no query sees may hold NaN, and 0 * NaN is NaN, so they are not loaded.
        known = key < end
        if WINDOW > 0:
            known = known & (key >= oldest)
        if PAGE % KEYS == 0:
            page = tl.load(table + first // PAGE).to(tl.int64)
        else:
            page = tl.load(table + key // PAGE, mask=known, other=0).to(tl.int64)
        at = latents + ((page * PAGE + key % PAGE) * row_stride)[:, None]
        latent = tl.load(at + column[None, :], mask=known[:, None] & whole[None, :], other=0.0)
        scores = tl.dot(latent_query, tl.trans(latent), input_precision="ieee")
        if ROPE > 0:
            rope = tl.load(at + RANK + rest[None, :], mask=known[:, None] & whole_rest[None, :], other=0.0)
            scores = tl.dot(rope_query, tl.trans(rope), scores, input_precision="ieee")
        scores *= scale * _LOG2E
        seen = known[None, :]
        if TOKENS > 1:
            seen = seen & (key[None, :] < seen_keys[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] >= seen_keys[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A tile without a visible key leaves the peak at -inf, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if TOKENS > 1 or WINDOW > 0 else new_peak
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak

    safe = tl.where(total == 0.0, 1.0, total)
    result = acc / safe[:, None]
    if parts == 1:
        to = out + row[:, None] * RANK + column[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=real[:, None] & whole[None, :])
        return
    cell = (slot.to(tl.int64) * TOKENS + token) * HEADS + head
    tl.store(partial + cell[:, None] * RANK + column[None, :], result, mask=real[:, None] & whole[None, :])
    # The first queries of a group may see no key of its last part. A window may leave fewer tiles than there are parts.
    tl.store(logsums + cell, tl.where(total == 0.0, float("-inf"), peak + tl.log2(safe)), mask=real)


@triton.jit(do_not_specialize=["groups"])
def _join_kernel(
    partial, logsums, spans, firsts, out, groups,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HEADS_EACH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    group, token = tl.program_id(0) // TOKENS, tl.program_id(0) % TOKENS
    first_head = tl.program_id(1) * HEADS_EACH
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    whole = column < RANK
    wait_for_inputs(OVERLAP)
    first = tl.load(spans + group)
    parts = tl.load(spans + groups + group)
    query, count = group, 1
    if TOKENS > 1:
        query = tl.load(firsts + group)
        count = tl.load(firsts + group + 1) - query
    if (parts == 1) | (token >= count):
        return
    for head in range(first_head, tl.minimum(first_head + HEADS_EACH, HEADS)):
        top = float("-inf")
        total = 0.0
        joined = tl.zeros([COLUMNS], tl.float32)
        for begin in range(0, parts, PARTS):
            part = begin + tl.arange(0, PARTS)
            cell = ((first + part).to(tl.int64) * TOKENS + token) * HEADS + head
            there = part < parts
            logsum = tl.load(logsums + cell, mask=there, other=float("-inf"))
            mask = there[:, None] & whole[None, :]
            results = tl.load(partial + cell[:, None] * RANK + column[None, :], mask=mask, other=0.0)
            new_top = tl.maximum(top, tl.max(logsum, axis=0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = tl.exp2(top - base)
            weight = tl.exp2(logsum - base)
            joined = joined * shrink + tl.sum(results * weight[:, None], axis=0)
            total = total * shrink + tl.sum(weight, axis=0)
            top = new_top
        to = out + ((query + token).to(tl.int64) * HEADS + head) * RANK + column
        tl.store(to, (joined / total).to(out.dtype.element_ty), mask=whole)


def tokens_per_group(heads: int, element_size: int, rank: int) -> int:
    """Return how many tokens of one sequence fill a tile; element_size is in bytes."""
    return max(_most_rows(element_size, rank) // _block_heads(heads, element_size, rank), 1)


def programs_per_part(heads: int, element_size: int, rank: int) -> int:
    """Return the number of programs that compute the heads of one part; element_size is in bytes."""
    return -(-heads // _block_heads(heads, element_size, rank))


def _most_rows(element_size: int, rank: int) -> int:
    if element_size > 2:
        return _WIDE_ROWS
    return _MOST_ROWS if rank <= _LARGE_RANK else _MOST_ROWS // 2


def _block_heads(heads: int, element_size: int, rank: int) -> int:
    rows: int = triton.next_power_of_2(heads)
    return min(max(rows, 16), _most_rows(element_size, rank))


def latent_decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    tables: torch.Tensor,
    parts: DecodeParts,
    scale: float,
    rank: int,
    tokens: int = 1,
    firsts: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    window: int = 0,
    keys: int = 0,
    num_warps: int = 0,
    num_stages: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention over latents, [T, heads, rank], of the absorbed queries of groups, in out when given.

    q: [T, heads, rank + rope_dim]. latents: [blocks, block_size, 1, rank + rope_dim], with contiguous rows. tables:
    [rows, most blocks] int32. parts: the parts of the groups; they hold the length of each group and its row of tables.
    tokens: the most queries of a group. firsts: [groups + 1] int32, the first query of each group; None = each has one.
    sinks, window: as AttentionVariant has them. keys: the keys of a tile, a divisor of TILE_KEYS. 0 = choose
    this and the arguments after it.
    """
    total, heads, width = q.shape
    groups, slots = parts.spans.shape[1], parts.plan.shape[1]
    out = q.new_empty(total, heads, rank) if out is None else out
    partial = q.new_empty((slots, tokens, heads, rank), dtype=torch.float32)
    logsums = q.new_empty((slots, tokens, heads), dtype=torch.float32)
    size = q.element_size()
    block_heads = _block_heads(heads, size, rank)
    tall, wide = tokens * block_heads > 16 or rank > _LARGE_RANK, size > 2
    options = overlap_options(q.device)
    _latent_decode_kernel[(slots, programs_per_part(heads, size, rank))](
        q, latents, tables, parts.plan, parts.spans if firsts is None else firsts, q if sinks is None else sinks,
        out, partial, logsums, scale, tables.stride(0), slots, row_stride(latents),
        HEADS=heads, BLOCK_HEADS=block_heads, TOKENS=tokens,
        RANK=rank, BLOCK_RANK=max(triton.next_power_of_2(rank), 16),
        ROPE=width - rank, BLOCK_ROPE=max(triton.next_power_of_2(width - rank), 16),
        PAGE=latents.shape[1], TILE=TILE_KEYS, KEYS=keys or (16 if wide else 32 if tall else 64),
        WINDOW=window, SINKS=sinks is not None,
        num_warps=num_warps or (8 if tall else 4),
        num_stages=num_stages or (1 if wide else 2), **options,
    )  # fmt: skip
    columns = min(triton.next_power_of_2(rank), _JOIN_COLUMNS)
    heads_each = 1 if groups <= _FEW_GROUPS else heads
    _join_kernel[(groups * tokens, triton.cdiv(heads, heads_each), triton.cdiv(rank, columns))](
        partial, logsums, parts.spans, parts.spans if firsts is None else firsts, out, groups,
        HEADS=heads, TOKENS=tokens, RANK=rank, COLUMNS=columns, PARTS=_JOIN_PARTS, HEADS_EACH=heads_each,
        num_warps=1, **options,
    )  # fmt: skip
    return out
