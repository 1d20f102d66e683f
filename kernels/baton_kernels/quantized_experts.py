"""Products with the quantized weights of experts, for pairs of a token and one of its experts.

Pairs are grouped by expert into blocks of rows (pair_groups.py), also in small batches, whose blocks hold one pair or
few. Each pair has a result of its own; a last kernel adds up those of a token.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .activation import gate_of_expert
from .experts import sum_kernel
from .grouped_linear import decode_units, grouped_operands
from .overlap import let_next_start, overlap_options, wait_for_inputs
from .pair_groups import PairGroups, group_pairs
from .quantize import quantize_rows
from .reference.grouped_linear import GroupedWeight
from .reference.quantized_experts import QuantizedExperts
from .reference.scaled_linear import ScaledWeight
from .size_class import size_class


class QuantizedExpertsConfig(NamedTuple):
    """Tile sizes. block_inner: columns of a step; weights with a scale for each tile have its columns instead."""

    block_rows: int
    block_outputs: int
    block_inner: int
    num_warps: int
    num_stages: int


FIXED = QuantizedExpertsConfig(16, 64, 128, 4, 3)


@triton.jit
def _grouped_step(
    acc, x_row, codes, scales, zeros, table, w_row, unit, units, code_columns, groups, UNIT: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Return acc [outputs, rows] and the product with the columns of some units."""
    low, high, column = decode_units(
        codes, scales, zeros, table, w_row, unit, units, code_columns, groups, UNIT, GROUP, KIND, FOUR, ZEROS
    )
    known = (column < units * UNIT)[:, None]
    values = tl.load(x_row + column[:, None], mask=known, other=0.0)
    acc = tl.dot(low.to(values.dtype), values, acc, input_precision="ieee")
    if FOUR:
        values = tl.load(x_row + column[:, None] + 16, mask=known, other=0.0)
        acc = tl.dot(high.to(values.dtype), values, acc, input_precision="ieee")
    return acc


@triton.jit
def _finish(
    acc, acc_up, bias, w_row, pair, output, out, outputs, GATED: tl.constexpr, BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store the results of pairs, from sums [outputs, rows] in float32."""
    if BIAS:
        acc += tl.load(bias + w_row).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            acc_up += tl.load(bias + w_row + outputs).to(tl.float32)[:, None]
        acc = gate_of_expert(acc, acc_up, out.dtype.element_ty, CLAMPED, ALPHA, LIMIT)
    at = out + pair[None, :] * outputs + output[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(output < outputs)[:, None] & (pair >= 0)[None, :])


@triton.jit
def _grouped_kernel(
    x, codes, scales, zeros, table, bias, order, block_experts, out, outputs, units, code_columns, groups,
    pairs_per_row, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    block = tl.program_id(0)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    wait_for_inputs(OVERLAP)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    halves: tl.constexpr = 2 if GATED else 1
    # Outputs beyond the last one and rows without a pair read those of others. Their results are not stored.
    w_row = expert * halves * outputs + tl.minimum(output, outputs - 1)
    x_row = x + (tl.maximum(pair, 0) // pairs_per_row)[None, :] * (units * UNIT)
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    acc_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for first in range(0, units, UNITS):
        unit = first + tl.arange(0, UNITS)
        acc = _grouped_step(acc, x_row, codes, scales, zeros, table, w_row, unit, units, code_columns, groups,
                            UNIT, GROUP, KIND, FOUR, ZEROS)  # fmt: skip
        if GATED:
            acc_up = _grouped_step(acc_up, x_row, codes, scales, zeros, table, w_row + outputs, unit, units,
                                   code_columns, groups, UNIT, GROUP, KIND, FOUR, ZEROS)  # fmt: skip
    _finish(acc, acc_up, bias, w_row, pair, output, out, outputs, GATED, BIAS, CLAMPED, ALPHA, LIMIT)


@triton.jit
def _scaled_kernel(
    x, x_scales, weight, w_scales, bias, order, block_experts, out, outputs, inner_size, groups, scale_rows,
    pairs_per_row, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    TILED: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, INTEGERS: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    block = tl.program_id(0)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INNER)
    wait_for_inputs(OVERLAP)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    row = tl.maximum(pair, 0) // pairs_per_row
    halves: tl.constexpr = 2 if GATED else 1
    # Outputs beyond the last one and rows without a pair read those of others. Their results are not stored.
    inside = tl.minimum(output, outputs - 1)
    w_row = expert * halves * outputs + inside
    w_at = weight + w_row[:, None] * inner_size + inner[None, :]
    up_at = w_at + outputs.to(tl.int64) * inner_size
    x_at = x + row[None, :] * inner_size + inner[:, None]
    w_scale_at = w_scales + (expert * scale_rows + inside // ROWS_PER_SCALE) * groups
    up_scale_at = w_scales + (expert * scale_rows + (inside + outputs) // ROWS_PER_SCALE) * groups
    x_scale_at = x_scales + row * groups
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.int32 if INTEGERS else tl.float32)
    acc_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.int32 if INTEGERS else tl.float32)
    for first in range(0, inner_size, BLOCK_INNER):
        known = first + inner < inner_size
        values = tl.load(x_at + first, mask=known[:, None], other=0.0)
        w = tl.load(w_at + first, mask=known[None, :], other=0.0)
        if INTEGERS:
            acc = tl.dot(w, values, acc, out_dtype=tl.int32)
        elif TILED:
            x_scale = tl.load(x_scale_at + first // BLOCK_INNER)[None, :]
            acc += tl.dot(w, values) * tl.load(w_scale_at + first // BLOCK_INNER)[:, None] * x_scale
        else:
            acc += tl.dot(w, values)
        if GATED:
            w_up = tl.load(up_at + first, mask=known[None, :], other=0.0)
            if INTEGERS:
                acc_up = tl.dot(w_up, values, acc_up, out_dtype=tl.int32)
            elif TILED:
                x_scale = tl.load(x_scale_at + first // BLOCK_INNER)[None, :]
                acc_up += tl.dot(w_up, values) * tl.load(up_scale_at + first // BLOCK_INNER)[:, None] * x_scale
            else:
                acc_up += tl.dot(w_up, values)
    result, result_up = acc.to(tl.float32), acc_up.to(tl.float32)
    if not TILED:
        x_scale = tl.load(x_scale_at)[None, :]
        result *= tl.load(w_scale_at)[:, None] * x_scale
        if GATED:
            result_up *= tl.load(up_scale_at)[:, None] * x_scale
    _finish(result, result_up, bias, w_row, pair, output, out, outputs, GATED, BIAS, CLAMPED, ALPHA, LIMIT)


def _config(pairs: int, experts: int) -> QuantizedExpertsConfig:
    """Return the tile sizes for a number of pairs.

    There are only two, for steps that CUDA graphs hold and for the largest steps. Both are compiled at start; any other
    one would be compiled while requests are served.
    """
    return QuantizedExpertsConfig(16 if pairs <= 16 * experts else 64, 64, 128, 4, 3)


def run_quantized_experts(
    x: torch.Tensor,
    held: QuantizedExperts,
    weights: torch.Tensor,
    experts: torch.Tensor,
    config: QuantizedExpertsConfig | None = None,
) -> torch.Tensor:
    """Compute quantized_experts_reference for weights in codes. All tensors are contiguous. config: None = by the
    sizes."""
    tokens, count = experts.shape
    assert not isinstance(held.gate_up, torch.Tensor)
    assert not isinstance(held.down, torch.Tensor)
    num_experts, both, _ = held.gate_up.codes.shape
    hidden = x.shape[1]
    config = config or _config(size_class(tokens) * count, num_experts)
    groups = group_pairs(experts, num_experts, config.block_rows)
    inner, results = x.new_empty(tokens * count, both // 2), x.new_empty(tokens * count, hidden)
    # The rows of x belong to tokens, those of `inner` to pairs.
    _product(x, held.gate_up, held.gate_up_bias, held, groups, inner, count, True, config)
    _product(inner, held.down, held.down_bias, held, groups, results, 1, False, config)
    out = torch.empty_like(x)
    block = min(triton.next_power_of_2(hidden), 1024)
    sum_kernel[(tokens, triton.cdiv(hidden, block))](
        results, weights, out, SIZE=hidden, BLOCK=block, COUNT=count, num_warps=4, **overlap_options(x.device)
    )
    return out


def _product(
    x: torch.Tensor,
    weight: GroupedWeight | ScaledWeight,
    bias: torch.Tensor | None,
    held: QuantizedExperts,
    groups: PairGroups,
    out: torch.Tensor,
    pairs_per_row: int,
    gated: bool,
    config: QuantizedExpertsConfig,
) -> None:
    """Store the products of rows x with the weights of the experts of their pairs, [pairs, outputs], in out."""
    clamp, outputs = held.clamp, out.shape[1]
    flags: dict[str, Any] = {
        "BLOCK_ROWS": config.block_rows, "BLOCK_OUTPUTS": config.block_outputs, "GATED": gated,
        "BIAS": bias is not None, "CLAMPED": clamp is not None, "ALPHA": clamp.alpha if clamp else 1.0,
        "LIMIT": clamp.limit if clamp else 0.0, "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    grid = len(groups.block_experts), triton.cdiv(outputs, config.block_outputs)
    added = out if bias is None else bias
    if isinstance(weight, GroupedWeight):
        tensors, sizes, kinds = grouped_operands(weight)
        units = max(config.block_inner // kinds["UNIT"], 1)
        _grouped_kernel[grid](
            x, *tensors, added, *groups, out, outputs, *sizes, pairs_per_row, UNITS=units, **kinds, **flags
        )
        return
    assert held.rows is not None
    rows = quantize_rows(x, held.rows)
    tiled = weight.tile[1] < x.shape[1]
    _scaled_kernel[grid](
        rows.codes, rows.scales, weight.codes, weight.scales, added, *groups, out, outputs, x.shape[1],
        rows.scales.shape[1], weight.scales.shape[1], pairs_per_row,
        BLOCK_INNER=weight.tile[1] if tiled else config.block_inner, TILED=tiled, ROWS_PER_SCALE=weight.tile[0],
        INTEGERS=weight.codes.dtype == torch.int8, **flags, **overlap_options(x.device),
    )  # fmt: skip


def run_quantized_experts_fixed(
    x: torch.Tensor, held: QuantizedExperts, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Compute quantized_experts_reference such that the bits of a token's result do not depend on the others."""
    return run_quantized_experts(x, held, weights, experts, FIXED)
