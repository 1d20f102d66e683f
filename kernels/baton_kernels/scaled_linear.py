"""Products of rows in 8 bits with weights in 8 bits.

Sums of int8 are exact in int32. Sums of FP8 are added up in float32 after every tile, because tensor cores keep fewer
bits of longer sums. For one row each program multiplies elementwise. For more rows tiles go through the tensor cores;
the inner dimension is cut into parts where there would be too few programs. Large batches in FP8 with a scale for each
row and output go to cuBLAS and CUTLASS, through torch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .parts import add_parts, arrivals_of, parts_for
from .reference.quantize import QuantizedRows
from .reference.scaled_linear import ScaledWeight


class ScaledConfig(NamedTuple):
    """A configuration of the kernels. block_rows 1 selects the one-row kernel. block_inner counts where a weight has
    one scale for each output; otherwise a step covers as many columns as share a scale."""

    block_rows: int
    block_outputs: int
    block_inner: int
    parts: int
    num_warps: int
    num_stages: int


# Rows up to which the kernels here are used where torch has a product, too.
_FEW_ROWS = 64
FIXED = ScaledConfig(64, 64, 128, 1, 4, 3)


@triton.jit
def _finish(acc, x_scales, zeros, w_scales, sums, bias, row, output, here, real, SCALED: tl.constexpr,
            ROWS_PER_SCALE: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Return the results of sums [outputs, rows] in float32."""
    if ZEROS:
        zero = tl.load(zeros + row, mask=here, other=0)
        acc -= tl.load(sums + output, mask=real, other=0)[:, None] * zero[None, :]
    result = acc.to(tl.float32)
    if not SCALED:
        result *= tl.load(w_scales + output // ROWS_PER_SCALE, mask=real, other=0.0)[:, None]
        result *= tl.load(x_scales + row, mask=here, other=0.0)[None, :]
    if BIAS:
        result += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[:, None]
    return result


@triton.jit
def _one_row_kernel(
    x, x_scales, zeros, weight, w_scales, sums, bias, out, outputs, inner_size, groups,
    BLOCK_OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr, INTEGERS: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    real = output < outputs
    w_row = weight + tl.minimum(output, outputs - 1).to(tl.int64)[:, None, None] * inner_size
    group = tl.arange(0, GROUPS)
    inner = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    wait_for_inputs(OVERLAP)
    acc = tl.zeros([BLOCK_OUTPUTS, GROUPS, GROUP], tl.int32 if INTEGERS else tl.float32)
    for first in range(0, inner_size, GROUPS * GROUP):
        known = first + inner < inner_size
        w = tl.load(w_row + (first + inner)[None, :, :], mask=known[None, :, :], other=0.0)
        values = tl.load(x + row * inner_size + first + inner, mask=known, other=0.0)
        if INTEGERS:
            acc += w.to(tl.int32) * values.to(tl.int32)[None, :, :]
        else:
            product = w.to(tl.float32) * values.to(tl.float32)[None, :, :]
            if TILED:
                at = first // GROUP + group
                scale = tl.load(x_scales + row * groups + at, mask=at < groups, other=0.0)[None, :]
                w_at = w_scales + (output // ROWS_PER_SCALE)[:, None] * groups + at[None, :]
                scale *= tl.load(w_at, mask=real[:, None] & (at < groups)[None, :], other=0.0)
                product *= scale[:, :, None]
            acc += product
    total = tl.sum(tl.sum(acc, axis=2), axis=1)[:, None]
    rows = row + tl.arange(0, 1)
    here = tl.arange(0, 1) < 1
    result = _finish(total, x_scales, zeros, w_scales, sums, bias, rows, output, here, real, TILED,
                     ROWS_PER_SCALE, ZEROS, BIAS)  # fmt: skip
    tl.store(out + row * outputs + output[:, None], result.to(out.dtype.element_ty), mask=real[:, None])


# One compiled kernel serves every number of rows.
@triton.jit(do_not_specialize=["rows"])
def _tiles_kernel(
    x, x_scales, zeros, weight, w_scales, sums, bias, out, partial, arrivals, rows, outputs, inner_size, groups,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr, PARTS: tl.constexpr,
    TILED: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, INTEGERS: tl.constexpr, ZEROS: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    output = (tile // row_tiles) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row = ((tile % row_tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    real, here = output < outputs, row < rows
    # Outputs beyond the last one read its weights, so that loads need no mask. Their results are not stored.
    w_row = tl.minimum(output, outputs - 1).to(tl.int64)
    steps = tl.cdiv(tl.cdiv(inner_size, BLOCK_INNER), PARTS)
    inner = part * steps * BLOCK_INNER + tl.arange(0, BLOCK_INNER)
    w_at = weight + w_row[:, None] * inner_size + inner[None, :]
    x_at = x + row[None, :] * inner_size + inner[:, None]
    wait_for_inputs(OVERLAP)
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.int32 if INTEGERS else tl.float32)
    for step in range(0, steps):
        known = inner + step * BLOCK_INNER < inner_size
        w = tl.load(w_at, mask=known[None, :], other=0.0)
        values = tl.load(x_at, mask=known[:, None] & here[None, :], other=0.0)
        if INTEGERS:
            acc = tl.dot(w, values, acc, out_dtype=tl.int32)
        elif TILED:
            at = part * steps + step
            w_scale = tl.load(w_scales + w_row // ROWS_PER_SCALE * groups + at, mask=at < groups, other=0.0)
            x_scale = tl.load(x_scales + row * groups + at, mask=here & (at < groups), other=0.0)
            acc += tl.dot(w, values) * w_scale[:, None] * x_scale[None, :]
        else:
            acc += tl.dot(w, values)
        w_at += BLOCK_INNER
        x_at += BLOCK_INNER
    acc, last = add_parts(acc, partial, arrivals, tile, part, PARTS)
    if last:
        result = _finish(acc, x_scales, zeros, w_scales, sums, bias, row, output, here, real, TILED,
                         ROWS_PER_SCALE, ZEROS, BIAS)  # fmt: skip
        at = out + row[None, :] * outputs + output[:, None]
        tl.store(at, result.to(out.dtype.element_ty), mask=real[:, None] & here[None, :])


def _config(rows: int, outputs: int, inner: int) -> ScaledConfig:
    """Return the tile sizes for a product: as many rows as there are, within limits, and enough programs."""
    if rows == 1:
        return ScaledConfig(1, 4, 2048, 1, 4, 1)
    if rows > _FEW_ROWS:
        return ScaledConfig(128, 128, 128, 1, 8, 3)
    block_rows = max(triton.next_power_of_2(rows), 16)
    parts = parts_for(triton.cdiv(outputs, 64), triton.cdiv(inner, 128))
    return ScaledConfig(block_rows, 64, 128, parts, 4, 4)


def scaled_linear(
    x: QuantizedRows,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    config: ScaledConfig | None = None,
) -> torch.Tensor:
    """Compute scaled_linear_reference. All tensors are contiguous. Scales of x cover as many columns as those of the
    weight. config: None = by the sizes."""
    rows, inner = x.codes.shape
    outputs = weight.codes.shape[0]
    tiled = weight.tile[1] < inner
    if config is None:
        if rows > _FEW_ROWS and not tiled and _fits_torch(x, weight, dtype):
            return torch._scaled_mm(
                x.codes, weight.codes.t(), x.scales, weight.scales.t(), bias, out_dtype=dtype, use_fast_accum=True
            )
        config = _config(rows, outputs, inner)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.codes.device)
    integers = weight.codes.dtype == torch.int8
    block_inner = weight.tile[1] if tiled else config.block_inner
    zeros, sums = (x.codes, x.codes) if x.zeros is None else (x.zeros, weight.sums)
    operands = (
        x.codes, x.scales, zeros, weight.codes, weight.scales, sums, weight.codes if bias is None else bias, out
    )  # fmt: skip
    flags = {
        "TILED": tiled, "ROWS_PER_SCALE": weight.tile[0], "INTEGERS": integers, "ZEROS": x.zeros is not None,
        "BIAS": bias is not None, "num_warps": config.num_warps, **overlap_options(out.device),
    }  # fmt: skip
    tiles = triton.cdiv(outputs, config.block_outputs)
    if config.block_rows == 1:
        group = block_inner if tiled else min(triton.next_power_of_2(inner), config.block_inner)
        _one_row_kernel[(tiles, rows)](
            *operands, outputs, inner, x.scales.shape[1], BLOCK_OUTPUTS=config.block_outputs,
            GROUPS=max(config.block_inner // group, 1), GROUP=group, **flags,
        )  # fmt: skip
        return out
    tiles *= triton.cdiv(rows, config.block_rows)
    partial = out
    if config.parts > 1:
        cells = tiles * config.parts * config.block_outputs * config.block_rows
        partial = torch.empty(cells, dtype=torch.int32 if integers else torch.float32, device=out.device)
    _tiles_kernel[(tiles, config.parts)](
        *operands, partial, arrivals_of(out.device), rows, outputs, inner, x.scales.shape[1],
        BLOCK_ROWS=config.block_rows, BLOCK_OUTPUTS=config.block_outputs, BLOCK_INNER=block_inner,
        PARTS=config.parts, num_stages=config.num_stages, **flags,
    )  # fmt: skip
    return out


def _fits_torch(x: QuantizedRows, weight: ScaledWeight, dtype: torch.dtype) -> bool:
    """Whether torch has the product: FP8 with a scale for each row and output, on cards of compute capability 9.0."""
    outputs, inner = weight.codes.shape
    return (
        x.codes.is_cuda
        and weight.codes.dtype == torch.float8_e4m3fn
        and dtype == torch.bfloat16
        and weight.tile[0] == 1
        and outputs % 16 == inner % 16 == 0
        and torch.cuda.get_device_capability(x.codes.device) >= (9, 0)
    )


def scaled_linear_fixed(
    x: QuantizedRows, weight: ScaledWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Compute scaled_linear_reference such that the bits of a row's result do not depend on the other rows."""
    return scaled_linear(x, weight, bias, dtype, FIXED)
