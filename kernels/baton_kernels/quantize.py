"""Rounds activations to 8 bits. One program computes the scales and the codes of one row."""

import torch
import triton
import triton.language as tl

from .e4m3 import round_e4m3
from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.quantize import E4M3_MOST, ZERO_SCALE, QuantizedRows, RowFormat


@triton.jit
def _divide(values, divisor):
    """Divide float32 values, correctly rounded. A GPU's plain division may be off by the last bit."""
    return tl.div_rn(values, tl.zeros_like(values) + divisor)


@triton.jit
def _round(values):
    """Round float32 values below 2 ** 22 to whole numbers, ties to even."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def _quantize_kernel(
    x, static_scale, static_zero, codes, scales, zeros, columns, groups, most, zero_scale, limit,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, COLUMNS_PER_GROUP: tl.constexpr, INTEGERS: tl.constexpr,
    STATIC: tl.constexpr, SYMMETRIC: tl.constexpr, POWER_OF_TWO: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    inside = tl.arange(0, GROUP)
    column = group[:, None] * COLUMNS_PER_GROUP + inside[None, :]
    known = (inside < COLUMNS_PER_GROUP)[None, :] & (column < columns)
    wait_for_inputs(OVERLAP)
    values = tl.load(x + row * columns + column, mask=known, other=0.0).to(tl.float32)
    # The sum of zeros, or NaN if a value is not finite.
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
    scaled = tl.div_rn(values, scale[:, None].broadcast_to(values.shape))
    if not SYMMETRIC:
        scaled += zero[:, None]
        tl.store(zeros + row + group, zero.to(tl.int32), mask=group < groups)
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    if INTEGERS:
        rounded = _round(tl.minimum(tl.maximum(scaled, -128.0), 127.0))
    else:
        rounded = round_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
    tl.store(codes + row * columns + column, rounded.to(codes.dtype.element_ty), mask=known)
    tl.store(scales + row * groups + group, scale, mask=group < groups)


def quantize_rows(
    x: torch.Tensor, form: RowFormat, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None
) -> QuantizedRows:
    """Compute quantize_rows_reference. x is contiguous."""
    rows, columns = x.shape
    group = form.group or columns
    groups = triton.cdiv(columns, group)
    codes = torch.empty(rows, columns, dtype=form.dtype, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    zeros = None if form.symmetric else torch.empty(rows, dtype=torch.int32, device=x.device)
    lanes = triton.next_power_of_2(group)
    tile = triton.next_power_of_2(groups) * lanes
    _quantize_kernel[(rows,)](
        x, x if scale is None else scale, x if zero is None else zero, codes, scales,
        codes if zeros is None else zeros, columns, groups, form.most or float("inf"), ZERO_SCALE,
        127.5 if form.dtype == torch.int8 else E4M3_MOST,
        GROUPS=tile // lanes, GROUP=lanes, COLUMNS_PER_GROUP=group, INTEGERS=form.dtype == torch.int8,
        STATIC=scale is not None, SYMMETRIC=form.symmetric,
        POWER_OF_TWO=form.power_of_two, num_warps=8 if tile >= 4096 else 4, **overlap_options(x.device),
    )  # fmt: skip
    return QuantizedRows(codes, scales, zeros, form.group)
