"""Products with weights of 4 or 8 bits in groups, which kernels decode while they multiply.

Most 4-bit weights have separate kernels on Hopper (hopper_few_rows.py and hopper_codes.py). For other weights and GPUs
there are two kernels: one multiplies a single row elementwise, and the other multiplies tiles with the tensor cores.
Large batches are bound by arithmetic, so for them the weight is dequantized into memory, and cuBLAS multiplies.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .activation import gate_mul, silu_mul
from .grouped_codes import columns_of, decode, grouped_operands, load_codes, load_scales, multiply, numbers_in_order
from .hopper_codes import has_hopper_kernel, hopper_codes
from .hopper_few_rows import few_rows_candidates, few_rows_codes
from .kernel_configs import LinearConfig, Product
from .overlap import LINE, let_next_start, lines_ahead, prefetch, wait_for_inputs
from .parts import add_parts, arrivals_of, parts_for
from .reference.grouped_linear import FOUR_BITS, GroupedWeight
from .tuning import compile_first, quantized_config
from .unmeasured_hopper import CODES, hopper_candidates, unmeasured_hopper
from .unmeasured_products import random_rows, watch

# Bytes of dequantized weights that stay in the L2 cache until they are multiplied.
_CACHED_BYTES = 16 << 20
# Products of more rows go to cuBLAS if they were not measured.
_FEW_ROWS = 128
FIXED = LinearConfig(64, 64, 128, 1, 4, 3)
# The configurations to measure for one row.
_ONE_ROW = (LinearConfig(1, 4, 1024, 1, 4, 1), LinearConfig(1, 4, 2048, 1, 4, 1), LinearConfig(1, 8, 1024, 1, 4, 1))


@triton.jit
def _prefetch_rows(pointer, w_row, first, columns, LINES: tl.constexpr):
    """Prefetch LINES cache lines of each row of a matrix from its column `first` on."""
    line_columns: tl.constexpr = LINE * 8 // pointer.dtype.element_ty.primitive_bitwidth
    line = tl.minimum(first + tl.arange(0, LINES) * line_columns, columns - 1)
    prefetch(pointer + w_row[:, None] * columns + line[None, :])


@triton.jit
def _prefetch_weight(codes, scales, beside, w_row, first, units, code_columns, groups, AHEAD: tl.constexpr,
                     BESIDE: tl.constexpr):  # fmt: skip
    """Prefetch AHEAD cache lines of each row's codes from its unit `first` on, and its scales there."""
    _prefetch_rows(codes, w_row, first * (code_columns // units), code_columns, AHEAD)
    _prefetch_rows(scales, w_row, first * groups // units, groups, 2)
    if BESIDE == "zeros":
        _prefetch_rows(beside, w_row, first * groups // units, groups, 1)


@triton.jit
def _row_sums(
    x, codes, scales, beside, table, bias, w_row, units, code_columns, groups, UNITS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr, BESIDE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return the products of one row with rows of the weight, [outputs] float32."""
    size: tl.constexpr = UNIT // 4 if FOUR else UNIT
    acc = tl.zeros([w_row.shape[0], UNITS, size], tl.float32)
    for first in range(0, units, UNITS):
        words = load_codes(codes, w_row, first, units, code_columns, UNITS, UNIT, FOUR, False)
        words = words.reshape(w_row.shape[0], UNITS, size)
        scale, zero = load_scales(scales, beside, w_row, first, units, groups, UNITS, UNIT, GROUP, FOUR, BESIDE)
        scale, zero = scale[:, :, None], zero[:, :, None]
        second = zero if BESIDE == "factors" else scale
        at = x + columns_of(first, UNITS, UNIT, FOUR)
        known = (first + tl.arange(0, UNITS) < units)[:, None]
        w1, w2, w3, w4 = decode(words, zero, table, KIND, FOUR)
        product = w1 * tl.load(at, mask=known, other=0.0).to(tl.float32)[None, :, :]
        if FOUR:
            product += w2 * tl.load(at + 8, mask=known, other=0.0).to(tl.float32)[None, :, :]
            if BESIDE == "factors":
                acc += product * scale
                product = tl.zeros_like(product)
            product += w3 * tl.load(at + 16, mask=known, other=0.0).to(tl.float32)[None, :, :]
            product += w4 * tl.load(at + 24, mask=known, other=0.0).to(tl.float32)[None, :, :]
        acc += product * second
    result = tl.sum(tl.sum(acc, axis=2), axis=1)
    if BIAS:
        result += tl.load(bias + w_row).to(tl.float32)
    return result


@triton.jit
def _one_row_kernel(
    x, codes, scales, beside, table, bias, out, outputs, units, code_columns, groups, BLOCK_OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr,
    BESIDE: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    x += tl.program_id(1).to(tl.int64) * units * UNIT
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    w_row = tl.minimum(output, outputs - 1).to(tl.int64)
    if AHEAD > 0:
        _prefetch_weight(codes, scales, beside, w_row, 0, units, code_columns, groups, AHEAD, BESIDE)
        if GATED:
            _prefetch_weight(codes, scales, beside, w_row + outputs, 0, units, code_columns, groups, AHEAD, BESIDE)
    wait_for_inputs(OVERLAP)
    result = _row_sums(x, codes, scales, beside, table, bias, w_row, units, code_columns, groups, UNITS, UNIT, GROUP,
                       KIND, FOUR, BESIDE, BIAS)  # fmt: skip
    if GATED:
        up = _row_sums(x, codes, scales, beside, table, bias, w_row + outputs, units, code_columns, groups, UNITS, UNIT,
                       GROUP, KIND, FOUR, BESIDE, BIAS)  # fmt: skip
        result = silu_mul(result, up, out.dtype.element_ty)
    at = out + tl.program_id(1).to(tl.int64) * outputs + output
    tl.store(at, result.to(out.dtype.element_ty), mask=output < outputs)


# One compiled kernel serves every number of rows.
@triton.jit(do_not_specialize=["rows"])
def _tiles_kernel(
    x, codes, scales, beside, table, bias, out, partial, arrivals, rows, outputs, units, code_columns, groups,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr, BESIDE: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    output = (tile // row_tiles) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row = ((tile % row_tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    here = (row < rows)[None, :]
    # Outputs beyond the last one read its weights, so that loads need no mask. Their results are not stored.
    w_row = tl.minimum(output, outputs - 1).to(tl.int64)
    x_row = x + row[None, :] * units * UNIT
    steps = tl.cdiv(tl.cdiv(units, UNITS), SPLITS)
    first = part * steps * UNITS
    if AHEAD > 0:
        _prefetch_weight(codes, scales, beside, w_row, first, units, code_columns, groups, AHEAD, BESIDE)
        if GATED:
            _prefetch_weight(codes, scales, beside, w_row + outputs, first, units, code_columns, groups, AHEAD, BESIDE)
    wait_for_inputs(OVERLAP)
    acc, acc_up = multiply(
        x_row, here, codes, scales, beside, table, w_row, w_row + outputs, first, steps, units, code_columns, groups,
        UNITS, UNIT, GROUP, KIND, FOUR, BESIDE, EVEN, GATED,
    )  # fmt: skip
    if GATED and SPLITS > 1:
        both = tl.join(acc, acc_up).reshape(BLOCK_OUTPUTS, 2 * BLOCK_ROWS)
        both, last = add_parts(both, partial, arrivals, tile, part, SPLITS)
        acc, acc_up = tl.split(both.reshape(BLOCK_OUTPUTS, BLOCK_ROWS, 2))
    else:
        acc, last = add_parts(acc, partial, arrivals, tile, part, SPLITS)
    if last:
        if BIAS:
            acc += tl.load(bias + w_row).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                acc_up += tl.load(bias + w_row + outputs).to(tl.float32)[:, None]
            acc = silu_mul(acc, acc_up, out.dtype.element_ty)
        at = out + row[None, :] * outputs + output[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=(output < outputs)[:, None] & here)


@triton.jit
def _dequantize_kernel(
    codes, scales, beside, table, out, outputs, units, code_columns, groups, BLOCK_OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr,
    BESIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    w_row = tl.minimum(output, outputs - 1).to(tl.int64)
    first = tl.program_id(1) * UNITS
    words = load_codes(codes, w_row, first, units, code_columns, UNITS, UNIT, FOUR, False)
    scale, zero = load_scales(scales, beside, w_row, first, units, groups, UNITS, UNIT, GROUP, FOUR, BESIDE)
    numbers = numbers_in_order(words, scale, zero, table, out.dtype.element_ty, KIND, FOUR, BESIDE)
    column = first * UNIT + tl.arange(0, UNITS * UNIT)
    known = (output < outputs)[:, None] & (column < units * UNIT)[None, :]
    # Earlier kernels may still read the memory into which the weights are written.
    wait_for_inputs(OVERLAP)
    tl.store(out + w_row[:, None] * units * UNIT + column[None, :], numbers, mask=known)


def dequantize_grouped(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Compute dequantize_grouped_reference."""
    tensors, (units, *sizes), flags = grouped_operands(weight, 1024)
    flags["UNITS"] = min(triton.next_power_of_2(units), 1024 // flags["UNIT"])
    outputs = weight.codes.shape[0]
    out = torch.empty(outputs, weight.inputs, dtype=dtype, device=weight.codes.device)
    _dequantize_kernel[(triton.cdiv(outputs, 8), triton.cdiv(units, flags["UNITS"]))](
        *tensors, out, outputs, units, *sizes, BLOCK_OUTPUTS=8, num_warps=4, **flags
    )
    return out


def by_numbers(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """Compute grouped_linear_reference with cuBLAS, dequantizing the weights of some outputs at a time."""
    (outputs, _), rows = weight.codes.shape, x.shape[0]
    result = x.new_empty(rows, outputs)
    some = max(_CACHED_BYTES // (weight.inputs * x.element_size()) // 128 * 128, 128)
    for first in range(0, outputs, some):
        part = slice(first, first + some)
        numbers = dequantize_grouped(weight.at(part), x.dtype)
        if bias is None:
            torch.mm(x, numbers.t(), out=result[:, part])
        else:
            torch.addmm(bias[part], x, numbers.t(), out=result[:, part])
    return gate_mul(result, "silu") if gated else result


def _default(rows: int, outputs: int, inner: int) -> LinearConfig | None:
    """Return the tile sizes for a product that was not measured: as many rows as there are, and enough programs."""
    if rows > _FEW_ROWS:
        return None
    block_rows = max(triton.next_power_of_2(rows), 16)
    parts = parts_for(triton.cdiv(outputs, 64), triton.cdiv(inner, 128))
    return LinearConfig(block_rows, 64, 128, parts, 4, 4)


def grouped_format(weight: GroupedWeight) -> str:
    """Return the name of a weight's format in the tables of measured configurations."""
    # Products of 8-bit rows with 8-bit weights are in scaled_linear.py.
    if weight.factors is not None:
        return f"{weight.kind}_halves"
    return weight.kind if weight.kind in FOUR_BITS else f"{weight.kind}_groups"


def grouped_linear(
    x: torch.Tensor,
    weight: GroupedWeight,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """Compute grouped_linear_reference. All tensors are contiguous. config: None = the fastest known."""
    rows, inner = x.shape
    outputs = weight.codes.shape[0]
    if config is None:
        product = Product(outputs, inner, gated)
        watch(_Groups(x.dtype), weight, product)
        name = grouped_format(weight), *product, x.device
        for each in compile_first(*name):
            grouped_linear(x[:1], weight, bias, gated, each)
        default: Callable[[int, int, int], LinearConfig | None] = _default
        if has_hopper_kernel(weight, x.dtype):
            default = partial(unmeasured_hopper, CODES, gated=gated, device=x.device)
        config = quantized_config(rows, *name, default=default)
        if config is None:
            return by_numbers(x, weight, bias, gated)
    if gated:
        outputs //= 2
    out = x.new_empty(rows, outputs)
    if config.hopper:
        compute = few_rows_codes if config.block_rows == 1 else hopper_codes
        return compute(x, weight, bias, gated, config, out)
    tensors, (units, *sizes), flags = grouped_operands(weight, config.block_inner)
    tensors = (x, *tensors, out if bias is None else bias, out)
    tiles = triton.cdiv(outputs, config.block_outputs)
    ahead = lines_ahead(outputs, weight.codes[0].nbytes, gated, config, x.device)
    flags |= {"GATED": gated, "BIAS": bias is not None, "AHEAD": ahead, "num_warps": config.num_warps}
    if config.block_rows == 1:
        _one_row_kernel[(tiles, rows)](*tensors, outputs, units, *sizes, BLOCK_OUTPUTS=config.block_outputs, **flags)
        return out
    tiles *= triton.cdiv(rows, config.block_rows)
    parts = out
    if config.splits > 1:
        cells = tiles * config.splits * config.block_outputs * config.block_rows * (2 if gated else 1)
        parts = torch.empty(cells, dtype=torch.float32, device=x.device)
    _tiles_kernel[(tiles, config.splits)](
        *tensors, parts, arrivals_of(x.device), rows, outputs, units, *sizes, BLOCK_ROWS=config.block_rows,
        BLOCK_OUTPUTS=config.block_outputs, SPLITS=config.splits,
        EVEN=units % (flags["UNITS"] * config.splits) == 0, num_stages=config.num_stages, **flags,
    )  # fmt: skip
    return out


class _Groups(NamedTuple):
    """Implements Kind. dtype: of the inputs."""

    dtype: torch.dtype

    @property
    def rows(self) -> tuple[int, ...]:
        return 1, 8, 16, 32, 64, 128, 256, 2048

    @property
    def trusted(self) -> None:
        return None

    def numbers(self, weight: GroupedWeight) -> torch.Tensor:
        return weight.codes

    def format(self, weight: GroupedWeight) -> str:
        return grouped_format(weight)

    def candidates(self, weight: GroupedWeight, shape: Product, rows: int) -> list[LinearConfig | None]:
        if has_hopper_kernel(weight, self.dtype):
            tiles = hopper_candidates(CODES, rows, shape, weight.codes.device)
            return [*few_rows_candidates(rows, shape), *tiles]
        found: list[LinearConfig | None] = [_default(min(rows, _FEW_ROWS), shape.outputs, shape.inner)]
        if rows == 1:
            found += [config for config in _ONE_ROW if config.block_inner <= shape.inner]
        if rows > 64:
            found.append(None)
        return found

    def inputs(self, weight: GroupedWeight, shape: Product, rows: int) -> torch.Tensor:
        return random_rows(rows, shape.inner, self.dtype, weight.codes.device)

    def compute(
        self, weight: GroupedWeight, shape: Product, inputs: torch.Tensor, config: LinearConfig | None
    ) -> torch.Tensor:
        if config is None:
            return by_numbers(inputs, weight, None, shape.gated)
        return grouped_linear(inputs, weight, None, shape.gated, config)


def grouped_linear_fixed(
    x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """Compute grouped_linear_reference such that the bits of a row's result do not depend on the other rows."""
    return grouped_linear(x, weight, bias, gated, FIXED._replace(hopper=has_hopper_kernel(weight, x.dtype)))
