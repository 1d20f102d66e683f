"""Products of rows with weights of 4 or 8 bits in groups, which are turned into numbers on the way.

For few rows that takes as long as reading the codes once. For one row each program multiplies elementwise; for more
rows tiles go through the tensor cores. Large batches are bound by arithmetic: the weight is turned into numbers in
memory, and cuBLAS multiplies.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .parts import add_parts, arrivals_of, parts_for
from .reference.grouped_linear import FOUR_BITS, GroupedWeight


class GroupedConfig(NamedTuple):
    """A configuration of the kernels. block_rows 1 selects the one-row kernel. block_inner: columns of a step."""

    block_rows: int
    block_outputs: int
    block_inner: int
    parts: int
    num_warps: int
    num_stages: int


# More rows than these go to cuBLAS.
_FEW_ROWS = 128
# The most columns of a unit: columns in a row whose scale is loaded once.
_UNIT = 128
FIXED = GroupedConfig(64, 64, 128, 1, 4, 3)


@triton.jit
def _values(codes, zero, table, KIND: tl.constexpr):
    """Return the values of codes, uint8, in float32. zero: the codes of 0, which broadcast to codes."""
    if KIND == "fp8":
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == "e2m1":
        # The bits of a float16 that is 2 ** -14 times the value: its exponent has a bias of 15 instead of 1.
        bits = ((codes & 8).to(tl.int16) << 12) | ((codes & 7).to(tl.int16) << 9)
        values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif KIND == "table":
        values = tl.load(table + codes.to(tl.int32))
    else:
        values = codes.to(tl.float32) - zero
    return values


@triton.jit
def _scale(pointers, known):
    """Load scales, as float32."""
    if pointers.dtype.element_ty == tl.uint8:
        exponents = tl.load(pointers, mask=known, other=0).to(tl.int32)
        bits = tl.where(exponents == 0, 1 << 22, exponents << 23)
        bits = tl.where(exponents == 255, 0x7FC00000, bits)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(pointers, mask=known, other=0.0).to(tl.float32)
    return scale


@triton.jit
def _unit_codes(codes, scales, zeros, w_row, unit, units, code_columns, groups, UNIT: tl.constexpr,
                GROUP: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Return the codes [outputs, units, bytes of a unit], scales [outputs, units, 1] and zeros of some units."""
    size: tl.constexpr = UNIT // 2 if FOUR else UNIT
    known = unit < units
    byte = unit[:, None] * size + tl.arange(0, size)[None, :]
    at = codes + w_row[:, None, None] * code_columns + byte[None, :, :]
    found = tl.load(at, mask=known[None, :, None], other=0)
    group = w_row[:, None] * groups + (unit * UNIT // GROUP)[None, :]
    scale = _scale(scales + group, known[None, :])[:, :, None]
    zero = 8.0 if FOUR else 128.0
    if ZEROS:
        zero = tl.load(zeros + group, mask=known[None, :], other=0).to(tl.float32)[:, :, None]
    return found, scale, zero


@triton.jit
def _low_columns(unit, UNIT: tl.constexpr, FOUR: tl.constexpr):
    """Return the column of each byte's low half, [units, bytes of a unit]; the high half's column is 16 further."""
    if FOUR:
        byte = tl.arange(0, UNIT // 2)
        inside = byte // 16 * 32 + byte % 16
    else:
        inside = tl.arange(0, UNIT)
    return unit[:, None] * UNIT + inside[None, :]


@triton.jit
def decode_units(
    codes, scales, zeros, table, w_row, unit, units, code_columns, groups, UNIT: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Return the numbers of some units, [outputs, bytes] float32, and the column of each byte.

    Codes of 4 bits are two numbers to a byte: those of the low halves, and those of the high halves, 16 columns
    further. Codes of 8 bits are both results at once.
    """
    found, scale, zero = _unit_codes(
        codes, scales, zeros, w_row, unit, units, code_columns, groups, UNIT, GROUP, KIND, FOUR, ZEROS
    )
    width: tl.constexpr = found.shape[1] * found.shape[2]
    low = (_values(found & 15 if FOUR else found, zero, table, KIND) * scale).reshape(found.shape[0], width)
    high = low
    if FOUR:
        high = (_values(found >> 4, zero, table, KIND) * scale).reshape(found.shape[0], width)
    return low, high, _low_columns(unit, UNIT, FOUR).reshape(width)


@triton.jit
def _one_row_kernel(
    x, codes, scales, zeros, table, bias, out, outputs, units, code_columns, groups, BLOCK_OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr,
    ZEROS: tl.constexpr, BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    x += tl.program_id(1).to(tl.int64) * units * UNIT
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    real = output < outputs
    w_row = tl.minimum(output, outputs - 1).to(tl.int64)
    wait_for_inputs(OVERLAP)
    size: tl.constexpr = UNIT // 2 if FOUR else UNIT
    acc = tl.zeros([BLOCK_OUTPUTS, UNITS, size], tl.float32)
    for first in range(0, units, UNITS):
        unit = first + tl.arange(0, UNITS)
        known = (unit < units)[:, None]
        found, scale, zero = _unit_codes(
            codes, scales, zeros, w_row, unit, units, code_columns, groups, UNIT, GROUP, KIND, FOUR, ZEROS
        )
        column = _low_columns(unit, UNIT, FOUR)
        values = tl.load(x + column, mask=known, other=0.0).to(tl.float32)[None, :, :]
        if FOUR:
            high = tl.load(x + column + 16, mask=known, other=0.0).to(tl.float32)[None, :, :]
            product = _values(found & 15, zero, table, KIND) * values
            product += _values(found >> 4, zero, table, KIND) * high
        else:
            product = _values(found, zero, table, KIND) * values
        acc += product * scale
    result = tl.sum(tl.sum(acc, axis=2), axis=1)
    if BIAS:
        result += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
    at = out + tl.program_id(1).to(tl.int64) * outputs + output
    tl.store(at, result.to(out.dtype.element_ty), mask=real)


# One compiled kernel serves every number of rows.
@triton.jit(do_not_specialize=["rows"])
def _tiles_kernel(
    x, codes, scales, zeros, table, bias, out, partial, arrivals, rows, outputs, units, code_columns, groups,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    output = (tile // row_tiles) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row = ((tile % row_tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    real, here = output < outputs, row < rows
    w_row = tl.minimum(output, outputs - 1).to(tl.int64)
    x_row = x + row[None, :] * units * UNIT
    steps = tl.cdiv(tl.cdiv(units, UNITS), PARTS)
    wait_for_inputs(OVERLAP)
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for step in range(0, steps):
        unit = (part * steps + step) * UNITS + tl.arange(0, UNITS)
        low, high, column = decode_units(
            codes, scales, zeros, table, w_row, unit, units, code_columns, groups, UNIT, GROUP, KIND, FOUR, ZEROS
        )
        known = (column < units * UNIT)[:, None] & here[None, :]
        values = tl.load(x_row + column[:, None], mask=known, other=0.0)
        acc = tl.dot(low.to(values.dtype), values, acc, input_precision="ieee")
        if FOUR:
            values = tl.load(x_row + column[:, None] + 16, mask=known, other=0.0)
            acc = tl.dot(high.to(values.dtype), values, acc, input_precision="ieee")
    acc, last = add_parts(acc, partial, arrivals, tile, part, PARTS)
    if last:
        if BIAS:
            acc += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[:, None]
        at = out + row[None, :] * outputs + output[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=real[:, None] & here[None, :])


@triton.jit
def _dequantize_kernel(
    codes, scales, zeros, table, out, outputs, units, code_columns, groups, BLOCK_OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr,
    ZEROS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    w_row = tl.minimum(output, outputs - 1).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    wait_for_inputs(OVERLAP)
    found, scale, zero = _unit_codes(
        codes, scales, zeros, w_row, unit, units, code_columns, groups, UNIT, GROUP, KIND, FOUR, ZEROS
    )
    known = (output < outputs)[:, None, None] & (unit < units)[None, :, None]
    at = out + w_row[:, None, None] * units * UNIT + _low_columns(unit, UNIT, FOUR)[None, :, :]
    low = _values(found & 15 if FOUR else found, zero, table, KIND) * scale
    tl.store(at, low.to(out.dtype.element_ty), mask=known)
    if FOUR:
        high = _values(found >> 4, zero, table, KIND) * scale
        tl.store(at + 16, high.to(out.dtype.element_ty), mask=known)


def grouped_operands(weight: GroupedWeight) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Return what all kernels take of a weight, or of a stack of weights: tensors, sizes (units, bytes of a row,
    groups), and flags."""
    codes, scales = weight.codes, weight.scales
    group = weight.inputs // scales.shape[-1]
    unit = min(group & -group, _UNIT)
    tensors = (codes, scales, codes if weight.zeros is None else weight.zeros,
               codes if weight.table is None else weight.table)  # fmt: skip
    flags = {
        "UNIT": unit, "GROUP": group, "KIND": weight.kind,
        "FOUR": weight.kind in FOUR_BITS, "ZEROS": weight.zeros is not None, **overlap_options(codes.device),
    }  # fmt: skip
    return tensors, (weight.inputs // unit, codes.shape[-1], scales.shape[-1]), flags


def dequantize_grouped(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Compute dequantize_grouped_reference."""
    tensors, (units, *sizes), flags = grouped_operands(weight)
    outputs = weight.codes.shape[0]
    out = torch.empty(outputs, weight.inputs, dtype=dtype, device=weight.codes.device)
    per_program = min(triton.next_power_of_2(units), 1024 // flags["UNIT"])
    _dequantize_kernel[(triton.cdiv(outputs, 8), triton.cdiv(units, per_program))](
        *tensors, out, outputs, units, *sizes, BLOCK_OUTPUTS=8, UNITS=per_program, num_warps=4, **flags
    )
    return out


def _config(rows: int, outputs: int, inner: int) -> GroupedConfig:
    """Return the tile sizes for a product: as many rows as there are, within limits, and enough programs."""
    if rows == 1:
        return GroupedConfig(1, 4, 2048, 1, 4, 1)
    block_rows = max(triton.next_power_of_2(rows), 16)
    parts = parts_for(triton.cdiv(outputs, 64), triton.cdiv(inner, 128))
    return GroupedConfig(block_rows, 64, 128, parts, 4, 4)


def grouped_linear(
    x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None, config: GroupedConfig | None = None
) -> torch.Tensor:
    """Compute grouped_linear_reference. All tensors are contiguous. config: None = by the sizes."""
    rows, inner = x.shape
    outputs = weight.codes.shape[0]
    if config is None:
        if rows > _FEW_ROWS:
            return torch.nn.functional.linear(x, dequantize_grouped(weight, x.dtype), bias)
        config = _config(rows, outputs, inner)
    tensors, (units, *sizes), flags = grouped_operands(weight)
    out = x.new_empty(rows, outputs)
    unit = flags["UNIT"]
    flags |= {"BIAS": bias is not None, "UNITS": max(config.block_inner // unit, 1), "num_warps": config.num_warps}
    tensors = (x, *tensors, out if bias is None else bias, out)
    tiles = triton.cdiv(outputs, config.block_outputs)
    if config.block_rows == 1:
        _one_row_kernel[(tiles, rows)](*tensors, outputs, units, *sizes, BLOCK_OUTPUTS=config.block_outputs, **flags)
        return out
    tiles *= triton.cdiv(rows, config.block_rows)
    partial = out
    if config.parts > 1:
        cells = tiles * config.parts * config.block_outputs * config.block_rows
        partial = torch.empty(cells, dtype=torch.float32, device=x.device)
    _tiles_kernel[(tiles, config.parts)](
        *tensors, partial, arrivals_of(x.device), rows, outputs, units, *sizes, BLOCK_ROWS=config.block_rows,
        BLOCK_OUTPUTS=config.block_outputs, PARTS=config.parts, num_stages=config.num_stages, **flags,
    )  # fmt: skip
    return out


def grouped_linear_fixed(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute grouped_linear_reference such that the bits of a row's result do not depend on the other rows."""
    return grouped_linear(x, weight, bias, FIXED)
