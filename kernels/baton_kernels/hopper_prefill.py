"""The attention of prefill_attention.py for 16 bits on Hopper, warp-specialized.

FlashAttention-3 (Shah et al., 2024) over block tables. One warp issues TMA loads of keys and values, block by block.
Two warp groups have 64 queries each. While the tensor cores compute the scores of one tile and add up the values of the
tile before it, the group computes softmax weights. The two groups take turns at the tensor cores. Tiles are computed
from the newest keys to the oldest, so that those with a mask come first. There is one program for each multiprocessor,
which computes several tiles of queries one after another: keys for the next one are fetched while the results of the
last one are written.
"""

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .reference.paged_attention import AttentionVariant

_LOG2E = gl.constexpr(1.4426950408889634)
BLOCK_QUERIES = 128  # of a program
_GROUP_QUERIES = gl.constexpr(64)  # of a group of warps
_STAGES = gl.constexpr(2)  # tiles of keys, and of values, that are fetched ahead


@gluon.jit
def _row_of(key, table, end, oldest, cache_rows, PAGE: gl.constexpr):
    """Return the row of the cache at which the block of a key begins.

    Blocks that no query sees may hold anything, and the table need not have them. For these the row is beyond the
    cache, so that TMA fills the tile with zeros.
    """
    seen = (key < end) & (key + PAGE > oldest)
    return gl.where(seen, gl.load(table + key // PAGE, mask=seen, other=0) * PAGE, cache_rows)


@gluon.jit
def _fetch_tile(cache, tiles, full, empty, at, first_row, last_row, column, PAGE: gl.constexpr):
    """Fetch a tile of one or two blocks once both groups have released the tile before it in the same memory."""
    stage = at % _STAGES
    tile, barrier = tiles.index(stage), full.index(stage)
    size: gl.constexpr = tile.shape[0]
    mbarrier.wait(empty.index(stage), (at // _STAGES & 1) ^ 1)
    mbarrier.expect(barrier, size // PAGE * cache.block_type.nbytes)
    tma.async_copy_global_to_shared(cache, [first_row, column], barrier, tile.slice(0, PAGE, 0))
    if size > PAGE:
        tma.async_copy_global_to_shared(cache, [last_row, column], barrier, tile.slice(PAGE, PAGE, 0))


@gluon.jit
def _rounds(items):
    """Return how many tiles of queries this program computes. items: the tiles of all programs."""
    programs = gl.num_programs(0)
    full = items // programs
    return full + (_item(full) < items).to(gl.int32)


@gluon.jit
def _item(round):
    """Return the tile that this program computes in a round. Tiles become shorter, so every other round goes backwards;
    otherwise the first programs would have more work than the last ones."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    return round * programs + gl.where(round % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _oldest_key(position, WINDOW: gl.constexpr, CHUNKED: gl.constexpr):
    """Compute oldest_key of windows.py."""
    return position // WINDOW * WINDOW if CHUNKED else position - WINDOW + 1


@gluon.jit
def _facts(item, where, HEADS: gl.constexpr, BLOCK_KEYS: gl.constexpr, WINDOW: gl.constexpr, CHUNKED: gl.constexpr):
    """Return the facts of a tile of queries: its head, sequence and first row, the sequence's last row and length, the
    keys [begin, end) to fetch, of which [inner, middle) need no mask, and the oldest key that a query sees."""
    tile_sequences, tile_starts, starts, lengths, tiles = where
    tile = tiles - 1 - item // HEADS
    sequence = gl.load(tile_sequences + tile)
    first_row = gl.load(tile_starts + tile)
    end_row = gl.load(starts + sequence + 1)
    length = gl.load(lengths + sequence)
    # The queries are the sequence's last tokens.
    lowest = length - end_row + first_row
    end = gl.minimum(lowest + 2 * _GROUP_QUERIES, length)
    middle = (lowest + 1) // BLOCK_KEYS * BLOCK_KEYS
    begin, inner, oldest = 0, 0, 0
    if WINDOW > 0:
        oldest = gl.maximum(_oldest_key(lowest, WINDOW, CHUNKED), 0)
        begin = oldest // BLOCK_KEYS * BLOCK_KEYS
        last_begin = gl.maximum(_oldest_key(end - 1, WINDOW, CHUNKED) + BLOCK_KEYS - 1, 0)
        inner = gl.minimum(last_begin // BLOCK_KEYS * BLOCK_KEYS, middle)
        inner = gl.maximum(inner, begin)
    return item % HEADS, sequence, first_row, end_row, length, begin, middle, inner, end, oldest


@gluon.jit
def _fetch(
    keys, values, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, tables, table_stride, cache_rows, where,
    sizes: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Fetch the keys and values for all tiles of queries of this program, the newest keys of each tile first."""
    HEADS: gl.constexpr = sizes[0]
    DIM: gl.constexpr = sizes[1]
    BLOCK_KEYS: gl.constexpr = sizes[3]
    WINDOW: gl.constexpr = sizes[4]
    GROUP: gl.constexpr = sizes[7]
    CHUNKED: gl.constexpr = sizes[8]
    fetched = 0
    for round in range(_rounds(where[4] * HEADS)):
        head, sequence, first_row, end_row, _, begin, _, _, end, oldest = _facts(
            _item(round), where, HEADS, BLOCK_KEYS, WINDOW, CHUNKED
        )
        table, column = tables + sequence.to(gl.int64) * table_stride, head // GROUP * DIM
        # An unused tile of a CUDA graph has no queries.
        count = gl.where(first_row < end_row, gl.cdiv(end - begin, BLOCK_KEYS), 0)
        for at in range(count):
            # The table is read before the wait for memory, which hides how long that takes.
            first = begin + (count - 1 - at) * BLOCK_KEYS
            first_row = _row_of(first, table, end, oldest, cache_rows, PAGE)
            last_row = _row_of(first + BLOCK_KEYS - PAGE, table, end, oldest, cache_rows, PAGE)
            _fetch_tile(keys, k_tiles, k_full, k_empty, fetched + at, first_row, last_row, column, PAGE)
            _fetch_tile(values, v_tiles, v_full, v_empty, fetched + at, first_row, last_row, column, PAGE)
        fetched += count


@gluon.jit
def _weights_of(
    scores, peak, total, position, first, end, scale, softcap,
    LAYOUT: gl.constexpr, BLOCK_KEYS: gl.constexpr, WINDOW: gl.constexpr, CHUNKED: gl.constexpr, SOFTCAP: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Return the weights of a tile whose first key is `first`, the new peak and total, and the old weights' factor."""
    factor = scale * _LOG2E
    if SOFTCAP:
        # tanh through a power of two.
        scores = 1 - 2 / (gl.exp2(scores * (2 * factor / softcap)) + 1)
        factor = softcap * _LOG2E
    if MASKED:
        key = first + gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, LAYOUT))
        age = position[:, None] - key[None, :]
        seen = (age >= 0) & (key < end)[None, :]
        if CHUNKED:
            seen = seen & (age < (position % WINDOW + 1)[:, None])
        elif WINDOW > 0:
            seen = seen & (age < WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, axis=1) * factor)
    # A tile without a visible key leaves the peak at -inf, and -inf - -inf is NaN.
    base = gl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    shrink = gl.exp2(peak - base)
    weights = gl.exp2(scores * factor - base[:, None])
    return weights, new_peak, total * shrink + gl.sum(weights, axis=1), shrink


@gluon.jit
def _clean(tile, first, oldest, end, BLOCK_KEYS: gl.constexpr, BLOCK_DIM: gl.constexpr):
    """Replace the values of keys that no query sees by 0: they may be NaN, and 0 * NaN is NaN.

    Both groups do so independently, with the same result, so neither waits for the other.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = first + gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, layout))
    tile.store(gl.where(((key >= oldest) & (key < end))[:, None], tile.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _attend_tiles(
    acc, peak, total, weights, first_at, end_at, begin, count, before, turns, position, end, scale, softcap,
    q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, my_turn, other_turn,
    LAYOUT: gl.constexpr, BLOCK_KEYS: gl.constexpr,
    WINDOW: gl.constexpr, CHUNKED: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Compute the weights of tiles [first_at, end_at), in the order in which they are fetched, and add up the values of
    the tile before each.

    weights: those of tile first_at - 1, as an operand of a product. before, turns: how many tiles the program has
    fetched, and how many turns the group has had, for earlier queries. Returns acc, peak, total and the weights of the
    last tile.
    """
    for at in range(first_at, end_at):
        now = before + at
        stage, last = now % _STAGES, (now - 1) % _STAGES
        mbarrier.wait(k_full.index(stage), now // _STAGES & 1)
        mbarrier.wait(my_turn, (turns + at - 1) & 1)
        none = gl.zeros([_GROUP_QUERIES, BLOCK_KEYS], gl.float32, LAYOUT)
        scores = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(last), (now - 1) // _STAGES & 1)
        acc = warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)
        mbarrier.arrive(other_turn, count=1)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        new_weights, peak, total, shrink = _weights_of(
            scores, peak, total, position, begin + (count - 1 - at) * BLOCK_KEYS, end, scale, softcap,
            LAYOUT, BLOCK_KEYS, WINDOW, CHUNKED, SOFTCAP, MASKED,
        )  # fmt: skip
        new_weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
        # Without this wait for the next keys, the assembler moves the wait for the products before all of the weights,
        # which would then not be computed while the products run.
        following = now + 1
        mbarrier.wait(k_full.index(following % _STAGES), following // _STAGES & 1, pred=at + 1 < count)
        acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=[acc, weights])
        mbarrier.arrive(v_empty.index(last), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = new_weights
    return acc, peak, total, weights


@gluon.jit
def _attend(first, q_tile, my_turn, other_turn, shared, where, sizes: gl.constexpr):
    """Compute the queries of one group of warps in all tiles of queries of this program. first: the group's first row
    in each of them."""
    (q, out, sinks, scale, softcap, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty) = shared
    HEADS: gl.constexpr = sizes[0]
    DIM: gl.constexpr = sizes[1]
    BLOCK_DIM: gl.constexpr = sizes[2]
    BLOCK_KEYS: gl.constexpr = sizes[3]
    WINDOW: gl.constexpr = sizes[4]
    SOFTCAP: gl.constexpr = sizes[5]
    SINKS: gl.constexpr = sizes[6]
    CHUNKED: gl.constexpr = sizes[8]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    column = gl.arange(0, BLOCK_DIM, layout=gl.SliceLayout(0, loaded))
    before, turns = 0, 0
    for round in range(_rounds(where[4] * HEADS)):
        head, _sequence, first_row, end_row, length, begin, middle, inner, end, oldest = _facts(
            _item(round), where, HEADS, BLOCK_KEYS, WINDOW, CHUNKED
        )
        if first_row < end_row:
            first_row += first
            row = first_row + gl.arange(0, _GROUP_QUERIES, layout=gl.SliceLayout(1, loaded))
            at_q = (row.to(gl.int64)[:, None] * HEADS + head) * DIM + column[None, :]
            inside = (row < end_row)[:, None] & (column < DIM)[None, :]
            q_tile.store(gl.load(q + at_q, mask=inside, other=0.0))
            fence_async_shared()

            position = length - end_row + first_row + gl.arange(0, _GROUP_QUERIES, layout=rows)
            peak = gl.full([_GROUP_QUERIES], float("-inf"), gl.float32, rows)
            total = gl.zeros([_GROUP_QUERIES], gl.float32, rows)
            if SINKS:
                # The softmax begins with the sink, whose value is 0.
                peak = gl.zeros([_GROUP_QUERIES], gl.float32, rows) + gl.load(sinks + head) * _LOG2E
                total += 1.0
            count = gl.cdiv(end - begin, BLOCK_KEYS)
            stage, phase = before % _STAGES, before // _STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            none = gl.zeros([_GROUP_QUERIES, BLOCK_KEYS], gl.float32, scores_layout)
            scores = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            newest = begin + (count - 1) * BLOCK_KEYS
            weights, peak, total, _factor = _weights_of(
                scores, peak, total, position, newest, end, scale, softcap,
                scores_layout, BLOCK_KEYS, WINDOW, CHUNKED, SOFTCAP, True,
            )  # fmt: skip
            mbarrier.wait(v_full.index(stage), phase)
            _clean(v_tiles.index(stage), newest, oldest, end, BLOCK_KEYS, BLOCK_DIM)
            acc = gl.zeros([_GROUP_QUERIES, BLOCK_DIM], gl.float32, acc_layout)
            weights = gl.convert_layout(weights.to(q.dtype.element_ty), operand)
            # Tiles in the order in which they are fetched: some with a mask, those without, and, with a window, more
            # with one.
            unmasked = gl.maximum(count - gl.cdiv(gl.maximum(middle - begin, 0), BLOCK_KEYS), 1)
            masked = count
            if WINDOW > 0:
                masked = gl.maximum(count - (inner - begin) // BLOCK_KEYS, unmasked)
            acc, peak, total, weights = _attend_tiles(
                acc, peak, total, weights, 1, gl.minimum(unmasked, count), begin, count, before, turns, position, end,
                scale, softcap, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, my_turn, other_turn,
                scores_layout, BLOCK_KEYS, WINDOW, CHUNKED, SOFTCAP, True,
            )  # fmt: skip
            acc, peak, total, weights = _attend_tiles(
                acc, peak, total, weights, unmasked, gl.minimum(masked, count), begin, count, before, turns, position,
                end, scale, softcap, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, my_turn, other_turn,
                scores_layout, BLOCK_KEYS, WINDOW, CHUNKED, SOFTCAP, False,
            )  # fmt: skip
            if WINDOW > 0:
                acc, peak, total, weights = _attend_tiles(
                    acc, peak, total, weights, masked, count, begin, count, before, turns, position, end, scale,
                    softcap, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, my_turn, other_turn,
                    scores_layout, BLOCK_KEYS, WINDOW, CHUNKED, SOFTCAP, True,
                )  # fmt: skip
            turns += count - 1
            before += count
            last, phase = (before - 1) % _STAGES, (before - 1) // _STAGES & 1
            mbarrier.wait(v_full.index(last), phase)
            if WINDOW > 0:
                _clean(v_tiles.index(last), begin, oldest, end, BLOCK_KEYS, BLOCK_DIM)
            acc = warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)
            acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=[acc, weights])
            mbarrier.arrive(v_empty.index(last), count=1)
            total = gl.convert_layout(total, gl.SliceLayout(1, acc_layout))
            total = gl.where(total == 0.0, 1.0, total)
            # Results go through the shared memory of the queries, so that each thread writes consecutive elements.
            q_tile.store((acc / total[:, None]).to(out.dtype.element_ty))
            gl.store(out + at_q, q_tile.load(loaded), mask=inside)


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@gluon.jit(do_not_specialize=["table_stride", "cache_rows", "tiles"])
def _hopper_prefill_kernel(
    q, keys, values, tables, lengths, starts, tile_sequences, tile_starts, sinks, out,
    scale, softcap, table_stride, cache_rows, tiles,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_KEYS: gl.constexpr, WINDOW: gl.constexpr, CHUNKED: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    q_tiles = gl.allocate_shared_memory(keys.dtype, [2, _GROUP_QUERIES, BLOCK_DIM], keys.layout)
    k_tiles = gl.allocate_shared_memory(keys.dtype, [_STAGES, BLOCK_KEYS, BLOCK_DIM], keys.layout)
    v_tiles = gl.allocate_shared_memory(keys.dtype, [_STAGES, BLOCK_KEYS, BLOCK_DIM], keys.layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barriers)
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barriers)
    v_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barriers)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    # The first group has the first turn.
    mbarrier.arrive(turns.index(0), count=1)
    fence_async_shared()
    where = (tile_sequences, tile_starts, starts, lengths, tiles)
    shared = (q, out, sinks, scale, softcap, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty)
    sizes: gl.constexpr = (HEADS, DIM, BLOCK_DIM, BLOCK_KEYS, WINDOW, SOFTCAP, SINKS, HEADS // KV_HEADS, CHUNKED)
    gl.warp_specialize(
        [
            (_attend, (0, q_tiles.index(0), turns.index(0), turns.index(1), shared, where, sizes)),
            (_attend, (_GROUP_QUERIES, q_tiles.index(1), turns.index(1), turns.index(0), shared, where, sizes)),
            (
                _fetch,
                (
                    keys, values, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, tables, table_stride, cache_rows,
                    where, sizes, PAGE,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def hopper_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor],
    variant: AttentionVariant,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute prefill_attention for numbers of 16 bits, without ALiBi, in blocks of 64 tokens, on a Hopper GPU.

    All but tiles, which have BLOCK_QUERIES queries, as in prefill_attention.
    """
    heads, dim = q.shape[1:]
    page, kv_heads = keys.shape[1:3]
    block_dim = triton.next_power_of_2(dim)
    if out is None:
        out = torch.empty_like(q)
    block = [page, block_dim]
    kind = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    rows, width = keys.shape[0] * page, kv_heads * dim
    caches = [TensorDescriptor(cache, [rows, width], [width, 1], block, layout) for cache in (keys, values)]
    # A program fills a multiprocessor, and fetches keys for its next queries while it computes the current ones.
    programs = min(heads * len(tiles[0]), _multiprocessors(q.device))
    _hopper_prefill_kernel[(programs,)](
        q, *caches, tables, lengths, starts, *tiles, q if variant.sinks is None else variant.sinks, out,
        variant.scale, variant.softcap, tables.stride(0), rows, len(tiles[0]),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_DIM=block_dim, PAGE=page,
        BLOCK_KEYS=64 if block_dim > 128 else 128, WINDOW=variant.window, CHUNKED=variant.chunked,
        SOFTCAP=variant.softcap > 0, SINKS=variant.sinks is not None, num_warps=4,
    )  # fmt: skip
    return out


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
