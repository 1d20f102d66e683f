"""Products of rows in 8 bits with weights in 8 bits.

For one row each program multiplies elementwise. For more rows tiles go through the tensor cores; the inner dimension is
cut into parts where there would be too few programs. Sums of int8 are exact in int32. Tensor cores accumulate FP8 with
fewer bits than float32. For few rows the sums are therefore accumulated in float32 after every step, which costs no
time there. In large batches they stay in the tensor cores, as in the products of torch.

Torch also has products with a scale for each row and output: complete ones for FP8 (CUTLASS, cuBLAS), and unscaled
integer sums for int8, which a kernel here scales.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .activation import gate_mul, silu_mul
from .hopper_numbers import fits_hopper_scaled, hopper_scaled
from .kernel_configs import LinearConfig, Product
from .overlap import LINE, let_next_start, lines_ahead, overlap_options, prefetch, wait_for_inputs
from .parts import add_parts, arrivals_of, parts_for
from .reference.quantize import QuantizedRows
from .reference.scaled_linear import ScaledWeight
from .tile_order import tile_of
from .tuning import compile_first, quantized_config
from .unmeasured import coded_candidates
from .unmeasured_hopper import hopper_candidates, scaled_numbers
from .unmeasured_products import random_rows, watch

# Up to this many rows, FP8 products that were not measured use the kernels here and not torch.
_FEW_ROWS = 64
FIXED = LinearConfig(64, 64, 128, 1, 4, 3)
# The configurations to measure for one row, and for many.
_ONE_ROW = (LinearConfig(1, 4, 2048, 1, 4, 1), LinearConfig(1, 2, 4096, 1, 8, 1), LinearConfig(1, 8, 1024, 1, 4, 1))
_MANY_ROWS = (
    LinearConfig(128, 128, 128, 1, 8, 3), LinearConfig(128, 256, 128, 1, 8, 3), LinearConfig(64, 256, 128, 1, 4, 4)
)  # fmt: skip


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
def load_tile(pointers, known, EVEN: tl.constexpr):
    """Load a tile. known: a mask of the elements that exist. EVEN: all of them exist."""
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=known, other=0.0)
    return tile


@triton.jit
def _one_row_kernel(
    x, x_scales, zeros, weight, w_scales, sums, bias, out, outputs, groups, INNER: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr, INTEGERS: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    real = output < outputs
    w_row = tl.minimum(output, outputs - 1)
    group = tl.arange(0, GROUPS)
    inner = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    w_at = weight + w_row.to(tl.int64)[:, None, None] * INNER + inner[None, :, :]
    step: tl.constexpr = GROUPS * GROUP
    even: tl.constexpr = INNER % step == 0
    # The first weights are fetched while the preceding kernel still runs.
    w = load_tile(w_at, (inner < INNER)[None, :, :], even)
    wait_for_inputs(OVERLAP)
    acc = tl.zeros([BLOCK_OUTPUTS, GROUPS, GROUP], tl.int32 if INTEGERS else tl.float32)
    for first in tl.static_range(0, INNER, step):
        known = first + inner < INNER
        if first > 0:
            w = load_tile(w_at + first, known[None, :, :], even)
        values = load_tile(x + row * INNER + first + inner, known, even)
        if INTEGERS:
            acc += w.to(tl.int32) * values.to(tl.int32)[None, :, :]
        elif TILED:
            at = first // GROUP + group
            scale = tl.load(x_scales + row * groups + at, mask=at < groups, other=0.0)[None, :]
            w_scale_at = w_scales + (w_row // ROWS_PER_SCALE)[:, None] * groups + at[None, :]
            scale *= tl.load(w_scale_at, mask=(at < groups)[None, :], other=0.0)
            acc += w.to(tl.float32) * values.to(tl.float32)[None, :, :] * scale[:, :, None]
        else:
            acc += w.to(tl.float32) * values.to(tl.float32)[None, :, :]
    total = tl.sum(tl.sum(acc, axis=2), axis=1)[:, None]
    rows = row + tl.arange(0, 1)
    result = _finish(total, x_scales, zeros, w_scales, sums, bias, rows, output, tl.arange(0, 1) < 1, real, TILED,
                     ROWS_PER_SCALE, ZEROS, BIAS)  # fmt: skip
    tl.store(out + row * outputs + output[:, None], result.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def add_step(
    acc, values, w_at, known, w_scale_at, x_scale, INTEGERS: tl.constexpr, TILED: tl.constexpr, EVEN: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """Return acc [outputs, rows] and the product of a tile of weights with values [inner, rows].

    w_at: pointers to the weights, [outputs, inner]. known: whether columns exist, [inner]. w_scale_at, x_scale: with
    TILED, pointers to the scales of the weights, [outputs], and the scales of the rows, [rows]. INSIDE: sums stay in
    the tensor cores.
    """
    w = load_tile(w_at, known[None, :], EVEN)
    if INTEGERS:
        acc = tl.dot(w, values, acc, out_dtype=tl.int32)
    elif TILED:
        acc += tl.dot(w, values) * tl.load(w_scale_at)[:, None] * x_scale[None, :]
    elif INSIDE:
        acc = tl.dot(w, values, acc)
    else:
        acc += tl.dot(w, values)
    return acc


# One compiled kernel serves every number of rows.
@triton.jit(do_not_specialize=["rows"])
def _tiles_kernel(
    x, x_scales, zeros, weight, w_scales, sums, bias, out, partial, arrivals, rows, outputs, inner_size, groups,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr, SPLITS: tl.constexpr,
    TILED: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, INTEGERS: tl.constexpr, ZEROS: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    part = tl.program_id(1)
    row_tile, output_tile = tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(outputs, BLOCK_OUTPUTS))
    output = output_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row = (row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    real, here = output < outputs, row < rows
    # Outputs beyond the last one read its weights, and rows beyond the last one its values, so that loads need no mask.
    # Their results are not stored.
    w_row, x_row = tl.minimum(output, outputs - 1).to(tl.int64), tl.minimum(row, rows - 1)
    steps = tl.cdiv(tl.cdiv(inner_size, BLOCK_INNER), SPLITS)
    inner = part * steps * BLOCK_INNER + tl.arange(0, BLOCK_INNER)
    w_at = weight + w_row[:, None] * inner_size + inner[None, :]
    up_at = w_at + tl.cast(outputs, tl.int64) * inner_size
    x_at = x + x_row[None, :] * inner_size + inner[:, None]
    w_scale_at = w_scales + w_row // ROWS_PER_SCALE * groups + part * steps
    up_scale_at = w_scales + (w_row + outputs) // ROWS_PER_SCALE * groups + part * steps
    x_scale_at = x_scales + x_row * groups + part * steps
    if AHEAD > 0:
        line = part * steps * BLOCK_INNER + tl.arange(0, AHEAD) * LINE
        line = w_row[:, None] * inner_size + tl.minimum(line, inner_size - 1)[None, :]
        prefetch(weight + line)
        if GATED:
            prefetch(weight + tl.cast(outputs, tl.int64) * inner_size + line)
    wait_for_inputs(OVERLAP)
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.int32 if INTEGERS else tl.float32)
    acc_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.int32 if INTEGERS else tl.float32)
    for step in range(0, steps):
        known = inner + step * BLOCK_INNER < inner_size
        values = load_tile(x_at, known[:, None], EVEN)
        at = tl.minimum(step, groups - 1 - part * steps) if TILED else 0
        x_scale = tl.load(x_scale_at + at)
        acc = add_step(acc, values, w_at, known, w_scale_at + at, x_scale, INTEGERS, TILED, EVEN, BLOCK_ROWS > 64)
        if GATED:
            acc_up = add_step(acc_up, values, up_at, known, up_scale_at + at, x_scale, INTEGERS, TILED, EVEN,
                              BLOCK_ROWS > 64)  # fmt: skip
        w_at += BLOCK_INNER
        up_at += BLOCK_INNER
        x_at += BLOCK_INNER
    acc, last = add_parts(acc, partial, arrivals, tl.program_id(0), part, SPLITS)
    if last:
        result = _finish(acc, x_scales, zeros, w_scales, sums, bias, row, output, here, real, TILED,
                         ROWS_PER_SCALE, ZEROS, BIAS)  # fmt: skip
        if GATED:
            up = _finish(acc_up, x_scales, zeros, w_scales, sums, bias, row, output + outputs, here, real, TILED,
                         ROWS_PER_SCALE, ZEROS, BIAS)  # fmt: skip
            result = silu_mul(result, up, out.dtype.element_ty)
        at = out + row[None, :] * outputs + output[:, None]
        tl.store(at, result.to(out.dtype.element_ty), mask=real[:, None] & here[None, :])


@triton.jit
def _finish_kernel(
    totals, x_scales, zeros, w_scales, sums, bias, out, outputs, BLOCK: tl.constexpr, ZEROS: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = output < outputs
    wait_for_inputs(OVERLAP)
    total = tl.load(totals + row * outputs + output, mask=real, other=0)[:, None]
    result = _finish(total, x_scales, zeros, w_scales, sums, bias, row + tl.arange(0, 1), output, tl.arange(0, 1) < 1,
                     real, False, 1, ZEROS, BIAS)  # fmt: skip
    tl.store(out + row * outputs + output[:, None], result.to(out.dtype.element_ty), mask=real[:, None])


def by_torch(x: QuantizedRows, weight: ScaledWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Compute scaled_linear_reference by a product of torch, for operands that fits_torch."""
    if weight.codes.dtype != torch.int8:
        return torch._scaled_mm(
            x.codes, weight.codes.t(), x.scales, weight.scales.t(), bias, out_dtype=dtype, use_fast_accum=True
        )
    totals = torch._int_mm(x.codes, weight.codes.t())
    rows, outputs = totals.shape
    out = torch.empty(rows, outputs, dtype=dtype, device=totals.device)
    zeros, sums = (totals, totals) if x.zeros is None else (x.zeros, weight.sums)
    block = min(triton.next_power_of_2(outputs), 2048)
    _finish_kernel[(rows, triton.cdiv(outputs, block))](
        totals, x.scales, zeros, weight.scales, sums, totals if bias is None else bias, out, outputs, BLOCK=block,
        ZEROS=x.zeros is not None, BIAS=bias is not None, num_warps=4, **overlap_options(out.device),
    )  # fmt: skip
    return out


def fits_torch(rows: int, weight: ScaledWeight, dtype: torch.dtype) -> bool:
    """Whether torch has the product: with a scale for each row and output, on GPUs of compute capability 9.0."""
    outputs, inner = weight.codes.shape
    if not weight.codes.is_cuda or weight.tile != (1, inner) or outputs % 16 or inner % 16:
        return False
    if weight.codes.dtype == torch.int8:
        return rows > 16
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.codes.device) >= (9, 0)


def _default(rows: int, outputs: int, inner: int) -> LinearConfig:
    """Return the tile sizes for a product that was not measured: as many rows as there are, and enough programs."""
    if rows == 1:
        return LinearConfig(1, 4, 2048, 1, 4, 1)
    if rows > _FEW_ROWS:
        return LinearConfig(128, 128, 128, 1, 8, 3)
    block_rows = max(triton.next_power_of_2(rows), 16)
    parts = parts_for(triton.cdiv(outputs, 64), triton.cdiv(inner, 128))
    return LinearConfig(block_rows, 64, 128, parts, 4, 4)


def _default_fp8(rows: int, outputs: int, inner: int) -> LinearConfig | None:
    return None if rows > _FEW_ROWS else _default(rows, outputs, inner)


def format_of(weight: ScaledWeight) -> str:
    """Return the name of a weight's format in the tables of measured configurations."""
    if weight.codes.dtype == torch.int8:
        return "int8"
    return "fp8" if weight.tile == (1, weight.codes.shape[-1]) else "fp8_tiles"


def scaled_linear(
    x: QuantizedRows,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    gated: bool = False,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """Compute scaled_linear_reference. All tensors are contiguous. Scales of x cover as many columns as those of the
    weight. config: None = the fastest known."""
    rows, inner = x.codes.shape
    outputs = weight.codes.shape[0]
    tiled = weight.tile[1] < inner
    if config is None:
        format = format_of(weight)
        watch(_Codes(dtype, x.zeros is not None), weight, Product(outputs, inner, gated))
        shape = format, outputs, inner, gated, x.codes.device
        for each in compile_first(*shape):
            scaled_linear(_first_row(x), weight, bias, dtype, gated, each)
        config = quantized_config(rows, *shape, default=_default_fp8 if format == "fp8" else _default)
        if config is None and fits_torch(rows, weight, dtype):
            result = by_torch(x, weight, bias, dtype)
            return gate_mul(result, "silu") if gated else result
        config = config or _default(rows, outputs, inner)
    if gated:
        outputs //= 2
        # The one-row kernel has no gate.
        config = FIXED if config.block_rows == 1 else config
    out = torch.empty(rows, outputs, dtype=dtype, device=x.codes.device)
    if config.hopper:
        return hopper_scaled(x, weight, bias, gated, config, out)
    if gated:
        # The gate could only be computed after the parts of gates and ups are added up.
        config = config._replace(splits=1)
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
            *operands, outputs, x.scales.shape[1], INNER=inner, BLOCK_OUTPUTS=config.block_outputs,
            GROUPS=max(config.block_inner // group, 1), GROUP=group, **flags,
        )  # fmt: skip
        return out
    ahead = lines_ahead(outputs, inner, gated, config, out.device) if config.block_rows <= _FEW_ROWS else 0
    tiles *= triton.cdiv(rows, config.block_rows)
    partial = out
    if config.splits > 1:
        cells = tiles * config.splits * config.block_outputs * config.block_rows
        partial = torch.empty(cells, dtype=torch.int32 if integers else torch.float32, device=out.device)
    _tiles_kernel[(tiles, config.splits)](
        *operands, partial, arrivals_of(out.device), rows, outputs, inner, x.scales.shape[1],
        BLOCK_ROWS=config.block_rows, BLOCK_OUTPUTS=config.block_outputs, BLOCK_INNER=block_inner,
        SPLITS=config.splits, GATED=gated, EVEN=inner % (block_inner * config.splits) == 0,
        AHEAD=ahead, num_stages=config.num_stages, **flags,
    )  # fmt: skip
    return out


class _Codes(NamedTuple):
    """Implements Kind. dtype: of the results. zeros: rows have them."""

    dtype: torch.dtype
    zeros: bool

    @property
    def rows(self) -> tuple[int, ...]:
        return 1, 16, 32, 64, 128, 256, 2048

    @property
    def trusted(self) -> LinearConfig:
        return FIXED

    def numbers(self, weight: ScaledWeight) -> torch.Tensor:
        return weight.codes

    def format(self, weight: ScaledWeight) -> str:
        return format_of(weight)

    def candidates(self, weight: ScaledWeight, shape: Product, rows: int) -> list[LinearConfig | None]:
        found: list[LinearConfig | None] = []
        if fits_torch(rows, weight, self.dtype):
            found.append(None)
        tiled, on_hopper = weight.tile[1] < shape.inner, fits_hopper_scaled(weight)
        if on_hopper:
            found += hopper_candidates(scaled_numbers(weight), rows, shape, weight.codes.device)
        if rows > 128:
            # Gates and ups are two tiles of weights.
            fitting = [config for config in _MANY_ROWS if not shape.gated or config.block_outputs <= 128]
            others: list[LinearConfig | None] = [
                config._replace(block_inner=weight.tile[1]) if tiled else config for config in fitting
            ]
            return found if on_hopper else found + others
        if rows == 1 and not shape.gated:
            found += [config for config in _ONE_ROW if config.block_inner <= shape.inner]
        found.append(FIXED if rows == 1 else _default(rows, shape.outputs, shape.inner))
        tiles = coded_candidates(rows, shape, weight.codes.device)
        if on_hopper:
            # Where Hopper's own kernel can run, only narrow tiles of this kernel are sometimes faster.
            tiles = [each for each in tiles if each.block_outputs == 64]
        found += [each for each in tiles if not tiled or each.block_inner == weight.tile[1]]
        return list(dict.fromkeys(found))

    def inputs(self, weight: ScaledWeight, shape: Product, rows: int) -> QuantizedRows:
        codes, groups = weight.codes, weight.scales.shape[1]
        random = random_rows(rows, shape.inner, torch.float32, codes.device) * 40
        # Each row and group has a different scale, and each row a different zero.
        scales = torch.linspace(0.5, 1.5, rows * groups, device=codes.device).view(rows, groups)
        zeros = torch.arange(rows, dtype=torch.int32, device=codes.device) % 100 if self.zeros else None
        return QuantizedRows(random.clamp(-127, 127).to(codes.dtype), scales, zeros)

    def compute(
        self, weight: ScaledWeight, shape: Product, inputs: QuantizedRows, config: LinearConfig | None
    ) -> torch.Tensor:
        if config is not None:
            return scaled_linear(inputs, weight, None, self.dtype, shape.gated, config)
        result = by_torch(inputs, weight, None, self.dtype)
        return gate_mul(result, "silu") if shape.gated else result


def _first_row(x: QuantizedRows) -> QuantizedRows:
    return x._replace(codes=x.codes[:1], scales=x.scales[:1], zeros=None if x.zeros is None else x.zeros[:1])


def scaled_linear_fixed(
    x: QuantizedRows, weight: ScaledWeight, bias: torch.Tensor | None, dtype: torch.dtype, gated: bool = False
) -> torch.Tensor:
    """Compute scaled_linear_reference such that the bits of a row's result do not depend on the other rows."""
    return scaled_linear(x, weight, bias, dtype, gated, FIXED)
