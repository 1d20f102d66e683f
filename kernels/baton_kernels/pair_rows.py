"""Copies the rows of tokens into the order of groups, so that the rows of a block are consecutive (pair_groups.py)."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .pair_groups import PairGroups
from .quantize import rounded_rows, store_rounded
from .reference.quantize import QuantizedRows, RowFormat


@triton.jit
def _pair_at(order, block_experts, place, ROWS: tl.constexpr):
    """Return the pair at a place of the order, -1 = none. The order is not initialized in unused blocks."""
    return tl.load(order + place, mask=tl.load(block_experts + place // ROWS) >= 0, other=-1)


@triton.jit
def _gather_kernel(x, order, block_experts, out, pairs_per_row, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                   ROWS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    let_next_start(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    pair = _pair_at(order, block_experts, place, ROWS)
    inside = (column < SIZE) & (pair >= 0)
    row = tl.maximum(pair, 0) // pairs_per_row
    tl.store(out + place * SIZE + column, tl.load(x + row.to(tl.int64) * SIZE + column, mask=inside), mask=inside)


def gather_rows(x: torch.Tensor, groups: PairGroups, pairs_per_row: int) -> torch.Tensor:
    """Return the row of x of each pair in the order of groups, [blocks * block_rows, size of a row].

    pairs_per_row: how many consecutive pairs belong to a row of x. Rows without a pair are undefined.
    """
    places, size = len(groups.order), x.shape[1]
    out = x.new_empty(places, size)
    block = min(triton.next_power_of_2(size), 2048)
    _gather_kernel[(places, triton.cdiv(size, block))](
        x, *groups, out, pairs_per_row, SIZE=size, BLOCK=block, ROWS=places // len(groups.block_experts), num_warps=4,
        **overlap_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _quantize_kernel(
    x, order, block_experts, pairs_per_row, codes, scales, zeros, static_scale, static_zero, columns, groups,
    row_stride, group_stride, most, zero_scale, limit, ROWS: tl.constexpr, GATHERED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, COLUMNS_PER_GROUP: tl.constexpr, INTEGERS: tl.constexpr,
    STATIC: tl.constexpr, SYMMETRIC: tl.constexpr, POWER_OF_TWO: tl.constexpr, ON_GPU: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, GROUP)
    column = tl.arange(0, GROUPS)[:, None] * COLUMNS_PER_GROUP + inside[None, :]
    known = (inside < COLUMNS_PER_GROUP)[None, :] & (column < columns)
    wait_for_inputs(OVERLAP)
    pair = _pair_at(order, block_experts, place, ROWS)
    if pair < 0:
        return
    row = place
    if STATIC:
        static_scale += tl.load(block_experts + place // ROWS)
    if not GATHERED:
        row = (pair // pairs_per_row).to(tl.int64)
    values = tl.load(x + row * columns + column, mask=known, other=0.0).to(tl.float32)
    store_rounded(
        values, codes, scales, zeros, static_scale, static_zero, place, columns, groups, row_stride, group_stride, most,
        zero_scale, limit, GROUPS, GROUP, COLUMNS_PER_GROUP, INTEGERS, STATIC, SYMMETRIC, POWER_OF_TWO, ON_GPU,
    )  # fmt: skip


def quantize_pairs(
    x: torch.Tensor, groups: PairGroups, form: RowFormat, pairs_per_row: int = 0, scales: torch.Tensor | None = None
) -> QuantizedRows:
    """Return the row of each pair in the order of groups as quantize_rows_reference rounds it.

    pairs_per_row: as in gather_rows; 0 = the rows of x have that order already. scales: those of each expert's rows,
    [experts] float32; None = each row has a scale of its own. The scales of a group of columns are contiguous in the
    result. Rows without a pair are undefined.
    """
    places = len(groups.order)
    out = rounded_rows(places, x.shape[1], form, scales, None, x.device, by_group=True)
    _quantize_kernel[(places,)](
        x, *groups, pairs_per_row, *out.operands, ROWS=places // len(groups.block_experts),
        GATHERED=pairs_per_row == 0, num_warps=8 if out.size >= 4096 else 4, **out.flags, **overlap_options(x.device),
    )  # fmt: skip
    return out.rows
