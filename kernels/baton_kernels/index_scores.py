"""The scores of an indexer over the paged cache, and the selection of tokens by them (reference/indexed.py).

Sequences are cut into parts (decode_parts.py). A program scores the keys of one part for a few consecutive queries of a
sequence, which form a group. The length of a group counts the tokens up to its last query. Another kernel finds each
query's lowest selected score by bisection (thresholds.py) and lists the selected tokens in the order of their
positions.
"""

import torch
import triton
import triton.language as tl

from .decode_parts import TILE_KEYS, DecodeParts, load_part
from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.indexed import LARGEST_SCORE
from .thresholds import float_key, float_value, highest_with

_KEYS = 64  # of a tile, a divisor of TILE_KEYS
# Scores of a tile in the kernel that selects: while it searches for the lowest selected one, and while it lists tokens.
_BLOCK, _LISTED_BLOCK = 4096, 1024
_PIVOTS = 4  # thresholds that are tried in a pass over the scores
_LARGEST = tl.constexpr(LARGEST_SCORE)


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["table_stride", "slots", "width"])
def _index_scores_kernel(
    q, weights, index_keys, tables, plan, firsts, scores, table_stride, slots, width,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TOKENS: tl.constexpr,
    ROW: tl.constexpr, RATE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROW: elements from one row of keys to the next. RATE: each key is that of so many tokens, and in the row of the
    last one."""
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
    tiles = tl.cdiv(tl.cdiv(length, TILE), parts)
    begin = part * tiles * TILE
    end = tl.minimum(begin + tiles * TILE, length)
    head, column = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
    inside = (head < HEADS)[:, None] & (column < DIM)[None, :]
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        known = key < end
        position = key * RATE + (RATE - 1)
        page = tl.load(table + position // PAGE, mask=known, other=0).to(tl.int64)
        at = index_keys + ((page * PAGE + position % PAGE) * ROW)[None, :]
        keys = tl.load(at + column[:, None], mask=known[None, :] & (column < DIM)[:, None], other=0.0)
        for token in range(0, count):
            row = (query + token).to(tl.int64)
            queries = tl.load(q + (row * HEADS + head)[:, None] * DIM + column[None, :], mask=inside, other=0.0)
            weight = tl.load(weights + row * HEADS + head, mask=head < HEADS, other=0.0)
            products = tl.dot(queries, keys, input_precision="ieee")
            total = tl.sum(tl.where(products > 0.0, products, 0.0) * weight[:, None], axis=0)
            # Every score is a number within the bounds, and zero has one sign, so that scores have an order.
            total = tl.where(total != total, _LARGEST, total)
            total = tl.minimum(tl.maximum(total, -_LARGEST), _LARGEST)
            total = tl.where(total == 0.0, 0.0, total)
            # Where several queries see the same keys, some see fewer than have scores.
            seen = tl.minimum(end, length - count + 1 + token) if RATE == 1 else end
            tl.store(scores + row * width + key, total, mask=key < seen)


@triton.jit(do_not_specialize=["table_stride", "width"])
def _select_kernel(
    scores, lengths, rows, tables, out, table_stride, width,
    MOST: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr, LISTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """HEADS: the rows of scores of a query. SIZE: the tokens that have one score. PAGE: 0 = list the numbers of what is
    selected, and not slots; `rows` and `tables` are then not read."""
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    query = row // HEADS
    wait_for_inputs(OVERLAP)
    length = tl.cdiv(tl.load(lengths + query), SIZE)
    if PAGE > 0:
        table = tables + tl.load(rows + query).to(tl.int64) * table_stride
    to, line = out + row * MOST, scores + row * width
    lane = tl.arange(0, LISTED)
    least = float("-inf")
    room = 0
    if length > MOST:
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        bottoms = tl.full([BLOCK], float("inf"), tl.float32)
        for first in range(0, length, BLOCK):
            key = first + tl.arange(0, BLOCK)
            tops = tl.maximum(tops, tl.load(line + key, mask=key < length, other=float("-inf")))
            bottoms = tl.minimum(bottoms, tl.load(line + key, mask=key < length, other=float("inf")))
        low = float_key(tl.min(bottoms, axis=0), 0)
        high = float_key(tl.max(tops, axis=0), 0) + 1
        low = highest_with(MOST + 0.0, low, high, line, length, 0.0, 0.0, False, 0, PIVOTS, BLOCK)
        least = float_value(low, 0)
        above = tl.zeros([LISTED], tl.int32)
        for first in range(0, length, LISTED):
            score = tl.load(line + first + lane, mask=first + lane < length, other=float("-inf"))
            above += (score > least).to(tl.int32)
        room = MOST - tl.sum(above, axis=0)
    listed = 0
    equals = 0
    for first in range(0, length, LISTED):
        key = first + lane
        chosen = key < length
        if length > MOST:
            score = tl.load(line + key, mask=chosen, other=float("-inf"))
            equal = (score == least).to(tl.int32)
            chosen = (score > least) | ((equal > 0) & (equals + tl.cumsum(equal, axis=0) <= room))
            equals += tl.sum(equal, axis=0)
        place = listed + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        listed += tl.sum(chosen.to(tl.int32), axis=0)
        if PAGE > 0:
            page = tl.load(table + key // PAGE, mask=chosen, other=0)
            tl.store(to + place, page * PAGE + key % PAGE, mask=chosen)
        else:
            tl.store(to + place, key, mask=chosen)


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_keys: torch.Tensor,
    tables: torch.Tensor,
    parts: DecodeParts,
    width: int,
    tokens: int = 1,
    firsts: torch.Tensor | None = None,
    rate: int = 1,
) -> torch.Tensor:
    """Return the scores of the keys that each query sees, [T, width] float32. What lies beyond these is undefined.

    q: [T, heads, dim]. weights: [T, heads] float32. index_keys: [blocks, block_size, 1, dim]. All are contiguous, but
    rows of index_keys may lie further apart. tables, parts, tokens, firsts: as in latent_decode. width: at least the
    length of the longest group. rate: each key is that of so many consecutive tokens, and in the row of the last of
    them; lengths of groups count keys.
    """
    total, heads, dim = q.shape
    slots = parts.plan.shape[1]
    scores = torch.empty((total, width), dtype=torch.float32, device=q.device)
    _index_scores_kernel[(slots,)](
        q, weights, index_keys, tables, parts.plan, parts.spans if firsts is None else firsts, scores,
        tables.stride(0), slots, width, HEADS=heads, BLOCK_HEADS=max(triton.next_power_of_2(heads), 16),
        DIM=dim, BLOCK_DIM=max(triton.next_power_of_2(dim), 16), TOKENS=tokens, ROW=index_keys.stride(1), RATE=rate,
        PAGE=index_keys.shape[1],
        TILE=TILE_KEYS, KEYS=_KEYS, num_warps=4, num_stages=2, **overlap_options(q.device),
    )  # fmt: skip
    return scores


def select_slots(
    scores: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, tables: torch.Tensor, page: int, most: int
) -> torch.Tensor:
    """Return the slots in the cache of the tokens that selection_reference selects, [T, most] int32, in their order.

    scores: [T, width] float32, from `index_scores`. lengths: [T] int32, the tokens that each query sees. A query that
    sees fewer tokens than `most` has a slot for each of them; what lies beyond these is undefined. rows: [T] int64,
    each query's row of tables. page: tokens of a block. A slot is block * page + offset.
    """
    queries, width = scores.shape
    out = torch.empty((queries, most), dtype=torch.int32, device=scores.device)
    _select_kernel[(queries,)](
        scores, lengths, rows, tables, out, tables.stride(0), width, MOST=most, HEADS=1, SIZE=1, PAGE=page,
        PIVOTS=_PIVOTS, BLOCK=_BLOCK, LISTED=_LISTED_BLOCK, num_warps=8, **overlap_options(scores.device),
    )  # fmt: skip
    return out


def select_numbers(scores: torch.Tensor, lengths: torch.Tensor, size: int, most: int) -> torch.Tensor:
    """Return the numbers of the `most` highest scores of each row, [T * heads, most] int32, in ascending order. Of
    equal scores, those with lower numbers are selected first.

    scores: [T, heads, width] float32, none of which is NaN; each is that of `size` consecutive tokens. lengths: [T]
    int32, the tokens that each query sees. A row that has fewer scores than `most` has a number for each of them; what
    lies beyond these is undefined.
    """
    queries, heads, width = scores.shape
    out = torch.empty((queries * heads, most), dtype=torch.int32, device=scores.device)
    _select_kernel[(queries * heads,)](
        scores, lengths, lengths, lengths, out, 0, width, MOST=most, HEADS=heads, SIZE=size, PAGE=0,
        PIVOTS=_PIVOTS, BLOCK=_BLOCK, LISTED=_LISTED_BLOCK, num_warps=8, **overlap_options(scores.device),
    )  # fmt: skip
    return out
