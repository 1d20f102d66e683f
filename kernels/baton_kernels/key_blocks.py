"""The scores of blocks of keys over the paged cache, and the selection of blocks by them (reference/key_blocks.py).

Sequences are cut into parts, and queries form groups, as in index_scores.py. A program scores the blocks of one part
for the queries of a group: the heads of all these queries are the rows of a tile. Another kernel finds each head's
blocks, and a third one lists the slots of their tokens, which attention reads like a block table with blocks of one
token.
"""

import torch
import triton
import triton.language as tl

from .decode_parts import DecodeParts, load_part
from .index_scores import select_numbers
from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.indexed import LARGEST_SCORE

_MOST_KEYS = 64  # of a tile
_LISTED = 1024  # slots that a program lists at a time
_LARGEST = tl.constexpr(LARGEST_SCORE)


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["table_stride", "slots", "width"])
def _key_block_scores_kernel(
    q, index_keys, tables, plan, firsts, scores, table_stride, slots, width,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TOKENS: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, LOCAL: tl.constexpr, KEYS: tl.constexpr, OVERLAP: tl.constexpr,
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
    # A part has whole blocks of keys, so that no block has its score from two programs.
    blocks = tl.cdiv(length, SIZE)
    each = tl.cdiv(blocks, parts)
    begin = part * each
    end = tl.minimum(begin + each, blocks)
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    real = row < count * HEADS
    seen = length - count + 1 + row // HEADS  # keys that the query of a row sees
    own = (seen - 1) // SIZE
    at_row = query.to(tl.int64) * HEADS + row
    inside = real[:, None] & (column < DIM)[None, :]
    queries = tl.load(q + at_row[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    for block in range(begin, end):
        best = tl.full([ROWS], float("-inf"), tl.float32)
        last = tl.minimum((block + 1) * SIZE, length)
        for first in range(block * SIZE, last, KEYS):
            key = first + tl.arange(0, KEYS)
            known = key < last
            page = tl.load(table + key // PAGE, mask=known, other=0).to(tl.int64)
            # The key-value heads have copies of one index key.
            at = index_keys + ((page * PAGE + key % PAGE) * (HEADS * DIM))[None, :]
            keys = tl.load(at + column[:, None], mask=known[None, :] & (column < DIM)[:, None], other=0.0)
            products = tl.dot(queries, keys, input_precision="ieee")
            # Every product is a number within the bounds, so that scores have an order.
            products = tl.where(products != products, _LARGEST, products)
            products = tl.minimum(tl.maximum(products, -_LARGEST), _LARGEST)
            products = tl.where(known[None, :] & (key[None, :] < seen[:, None]), products, float("-inf"))
            best = tl.maximum(best, tl.max(products, axis=1))
        # Zero has one sign, as scores are compared by their bits.
        best = tl.where(best == 0.0, 0.0, best)
        best = tl.where(block > own - LOCAL, float("inf"), best)
        tl.store(scores + at_row * width + block, best, mask=real & (block <= own))


# One compiled kernel serves all batches, as above.
@triton.jit(do_not_specialize=["table_stride"])
def _list_slots_kernel(
    chosen, lengths, rows, tables, out, table_stride,
    HEADS: tl.constexpr, MOST: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, LISTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    query, head = row // HEADS, (row % HEADS).to(tl.int32)
    wait_for_inputs(OVERLAP)
    length = tl.load(lengths + query)
    # The last block that is selected is the query's own. All others are full.
    count = tl.minimum(length, (MOST - 1) * SIZE + (length - 1) % SIZE + 1)
    table = tables + tl.load(rows + query).to(tl.int64) * table_stride
    for first in range(0, count, LISTED):
        place = first + tl.arange(0, LISTED)
        listed = place < count
        key = tl.load(chosen + row * MOST + place // SIZE, mask=listed, other=0) * SIZE + place % SIZE
        page = tl.load(table + key // PAGE, mask=listed, other=0)
        tl.store(out + row * (MOST * SIZE) + place, (page * PAGE + key % PAGE) * HEADS + head, mask=listed)


def key_block_scores(
    q: torch.Tensor,
    index_keys: torch.Tensor,
    tables: torch.Tensor,
    parts: DecodeParts,
    width: int,
    size: int,
    local: int,
    tokens: int = 1,
    firsts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the scores of the blocks of which each query sees keys, [T, heads, width] float32, as
    key_block_scores_reference has them. What lies beyond these is undefined.

    q: [T, heads, dim]. index_keys: [blocks, block_size, heads, dim], with the same key for all heads of a token. Both
    are contiguous. tables, parts, tokens, firsts: as in latent_decode. width: at least the blocks of keys of the
    longest group. size, local: as in key_block_scores_reference.
    """
    total, heads, dim = q.shape
    slots = parts.plan.shape[1]
    scores = torch.empty((total, heads, width), dtype=torch.float32, device=q.device)
    _key_block_scores_kernel[(slots,)](
        q, index_keys, tables, parts.plan, parts.spans if firsts is None else firsts, scores,
        tables.stride(0), slots, width, HEADS=heads, ROWS=max(triton.next_power_of_2(heads * tokens), 16),
        DIM=dim, BLOCK_DIM=max(triton.next_power_of_2(dim), 16), TOKENS=tokens, PAGE=index_keys.shape[1],
        SIZE=size, LOCAL=local, KEYS=max(min(triton.next_power_of_2(size), _MOST_KEYS), 16),
        num_warps=4, num_stages=2, **overlap_options(q.device),
    )  # fmt: skip
    return scores


def select_block_slots(
    scores: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, tables: torch.Tensor, page: int, size: int,
    most: int,
) -> torch.Tensor:  # fmt: skip
    """Return the slots of the keys that key_block_selection_reference selects, [T * heads, most * size] int32, in their
    order.

    scores: [T, heads, width] float32, from `key_block_scores` with at least one local block. lengths: [T] int32, the
    tokens that each query sees. The first `selected_keys` slots of a row are defined. rows: [T] int64, each query's row
    of tables. page: tokens of a block of the cache. A slot is (block * page + offset) * heads + head.
    """
    queries, heads, _ = scores.shape
    chosen = select_numbers(scores, lengths, size, most)
    out = torch.empty((queries * heads, most * size), dtype=torch.int32, device=scores.device)
    _list_slots_kernel[(queries * heads,)](
        chosen, lengths, rows, tables, out, tables.stride(0), HEADS=heads, MOST=most, SIZE=size, PAGE=page,
        LISTED=min(triton.next_power_of_2(most * size), _LISTED), num_warps=4, **overlap_options(scores.device),
    )  # fmt: skip
    return out


def selected_keys(lengths: torch.Tensor, size: int, most: int) -> torch.Tensor:
    """Return how many keys each query attends to, of the lengths' shape and dtype.

    lengths: the tokens that a query sees. size, most: as in key_block_selection_reference. The query's own block is
    always selected, and is the only one that may not be full.
    """
    return torch.minimum(lengths, (lengths - 1) % size + ((most - 1) * size + 1))
