"""The rows of the cache to which queries of compressed attention attend: those of the last tokens and those of entries.

All layers of a cache with one plane lie in one tensor, so that a row number can name a row of any of them.
"""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.compression import window_rows

_ROWS = 512  # of one program


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["key_stride", "entry_stride", "width", "key_row", "entry_row"])
def _entry_slots_kernel(
    lengths, rows, key_tables, entry_tables, numbers, out, key_stride, entry_stride, width, key_row, entry_row,
    WINDOW: tl.constexpr, RATE: tl.constexpr, SPAN: tl.constexpr, MOST: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """SPAN: as window_rows returns it. MOST: the entries of each query that `numbers` has; 0 = all are attended to.
    RATE: 0 = there are no entries."""
    let_next_start(OVERLAP)
    query = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + query)
    row = tl.load(rows + query).to(tl.int64)
    near = tl.minimum(length, WINDOW)
    wait_for_inputs(OVERLAP)
    is_near = place < near
    position = length - near + place
    block = tl.load(key_tables + row * key_stride + position // PAGE, mask=is_near, other=0)
    to = out + query * width + place
    tl.store(to, key_row + block * PAGE + position % PAGE, mask=is_near)
    if RATE > 0:
        number = place - near
        there = length // RATE
        if MOST > 0:
            there = tl.minimum(there, MOST)
        is_entry = (number >= 0) & (number < there)
        if MOST > 0:
            number = tl.load(numbers + query * MOST + number, mask=is_entry, other=0)
        position = number * RATE + (RATE - SPAN)
        block = tl.load(entry_tables + row * entry_stride + position // PAGE, mask=is_entry, other=0)
        tl.store(to, entry_row + block * PAGE + position % PAGE, mask=is_entry)


def entry_slots(
    lengths: torch.Tensor,
    rows: torch.Tensor,
    key_tables: torch.Tensor,
    key_row: int,
    window: int,
    width: int,
    page: int,
    entry_tables: torch.Tensor | None = None,
    entry_row: int = 0,
    rate: int = 0,
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows to which each query attends, [T, width] int32: those of the keys of its last `window` tokens, and
    then those of entries of the windows before it that have ended.

    lengths: [T] int32, the tokens that each query sees. rows: [T] int64, of the tables. key_tables, entry_tables: the
    block tables of both layers, [rows, most blocks] int32. key_row: the first row of the keys' layer. entry_row: the
    same for entries, plus the place of an entry among those of a window (Compression). rate: tokens of a window; 0 =
    there are no entries. numbers: [T, most] int32, the windows whose entries are attended to, as select_numbers returns
    them; None = all. What lies beyond a query's rows is undefined.
    """
    out = torch.empty((len(lengths), width), dtype=torch.int32, device=lengths.device)
    entries = key_tables if entry_tables is None else entry_tables
    _entry_slots_kernel[(len(lengths), triton.cdiv(width, _ROWS))](
        lengths, rows, key_tables, entries, out if numbers is None else numbers, out, key_tables.stride(0),
        entries.stride(0), width, key_row, entry_row, WINDOW=window, RATE=rate, SPAN=window_rows(rate) if rate else 1,
        MOST=0 if numbers is None else numbers.shape[1], PAGE=page, BLOCK=_ROWS, num_warps=4,
        **overlap_options(lengths.device),
    )  # fmt: skip
    return out
