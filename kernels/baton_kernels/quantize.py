"""Rounds activations to 8 bits. One program computes the scales and the codes of one row.

The kernels of norm.py and activation.py also use store_rounded, and so do not store their unrounded results.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .e4m3 import round_e4m3
from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.quantize import E4M3_MOST, ZERO_SCALE, QuantizedRows, RowFormat

# The longest row that one kernel can compute and round, since all values of the row are in registers.
_LONGEST = 32768


@triton.jit
def _divide(values, divisor):
    """Divide float32 values, correctly rounded. A GPU's plain division may be wrong in the last bit."""
    return tl.div_rn(values, tl.zeros_like(values) + divisor)


@triton.jit
def _quotients(values, scale, ON_GPU: tl.constexpr):
    """Return values [groups, group] divided by the scale of each group, correctly rounded.

    On a GPU the values of a group are multiplied by one reciprocal of the scale. Two corrections by the remainder then
    give the correctly rounded quotient (Markstein, "Computation of elementary functions on the IBM RISC System/6000
    processor", 1990). Tiny scales are enlarged first, since their remainders would lose bits.
    """
    if ON_GPU:
        larger = tl.where(scale < 8.673617379884035e-19, 1.8446744073709552e19, 1.0)
        scale *= larger
        reciprocal = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)[:, None].broadcast_to(values.shape)
        values *= larger[:, None]
        scale = scale[:, None].broadcast_to(values.shape)
        quotient = values * reciprocal
        quotient = tl.fma(tl.fma(-quotient, scale, values), reciprocal, quotient)
        quotient = tl.fma(tl.fma(-quotient, scale, values), reciprocal, quotient)
    else:
        quotient = tl.div_rn(values, scale[:, None].broadcast_to(values.shape))
    return quotient


@triton.jit
def _round(values):
    """Round float32 values below 2 ** 22 to whole numbers, ties to even."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def store_rounded(
    values, codes, scales, zeros, static_scale, static_zero, row, columns, groups, row_stride, group_stride, most,
    zero_scale, limit, GROUPS: tl.constexpr, GROUP: tl.constexpr, COLUMNS_PER_GROUP: tl.constexpr,
    INTEGERS: tl.constexpr, STATIC: tl.constexpr, SYMMETRIC: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """Store the codes, the scales and the zero of a row. values: [GROUPS, GROUP] float32, 0 outside of the row.
    row_stride and group_stride: of the scales.

    ON_GPU: conversions to e4m3 round to nearest and saturate, and a fused multiply-add rounds once. In Triton's
    interpreter neither is true.
    """
    group = tl.arange(0, GROUPS)
    inside = tl.arange(0, GROUP)
    column = group[:, None] * COLUMNS_PER_GROUP + inside[None, :]
    known = (inside < COLUMNS_PER_GROUP)[None, :] & (column < columns)
    # This sum is 0, or NaN if a value is not finite.
    broken = tl.sum(values * 0.0, axis=1)
    zero = tl.zeros([GROUPS], tl.float32)
    if STATIC:
        scale = tl.load(static_scale).to(tl.float32) + broken
        if not SYMMETRIC:
            zero += tl.load(static_zero).to(tl.float32)
    else:
        if SYMMETRIC:
            scale = _divide(tl.minimum(tl.max(tl.abs(values), axis=1), most), limit)
        else:
            low = tl.minimum(tl.min(values, axis=1), 0.0)
            scale = _divide(tl.maximum(tl.max(values, axis=1), 0.0) - low, 255.0)
        scale = tl.where(scale == 0.0, zero_scale, scale) + broken
        if POWER_OF_TWO:
            scale = tl.exp2(tl.ceil(tl.log2(scale)))
        if not SYMMETRIC:
            zero = _round(tl.minimum(tl.maximum(-128.0 - tl.div_rn(low, scale), -128.0), 127.0))
    scaled = _quotients(values, scale, ON_GPU)
    if not SYMMETRIC:
        scaled += zero[:, None]
        tl.store(zeros + row + group, zero.to(tl.int32), mask=group < groups)
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    if INTEGERS:
        rounded = _round(tl.minimum(tl.maximum(scaled, -128.0), 127.0))
    elif ON_GPU:
        rounded = scaled
    else:
        rounded = round_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
    tl.store(codes + row * columns + column, rounded.to(codes.dtype.element_ty), mask=known)
    tl.store(scales + row * row_stride + group * group_stride, scale, mask=group < groups)


@triton.jit
def _quantize_kernel(
    x, codes, scales, zeros, static_scale, static_zero, columns, groups, row_stride, group_stride, most, zero_scale,
    limit, GROUPS: tl.constexpr, GROUP: tl.constexpr, COLUMNS_PER_GROUP: tl.constexpr, INTEGERS: tl.constexpr,
    STATIC: tl.constexpr, SYMMETRIC: tl.constexpr, POWER_OF_TWO: tl.constexpr, ON_GPU: tl.constexpr,
    BY_ROW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BY_ROW: there is a static scale for each row."""
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if BY_ROW:
        static_scale += row
    inside = tl.arange(0, GROUP)
    column = tl.arange(0, GROUPS)[:, None] * COLUMNS_PER_GROUP + inside[None, :]
    known = (inside < COLUMNS_PER_GROUP)[None, :] & (column < columns)
    wait_for_inputs(OVERLAP)
    values = tl.load(x + row * columns + column, mask=known, other=0.0).to(tl.float32)
    store_rounded(
        values, codes, scales, zeros, static_scale, static_zero, row, columns, groups, row_stride, group_stride, most,
        zero_scale, limit, GROUPS, GROUP, COLUMNS_PER_GROUP, INTEGERS, STATIC, SYMMETRIC, POWER_OF_TWO, ON_GPU,
    )  # fmt: skip


class RoundedRows(NamedTuple):
    """Memory for rounded rows, and the arguments of kernels that call store_rounded. operands: those from `codes` to
    `limit` except `row`. flags: compile-time values. size: elements of the tile that holds a row."""

    rows: QuantizedRows
    operands: tuple[Any, ...]
    flags: dict[str, Any]
    size: int


def rounded_rows(
    rows: int,
    columns: int,
    form: RowFormat,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    device: torch.device,
    by_group: bool = False,
) -> RoundedRows:
    """Return memory for rows to be rounded as in quantize_rows_reference. by_group: the scales of a group of columns
    are contiguous, not those of a row."""
    group = form.group or columns
    groups = triton.cdiv(columns, group)
    codes = torch.empty(rows, columns, dtype=form.dtype, device=device)
    scales = torch.empty(groups, rows, dtype=torch.float32, device=device).t()
    if not by_group:
        scales = torch.empty(rows, groups, dtype=torch.float32, device=device)
    zeros = None if form.symmetric else torch.empty(rows, dtype=torch.int32, device=device)
    lanes = triton.next_power_of_2(group)
    integers = form.dtype == torch.int8
    operands = (
        codes, scales, codes if zeros is None else zeros, scales if scale is None else scale,
        scales if zero is None else zero, columns, groups, *scales.stride(), form.most or float("inf"), ZERO_SCALE,
        form.steps if integers else E4M3_MOST,
    )  # fmt: skip
    flags = {
        "GROUPS": triton.next_power_of_2(groups), "GROUP": lanes, "COLUMNS_PER_GROUP": group, "INTEGERS": integers,
        "STATIC": scale is not None, "SYMMETRIC": form.symmetric, "POWER_OF_TWO": form.power_of_two,
        "ON_GPU": codes.is_cuda,
    }  # fmt: skip
    return RoundedRows(
        QuantizedRows(codes, scales, zeros, form.group), operands, flags, lanes * triton.next_power_of_2(groups)
    )


def fits_a_row(form: RowFormat, columns: int) -> bool:
    """Whether one tile without gaps between groups can hold a row, so that one kernel can compute and round it."""
    return (form.group or 1).bit_count() == 1 and columns <= _LONGEST


def quantize_rows(
    x: torch.Tensor, form: RowFormat, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None
) -> QuantizedRows:
    """Compute quantize_rows_reference. x is contiguous."""
    rows, columns = x.shape
    out = rounded_rows(rows, columns, form, scale, zero, x.device)
    _quantize_kernel[(rows,)](
        x, *out.operands, BY_ROW=scale is not None and scale.numel() > 1, num_warps=8 if out.size >= 4096 else 4,
        **out.flags, **overlap_options(x.device),
    )  # fmt: skip
    return out.rows
