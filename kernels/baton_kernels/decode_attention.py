"""Attention of one new token per sequence over the paged cache.

Split-KV, after Flash-Decoding (Dao et al., 2023): long sequences are cut into parts (decode_parts.py), which run in
parallel. The program that finishes last for a sequence merges the partial softmaxes of its parts, as in Stream-K (Osama
et al., 2023). In small batches a second kernel merges them instead, with one program for each query head, so that more
programs share the work. The query heads of one KV head form one tile, so that a key is read once for all of them. The
codes of an FP8 cache are multiplied as in prefill_attention.py.
"""

import torch
import triton
import triton.language as tl

from .alibi import rounded_alibi
from .decode_parts import TILE_KEYS, DecodeParts, load_part
from .e4m3 import WEIGHT_SCALE, columns_of_pairs, query_for_codes
from .overlap import LINE, let_next_start, overlap_options, prefetch, wait_for_inputs
from .reference.paged_attention import AttentionVariant
from .windows import oldest_key

# Keys of a tile, warps of a program and stages: for heads of up to 128, of up to 256, and of more elements. The tiles
# of larger heads take more memory.
_TILE, _TALL_TILE, _TALLEST_TILE = (64, 2, 3), (32, 4, 3), (16, 4, 2)
# For heads of up to 128 codes of 8 bits. Such a tile has as many bytes, and more warps to decode them.
_CODES_TILE = (128, 4, 2)
# Elements of partial results that a program of the decode kernel holds at a time while it joins parts.
_JOIN_VALUES = 2048
# In steps of at most this many sequences, a separate kernel merges the parts, and its programs read _PARTS_AT_ONCE at a
# time.
SEPARATE_JOIN_SEQUENCES = 8
_PARTS_AT_ONCE = 32
_LOG2E = tl.constexpr(1.4426950408889634)
# Programs that prefetch the keys and values of their first tiles, and the number of these tiles. More programs than
# this seldom run at once.
_EARLY_PROGRAMS, _EARLY_TILES = tl.constexpr(256), tl.constexpr(2)


@triton.jit
def _prefetch_rows(planes, table, kv_head, first, last, PAGE: tl.constexpr, KV_HEADS: tl.constexpr,
                   STRIDE: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Bring the rows of keys or values of a head for KEYS tokens into L2, as far as there are so many."""
    key = tl.minimum(first + tl.arange(0, KEYS), last - 1)
    page = tl.load(table + key // PAGE).to(tl.int64)
    head_at = (page * PAGE + key % PAGE) * KV_HEADS + kv_head
    elements: tl.constexpr = LINE * 8 // planes.dtype.element_ty.primitive_bitwidth
    column = tl.minimum(tl.arange(0, LINES) * elements, SIZE - 1)
    prefetch(planes + (head_at * STRIDE)[:, None] + column[None, :])


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["table_stride", "slots"])
def _decode_kernel(
    q, keys, values, tables, plan, arrivals, alibi, sinks, scales, out, partial, logsums,
    scale, softcap, table_stride, slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, PAGE: tl.constexpr, HEAD_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    JOIN: tl.constexpr, JOIN_GROUP: tl.constexpr, JOIN_PARTS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    CODES: tl.constexpr, LINES: tl.constexpr, VALUE_LINES: tl.constexpr, ON_GPU: tl.constexpr, EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    # The programs that have no work come last.
    kv_head, slot = tl.program_id(0), tl.program_id(1)
    sequence, part, parts, length, row = load_part(plan, slot, slots)
    if sequence < 0:
        # One program waits, so that this kernel does not end before the preceding one.
        if slot + kv_head == 0:
            wait_for_inputs(OVERLAP)
        return
    table = tables + row.to(tl.int64) * table_stride
    begin = 0
    if WINDOW > 0:
        oldest = oldest_key(length - 1, WINDOW, CHUNKED)
        begin = tl.maximum(oldest, 0) // TILE * TILE
    tiles = tl.cdiv(tl.cdiv(length - begin, TILE), parts)
    first = begin + part * tiles * TILE
    last = tl.minimum(first + tiles * TILE, length)
    VALUE_SIZE: tl.constexpr = VALUE_DIM // 2 if CODES else VALUE_DIM
    VALUES_APART: tl.constexpr = VALUE_SIZE if CODES else VALUE_STRIDE
    if OVERLAP and EARLY:
        # The preceding kernel writes the newest keys and values alone. All others have long been in the cache.
        is_early = slot * KV_HEADS + kv_head < _EARLY_PROGRAMS
        if is_early & (first < last):
            for early in tl.static_range(0, _EARLY_TILES):
                begin_at = first + early * KEYS
                _prefetch_rows(keys, table, kv_head, begin_at, last, PAGE, KV_HEADS, HEAD_STRIDE, DIM, LINES, KEYS)
                _prefetch_rows(
                    values, table, kv_head, begin_at, last, PAGE, KV_HEADS, VALUES_APART, VALUE_SIZE, VALUE_LINES, KEYS
                )
    wait_for_inputs(OVERLAP)

    member = tl.arange(0, BLOCK_GROUP)
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_DIM)
    whole = column < DIM
    q_at = (sequence.to(tl.int64) * HEADS + head[:, None]) * DIM + column[None, :]
    query = tl.load(q + q_at, mask=(member < GROUP)[:, None] & whole[None, :], other=0.0)
    value_column = tl.arange(0, BLOCK_VALUE)
    whole_value = value_column < VALUE_DIM
    if ALIBI > 0:
        slope = tl.load(alibi + head, mask=member < GROUP, other=0.0)
        alibi_scale = scale
    if CODES:
        query, scale = query_for_codes(query, scale * tl.load(scales + kv_head))
        value_scale = tl.load(scales + KV_HEADS + kv_head) / WEIGHT_SCALE

    peak = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    if SINKS:
        # The softmax of a sequence's first part begins with the sink, whose value is 0.
        sink = tl.load(sinks + head, mask=member < GROUP, other=0.0) * _LOG2E
        peak = tl.where(part == 0, sink, peak)
        total = tl.where(part == 0, 1.0, total)
    if CODES:
        # The sums of even and of odd columns.
        acc = tl.zeros([BLOCK_GROUP, BLOCK_VALUE // 2], tl.float32)
        odd_acc = tl.zeros([BLOCK_GROUP, BLOCK_VALUE // 2], tl.float32)
        pair = tl.arange(0, BLOCK_VALUE // 2)
    else:
        acc = tl.zeros([BLOCK_GROUP, BLOCK_VALUE], tl.float32)
    for tile in range(first, last, KEYS):
        key = tile + tl.arange(0, KEYS)
        # Cache slots that the query does not see may hold NaN, and 0 * NaN is NaN, so they are not loaded.
        seen = key < last
        if WINDOW > 0:
            seen = seen & (key >= oldest)
        if PAGE % KEYS == 0:
            page = tl.load(table + tile // PAGE).to(tl.int64)
        else:
            page = tl.load(table + key // PAGE, mask=seen, other=0).to(tl.int64)
        head_at = (page * PAGE + key % PAGE) * KV_HEADS + kv_head
        k = tl.load(
            keys + (head_at * HEAD_STRIDE)[None, :] + column[:, None], mask=seen[None, :] & whole[:, None], other=0.0
        )
        if CODES:
            k = k.to(query.dtype)
        scores = tl.dot(query, k, input_precision="ieee") * scale
        if SOFTCAP:
            # tanh through exp: softcap * (1 - 2 / (e^2x + 1)).
            scores = softcap * (1 - 2 / (tl.exp(scores * (2 / softcap)) + 1))
        if ALIBI == 2:
            scores += alibi_scale * rounded_alibi(slope[:, None], key[None, :])
        elif ALIBI == 1:
            scores -= slope[:, None] * (length - 1 - key)[None, :]
        scores = tl.where(seen[None, :], scores * _LOG2E, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A tile without a visible key leaves the peak at -inf, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        if CODES:
            pair_at = (head_at * (VALUE_DIM // 2))[:, None] + pair[None, :]
            pairs = tl.load(values + pair_at, mask=seen[:, None] & (pair < VALUE_DIM // 2)[None, :], other=0)
            even, odd = columns_of_pairs(pairs, query.dtype, ON_GPU)
            weights = (weights * WEIGHT_SCALE).to(even.dtype)
            acc = acc * shrink[:, None] + tl.dot(weights, even, input_precision="ieee")
            odd_acc = odd_acc * shrink[:, None] + tl.dot(weights, odd, input_precision="ieee")
        else:
            v_at = (head_at * VALUE_STRIDE)[:, None] + value_column[None, :]
            v = tl.load(values + v_at, mask=seen[:, None] & whole_value[None, :], other=0.0)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    if CODES:
        acc = tl.join(acc, odd_acc).reshape([BLOCK_GROUP, BLOCK_VALUE]) * value_scale
    real = (member < GROUP)[:, None] & whole_value[None, :]
    if parts == 1:
        out_at = (sequence.to(tl.int64) * HEADS + head[:, None]) * VALUE_DIM + value_column[None, :]
        tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
        return
    # A window may leave fewer tiles than the sequence has parts, so that a part has no key.
    safe = tl.where(total == 0.0, 1.0, total)
    to = slot.to(tl.int64) * HEADS + head
    tl.store(partial + to[:, None] * VALUE_DIM + value_column[None, :], acc / safe[:, None], mask=real)
    tl.store(logsums + to, tl.where(total == 0.0, float("-inf"), peak + tl.log2(safe)), mask=member < GROUP)
    if not JOIN:
        return
    # All threads of this program store before the counter rises. By acq_rel, the program that counts last sees the
    # results of all parts.
    tl.debug_barrier()
    arrival = arrivals + sequence * KV_HEADS + kv_head
    if tl.atomic_add(arrival, 1, sem="acq_rel") < parts - 1:
        return
    tl.store(arrival, 0)
    for first_head in tl.static_range(0, GROUP, JOIN_GROUP):
        joins = first_head + tl.arange(0, JOIN_GROUP)
        in_group = joins < GROUP
        top = tl.full([JOIN_GROUP], float("-inf"), tl.float32)
        weight_sum = tl.zeros([JOIN_GROUP], tl.float32)
        joined = tl.zeros([JOIN_GROUP, BLOCK_VALUE], tl.float32)
        for first_other in range(0, parts, JOIN_PARTS):
            other = first_other + tl.arange(0, JOIN_PARTS)
            # [JOIN_GROUP, JOIN_PARTS]
            where = (slot - part + other).to(tl.int64)[None, :] * HEADS + (kv_head * GROUP + joins)[:, None]
            there = in_group[:, None] & (other < parts)[None, :]
            logsum = tl.load(logsums + where, mask=there, other=float("-inf"), cache_modifier=".cg")
            new_top = tl.maximum(top, tl.max(logsum, axis=1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = tl.exp2(top - base)
            weight = tl.exp2(logsum - base[:, None])
            results = tl.load(
                partial + where[:, :, None] * VALUE_DIM + value_column[None, None, :],
                mask=there[:, :, None] & whole_value[None, None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            joined = joined * shrink[:, None] + tl.sum(results * weight[:, :, None], axis=1)
            weight_sum = weight_sum * shrink + tl.sum(weight, axis=1)
            top = new_top
        first_out = (sequence.to(tl.int64) * HEADS + kv_head * GROUP + joins)[:, None] * VALUE_DIM
        tl.store(
            out + first_out + value_column[None, :],
            (joined / weight_sum[:, None]).to(out.dtype.element_ty),
            mask=in_group[:, None] & whole_value[None, :],
        )


@triton.jit(do_not_specialize=["count"])
def _join_kernel(
    partial, logsums, spans, out, count,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    sequence, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK_DIM)
    first = tl.load(spans + sequence)
    parts = tl.load(spans + count + sequence)
    wait_for_inputs(OVERLAP)
    if parts <= 1:
        return
    top = float("-inf")
    total = 0.0
    joined = tl.zeros([BLOCK_DIM], tl.float32)
    for begin in range(0, parts, BLOCK_PARTS):
        part = begin + tl.arange(0, BLOCK_PARTS)
        at = (first + part).to(tl.int64) * HEADS + head
        logsum = tl.load(logsums + at, mask=part < parts, other=float("-inf"))
        results = tl.load(
            partial + at[:, None] * DIM + column[None, :],
            mask=(part < parts)[:, None] & (column < DIM)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(logsum, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(logsum - base)
        joined = joined * shrink + tl.sum(results * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        top = new_top
    to = (sequence.to(tl.int64) * HEADS + head) * DIM + column
    tl.store(out + to, (joined / total).to(out.dtype.element_ty), mask=column < DIM)


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    variant: AttentionVariant,
    parts: DecodeParts,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    early: bool = True,
    keys_at_once: int = 0,
    num_warps: int = 0,
    num_stages: int = 0,
) -> torch.Tensor:
    """Compute paged_attention_reference with one query per sequence.

    q: [S, heads, head_dim]; q and scales are contiguous. keys, values: contiguous, except that there may be gaps
    between heads. tables: [rows, most blocks] int32. parts: the parts of the sequences, with the length of each
    sequence and its row of tables. out: [S, heads, dim of values], contiguous, receives the results of sequences with
    tokens; None = a new tensor. A kernel that overlaps with none must follow those that write tables and parts,
    before this is called (overlap.py). early: False = this need not hold for the tables, so no keys are fetched before
    the preceding kernel has ended. keys_at_once: the keys of a tile, a power of two. 0 = chosen here, as are the
    arguments after it.
    """
    sequences, heads, dim = q.shape
    (page, kv_heads), value_dim = keys.shape[1:3], values.shape[3]
    group = heads // kv_heads
    if out is None:
        out = q.new_empty(sequences, heads, value_dim)
    slots = parts.plan.shape[1]
    partial = q.new_empty((slots, heads, value_dim), dtype=torch.float32)
    logsums = q.new_empty((slots, heads), dtype=torch.float32)
    block_dim, block_value = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    widest = max(block_dim, block_value)
    join_group = min(triton.next_power_of_2(group), 8)
    short = _TILE if scales is None else _CODES_TILE
    chosen = short if widest <= 128 else _TALL_TILE if widest <= 256 else _TALLEST_TILE
    separate_join = sequences <= SEPARATE_JOIN_SEQUENCES
    value_stride = values.stride(1) // kv_heads
    if scales is not None:
        values = values.view(torch.int16)
    _decode_kernel[(kv_heads, slots)](
        q, keys, values, tables, parts.plan, parts.arrivals, q if variant.alibi is None else variant.alibi,
        q if variant.sinks is None else variant.sinks, q if scales is None else scales, out, partial, logsums,
        variant.scale, variant.softcap, tables.stride(0), slots,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_DIM=block_dim, VALUE_DIM=value_dim, BLOCK_VALUE=block_value,
        PAGE=page, HEAD_STRIDE=keys.stride(1) // kv_heads, VALUE_STRIDE=value_stride,
        GROUP=group, BLOCK_GROUP=max(16, triton.next_power_of_2(group)), TILE=TILE_KEYS, KEYS=keys_at_once or chosen[0],
        JOIN=not separate_join, JOIN_GROUP=join_group, JOIN_PARTS=max(_JOIN_VALUES // (join_group * block_value), 2),
        WINDOW=variant.window, CHUNKED=variant.chunked, SOFTCAP=variant.softcap > 0, ALIBI=variant.alibi_form,
        SINKS=variant.sinks is not None, CODES=scales is not None,
        LINES=_lines(dim, keys), VALUE_LINES=_lines(value_dim, keys), ON_GPU=q.is_cuda, EARLY=early,
        num_warps=num_warps or chosen[1], num_stages=num_stages or chosen[2], **overlap_options(q.device),
    )  # fmt: skip
    if separate_join:
        _join_kernel[(sequences, heads)](
            partial, logsums, parts.spans, out, sequences, HEADS=heads, DIM=value_dim, BLOCK_DIM=block_value,
            BLOCK_PARTS=_PARTS_AT_ONCE, num_warps=1, **overlap_options(q.device),
        )  # fmt: skip
    return out


def _lines(size: int, planes: torch.Tensor) -> int:
    """Return the cache lines of a row of so many elements, as a power of two."""
    lines: int = triton.next_power_of_2(triton.cdiv(size * planes.element_size(), LINE.value))
    return lines
