"""Expanded latent attention of chunks of new tokens (reference/latent.py).

The latents of a sequence are gathered from its blocks, a matrix product expands them to the keys and values of some
heads, and the kernel here attends over these: FlashAttention (Dao, 2023) with keys in two parts. All heads share the
rotated part, so it is never copied. Where the sizes allow it, TMA loads the tiles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .latent_rows import row_stride
from .overlap import let_next_start, overlap_options, wait_for_inputs

GATHER_TOKENS = 16
_KEYS = 64
_LOG2E = tl.constexpr(1.4426950408889634)


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["table_stride"])
def _gather_kernel(
    latents, tables, lengths, tile_sequences, tile_firsts, tile_rows, out, table_stride, row_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    tile = tl.program_id(0)
    token, column = tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    sequence, first = tl.load(tile_sequences + tile), tl.load(tile_firsts + tile)
    row = tl.load(tile_rows + tile).to(tl.int64) + token
    position = first + token
    known = position < tl.load(lengths + sequence)
    page = tl.load(tables + sequence.to(tl.int64) * table_stride + position // PAGE, mask=known, other=0).to(tl.int64)
    inside = known[:, None] & (column < WIDTH)[None, :]
    values = tl.load(
        latents + ((page * PAGE + position % PAGE) * row_stride)[:, None] + column[None, :], mask=inside, other=0.0
    )
    tl.store(out + row[:, None] * WIDTH + column[None, :], values, mask=inside)


class GatherTiles(NamedTuple):
    """Tiles of GATHER_TOKENS tokens: their sequence, the position of the first token, and its row in the result."""

    sequences: list[int]
    firsts: list[int]
    rows: list[int]


def gather_tiles(
    sequences: list[int], lengths: list[int], oldest: list[int] | None = None
) -> tuple[GatherTiles, list[int], int]:
    """Return the tiles of some sequences, the row that each sequence's first token has or would have, and how many rows
    there are.

    oldest: of each sequence, the first token that is gathered; None = all are. It has a row whose number within the
    sequence's rows is that of its place in a tile of keys, so that tiles of keys begin at multiples of their size.
    """
    tiles, starts, rows = GatherTiles([], [], []), list[int](), 0
    for sequence in sequences:
        begin = 0 if oldest is None else oldest[sequence]
        start = rows - begin // _KEYS * _KEYS
        firsts = range(begin, lengths[sequence], GATHER_TOKENS)
        tiles.sequences.extend([sequence] * len(firsts))
        tiles.firsts.extend(firsts)
        tiles.rows.extend(start + first for first in firsts)
        starts.append(start)
        rows = start + lengths[sequence]
    return tiles, starts, rows


def gather_latents(
    latents: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    keys: int,
) -> torch.Tensor:
    """Compute gather_latents_reference. tiles: of `gather_tiles`, int32 on the device. keys: rows of the result. Those
    of tokens that are not gathered are undefined.

    latents: with contiguous rows. tables: [S, most blocks], lengths: [S], int32.
    """
    width = latents.shape[3]
    out = latents.new_empty(keys, width)
    _gather_kernel[(len(tiles[0]),)](
        latents, tables, lengths, *tiles, out, tables.stride(0), row_stride(latents),
        WIDTH=width, BLOCK=triton.next_power_of_2(width), PAGE=latents.shape[1], TOKENS=GATHER_TOKENS,
        num_warps=4, **overlap_options(latents.device),
    )  # fmt: skip
    return out


@triton.jit
def _attend(
    acc, peak, total, query, rope_query, position, oldest, begin, end, keys, values, ropes, first_row, head, row_width,
    scale,
    KEY: tl.constexpr, BLOCK_KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries over keys [begin, end). Without MASKED, every query must see all of these keys.

    oldest: the first key that any of the queries sees, with WINDOW only.
    first_row: the row of the sequence's first key. row_width: elements of a row of keys and values. WHOLE: keys, values
    and ropes are descriptors of tiles, otherwise pointers.
    """
    column, value_column, rest = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE), tl.arange(0, BLOCK_ROPE)
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        # What lies behind the last key is another sequence's or undefined. Its values are replaced by 0, as 0 * NaN is
        # NaN.
        known = key < end
        if WINDOW > 0:
            known = known & (key >= oldest)
        if WHOLE:
            row = first_row + first
            k = tl.trans(keys.load([row, head * (KEY + VALUE)]))
            if ROPE > 0:
                k_rope = tl.trans(ropes.load([row, RANK]))
        else:
            at = (first_row + key).to(tl.int64)
            there = keys + at * row_width + head * (KEY + VALUE)
            k = tl.load(there[None, :] + column[:, None], mask=known[None, :] & (column < KEY)[:, None], other=0.0)
            if ROPE > 0:
                rope_at = ropes + at * (RANK + ROPE) + RANK
                k_rope = tl.load(
                    rope_at[None, :] + rest[:, None], mask=known[None, :] & (rest < ROPE)[:, None], other=0.0
                )  # fmt: skip
        scores = tl.dot(query, k, input_precision="ieee")
        if ROPE > 0:
            scores = tl.dot(rope_query, k_rope, scores, input_precision="ieee")
        scores *= scale * _LOG2E
        if MASKED:
            seen = (position[:, None] >= key[None, :]) & known[None, :]
            if WINDOW > 0:
                seen = seen & (position[:, None] - key[None, :] < WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A tile without a visible key leaves the peak at -inf, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if WINDOW > 0 else new_peak
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        if WHOLE:
            v = values.load([row, head * (KEY + VALUE) + KEY])
            if MASKED:
                v = tl.where(known[:, None], v, 0.0)
        else:
            v_at = there[:, None] + KEY + value_column[None, :]
            v = tl.load(v_at, mask=known[:, None] & (value_column < VALUE)[None, :], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=["first_head", "row_width"])
def _latent_prefill_kernel(
    q, keys, values, ropes, lengths, starts, key_starts, tile_sequences, tile_starts, sinks, out, scale, first_head,
    row_width,
    HEADS: tl.constexpr, KEY: tl.constexpr, BLOCK_KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr, SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = tl.load(tile_sequences + tile)
    first_query = tl.load(tile_starts + tile)
    end_query = tl.load(starts + sequence + 1)
    length = tl.load(lengths + sequence)
    first_row = tl.load(key_starts + sequence)
    row = first_query + tl.arange(0, QUERIES)
    real = (row < end_query)[:, None]
    # The queries are the sequence's last tokens.
    position = length - end_query + row
    column, value_column, rest = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE), tl.arange(0, BLOCK_ROPE)
    vector = row.to(tl.int64)[:, None] * HEADS + first_head + head
    q_at = q + vector * (KEY + ROPE)
    query = tl.load(q_at + column[None, :], mask=real & (column < KEY)[None, :], other=0.0)
    rope_query = tl.load(q_at + KEY + rest[None, :], mask=real & (rest < ROPE)[None, :], other=0.0)

    lowest = length - end_query + first_query
    highest = tl.minimum(lowest + QUERIES, length)
    middle = (lowest + 1) // KEYS * KEYS
    oldest, begin = 0, 0
    if WINDOW > 0:
        oldest = tl.maximum(lowest - WINDOW + 1, 0)
        begin = oldest // KEYS * KEYS
    if SINKS:
        # The softmax begins with the sink, whose value is 0.
        peak = tl.zeros([QUERIES], tl.float32) + tl.load(sinks + first_head + head) * _LOG2E
        total = tl.full([QUERIES], 1.0, tl.float32)
    else:
        peak = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, BLOCK_VALUE], tl.float32)
    acc, peak, total = _attend(
        acc, peak, total, query, rope_query, position, oldest, begin, middle, keys, values, ropes, first_row, head,
        row_width, scale, KEY, BLOCK_KEY, VALUE, BLOCK_VALUE, RANK, ROPE, BLOCK_ROPE, KEYS, WINDOW, WHOLE, WINDOW > 0,
    )  # fmt: skip
    acc, peak, total = _attend(
        acc, peak, total, query, rope_query, position, oldest, middle, highest, keys, values, ropes, first_row, head,
        row_width, scale, KEY, BLOCK_KEY, VALUE, BLOCK_VALUE, RANK, ROPE, BLOCK_ROPE, KEYS, WINDOW, WHOLE, True,
    )  # fmt: skip
    to = out + vector * VALUE + value_column[None, :]
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(to, result, mask=real & (value_column < VALUE)[None, :])


def queries_per_tile(element_size: int) -> int:
    """Return the block_queries that is fastest for many queries; element_size is in bytes."""
    # In float32 the tiles of more queries do not fit into shared memory.
    return 128 if element_size == 2 else 64


def latent_prefill(
    q: torch.Tensor,
    expanded: torch.Tensor,
    latents: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    rank: int,
    first_head: int,
    out: torch.Tensor,
    block_queries: int,
    sinks: torch.Tensor | None = None,
    window: int = 0,
    num_warps: int = 8,
    num_stages: int = 2,
) -> torch.Tensor:
    """Compute latent_prefill_reference for some heads of the sequences that have tiles. Other rows are not written.

    q: [T, all heads, key_dim + rope_dim]. out: [T, all heads, value_dim]. expanded: [keys, heads, key_dim + value_dim]
    of the heads from first_head on. latents: [keys, rank + rope_dim]. lengths, starts and key_starts: [sequences],
    tokens of each sequence, its first query and the row of its first key; starts has one more. tiles: of
    prefill_attention.prefill_tiles for the same block_queries, on the device. sinks, window: as AttentionVariant has
    them. All are contiguous, indices int32. With a window, rows of tokens that no query sees may be undefined.
    """
    heads, value = expanded.shape[1], out.shape[2]
    key, rope = expanded.shape[2] - value, latents.shape[1] - rank
    blocks = [max(triton.next_power_of_2(size), 16) for size in (key, value, rope)]
    row_width = heads * (key + value)
    small = q.element_size() == 2
    whole = small and blocks == [key, value, rope or blocks[2]] and rank % 8 == 0
    keys: torch.Tensor | TensorDescriptor = expanded
    values, ropes = keys, latents
    block_keys = _KEYS if small else _KEYS // 2
    if whole:
        shape, strides = [len(expanded), row_width], [row_width, 1]
        keys, values = (TensorDescriptor(expanded, shape, strides, [block_keys, size]) for size in (key, value))
        if rope:
            ropes = TensorDescriptor(latents, list(latents.shape), [latents.shape[1], 1], [block_keys, rope])
    _latent_prefill_kernel[(heads, len(tiles[0]))](
        q, keys, values, ropes, lengths, starts, key_starts, *tiles, q if sinks is None else sinks, out, scale,
        first_head, row_width,
        HEADS=q.shape[1], KEY=key, BLOCK_KEY=blocks[0], VALUE=value, BLOCK_VALUE=blocks[1],
        RANK=rank, ROPE=rope, BLOCK_ROPE=blocks[2], QUERIES=block_queries, KEYS=block_keys,
        WINDOW=window, WHOLE=whole, SINKS=sinks is not None, num_warps=num_warps, num_stages=num_stages if small else 1,
        **overlap_options(q.device),
    )  # fmt: skip
    return out
