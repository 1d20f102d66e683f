"""RMSNorm, alone, together with the residual addition before it, and with the rounding to 8 bits after it (Zhang and
Sennrich, 2019)."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .quantize import fits_a_row, quantize_rows, rounded_rows, store_rounded
from .reference.quantize import QuantizedRows, RowFormat


@triton.jit
def _normed(
    x, residual, weight, eps, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Return the norm of this program's row, after the preceding kernel, and store the sum with the residual."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    values = tl.load(x + tl.program_id(0).to(tl.int64) * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        values = (values.to(tl.float32) + tl.load(residual + row + columns, mask=inside, other=0.0)).to(values.dtype)
        tl.store(residual + row + columns, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    return ((wide * scale).to(scales.dtype) * scales).to(values.dtype)


@triton.jit
def _add_rms_norm_kernel(
    x, residual, weight, out, eps, x_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    normed = _normed(x, residual, weight, eps, x_stride, SIZE, BLOCK, ADD, OVERLAP)
    columns = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0).to(tl.int64) * SIZE + columns, normed, mask=columns < SIZE)


@triton.jit
def _quantize_norm_kernel(
    x, residual, weight, codes, scales, zeros, static_scale, static_zero, columns, groups, most, zero_scale, limit,
    eps, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS_PER_GROUP: tl.constexpr, INTEGERS: tl.constexpr, STATIC: tl.constexpr,
    SYMMETRIC: tl.constexpr, POWER_OF_TWO: tl.constexpr, ON_GPU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    normed = _normed(x, residual, weight, eps, x_stride, SIZE, BLOCK, ADD, OVERLAP)
    values = normed.to(tl.float32).reshape(GROUPS, GROUP)
    store_rounded(
        values, codes, scales, zeros, static_scale, static_zero, tl.program_id(0).to(tl.int64), columns, groups, most,
        zero_scale, limit, GROUPS, GROUP, COLUMNS_PER_GROUP, INTEGERS, STATIC, SYMMETRIC, POWER_OF_TWO, ON_GPU,
    )  # fmt: skip


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute add_rms_norm_reference in one pass over x. The rows of x and all of residual must be contiguous."""
    rows, size = x.shape
    out = x.new_empty(rows, size)
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        x.stride(0),
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(max(block // 512, 1), 8),
        **overlap_options(x.device),
    )
    return out


def quantize_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    form: RowFormat,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> QuantizedRows:
    """Compute quantize_norm_reference without storing the norm. Memory as in add_rms_norm."""
    rows, size = x.shape
    if not fits_a_row(form, size):
        return quantize_rows(add_rms_norm(x, residual, weight, eps), form, scale, zero)
    out = rounded_rows(rows, size, form, scale, zero, x.device)
    _quantize_norm_kernel[(rows,)](
        x, x if residual is None else residual, weight, *out.operands, eps, x.stride(0), SIZE=size, BLOCK=out.size,
        ADD=residual is not None, num_warps=min(max(out.size // 512, 1), 8), **out.flags, **overlap_options(x.device),
    )  # fmt: skip
    return out.rows
