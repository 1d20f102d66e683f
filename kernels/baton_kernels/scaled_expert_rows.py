"""MoE layers with weights and rows of 8 bits, for few tokens.

A program multiplies one row at a time with weights of its expert, as in experts.py, so that no pairs are grouped and
only the weights of chosen experts are read.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .activation import gate_options, unit_of_expert
from .kernel_configs import ExpertsConfig, ProductConfig
from .overlap import let_next_start, overlap_options, wait_for_inputs
from .quantize import quantize_rows
from .reference.quantize import QuantizedRows
from .reference.quantized_experts import QuantizedExperts, Rounding
from .reference.scaled_linear import ScaledWeight
from .scaled_linear import load_tile


@triton.jit
def _add_step(acc, w, values, w_scale_at, x_scale, INTEGERS: tl.constexpr, TILED: tl.constexpr):
    """Return acc plus the product of codes, added up along their last axis. With TILED, sums have scales."""
    if INTEGERS:
        sums = tl.sum(w.to(tl.int32) * values.to(tl.int32), axis=-1)
    else:
        sums = tl.sum(w.to(tl.float32) * values.to(tl.float32), axis=-1)
    if TILED:
        sums = sums.to(tl.float32) * (tl.load(w_scale_at) * x_scale)
    return acc + sums


@triton.jit
def _gate_up_kernel(
    x, x_scales, weight, w_scales, bias, experts, out, outputs, groups, scale_rows, INNER: tl.constexpr,
    COUNT: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    INTEGERS: tl.constexpr, TILED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, GATE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    pair = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INNER)
    # Outputs beyond the last one read its weights. Their results are not stored.
    inside = tl.minimum(output, outputs - 1)
    wait_for_inputs(OVERLAP)
    expert = tl.load(experts + pair).to(tl.int64)
    if expert < 0:
        return
    row = pair // COUNT
    halves: tl.constexpr = 2 if GATED else 1
    w_row = expert * halves * outputs + inside
    at = weight + w_row[:, None] * INNER + inner[None, :]
    up_at = at + tl.cast(outputs, tl.int64) * INNER
    scale_at = w_scales + (expert * scale_rows + inside // ROWS_PER_SCALE) * groups
    up_scale_at = w_scales + (expert * scale_rows + (inside + outputs) // ROWS_PER_SCALE) * groups
    acc = tl.zeros([BLOCK_OUTPUTS], tl.int32 if INTEGERS and not TILED else tl.float32)
    acc_up = tl.zeros([BLOCK_OUTPUTS], tl.int32 if INTEGERS and not TILED else tl.float32)
    even: tl.constexpr = INNER % BLOCK_INNER == 0
    for first in tl.range(0, INNER, BLOCK_INNER, loop_unroll_factor=4):
        known = first + inner < INNER
        group = first // BLOCK_INNER if TILED else 0
        w = load_tile(at + first, known[None, :], even)
        if GATED:
            w_up = load_tile(up_at + first, known[None, :], even)
        values = load_tile(x + row * INNER + first + inner, known, even)[None, :]
        x_scale = tl.load(x_scales + row * groups + group)
        acc = _add_step(acc, w, values, scale_at + group, x_scale, INTEGERS, TILED)
        if GATED:
            acc_up = _add_step(acc_up, w_up, values, up_scale_at + group, x_scale, INTEGERS, TILED)
    result, result_up = acc.to(tl.float32), acc_up.to(tl.float32)
    if not TILED:
        x_scale = tl.load(x_scales + row)
        result *= tl.load(scale_at) * x_scale
        if GATED:
            result_up *= tl.load(up_scale_at) * x_scale
    if BIAS:
        result += tl.load(bias + w_row).to(tl.float32)
        if GATED:
            result_up += tl.load(bias + w_row + outputs).to(tl.float32)
    result = unit_of_expert(result, result_up, out.dtype.element_ty, GATED, GATE, ALPHA, LIMIT)
    tl.store(out + pair * outputs + output, result.to(out.dtype.element_ty), mask=output < outputs)


@triton.jit
def _down_kernel(
    x, x_scales, weight, w_scales, bias, weights, experts, out, outputs, groups, scale_rows, INNER: tl.constexpr,
    COUNT: tl.constexpr, BLOCK_COUNT: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr, INTEGERS: tl.constexpr, TILED: tl.constexpr, BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    choice = tl.arange(0, BLOCK_COUNT)
    inner = tl.arange(0, BLOCK_INNER)
    inside = tl.minimum(output, outputs - 1)
    pair = token * COUNT + tl.minimum(choice, COUNT - 1)
    wait_for_inputs(OVERLAP)
    expert = tl.load(experts + pair).to(tl.int64)
    # A pair beyond the last one, or whose expert is not on this rank, reads other weights with the factor 0.
    mine = (expert >= 0) & (choice < COUNT)
    expert = tl.maximum(expert, 0)
    # [BLOCK_OUTPUTS, BLOCK_COUNT]
    w_row = expert[None, :] * outputs + inside[:, None]
    at = weight + w_row[:, :, None] * INNER + inner[None, None, :]
    scale_at = w_scales + (expert[None, :] * scale_rows + (inside // ROWS_PER_SCALE)[:, None]) * groups
    x_at = x + pair[:, None] * INNER + inner[None, :]
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_COUNT], tl.int32 if INTEGERS and not TILED else tl.float32)
    for first in tl.range(0, INNER, BLOCK_INNER, loop_unroll_factor=4):
        known = first + inner < INNER
        group = first // BLOCK_INNER if TILED else 0
        w = tl.load(at + first, mask=mine[None, :, None] & known[None, None, :], other=0.0)
        values = tl.load(x_at + first, mask=mine[:, None] & known[None, :], other=0.0)[None, :, :]
        x_scale = tl.load(x_scales + pair * groups + group, mask=mine, other=0.0)[None, :]
        acc = _add_step(acc, w, values, scale_at + group, x_scale, INTEGERS, TILED)
    results = acc.to(tl.float32)
    if not TILED:
        results *= tl.load(scale_at) * tl.load(x_scales + pair, mask=mine, other=0.0)[None, :]
    if BIAS:
        results += tl.load(bias + w_row).to(tl.float32)
    share = tl.load(weights + pair, mask=mine, other=0.0)
    total = tl.sum(results * share[None, :], axis=1)
    tl.store(out + token * outputs + output, total.to(out.dtype.element_ty), mask=output < outputs)


def round_rows(
    x: torch.Tensor, rounding: Rounding, experts: torch.Tensor, pairs_per_row: int
) -> tuple[QuantizedRows, int]:
    """Return rounded rows, and how many consecutive pairs share one. pairs_per_row: that of x."""
    assert rounding.form is not None
    if rounding.scales is None:
        return quantize_rows(x, rounding.form), pairs_per_row
    # Two experts round the same row in different ways, so each pair gets a row. A pair without an expert here is not
    # read.
    if pairs_per_row > 1:
        x = x.repeat_interleave(pairs_per_row, dim=0)
    return quantize_rows(x, rounding.form, rounding.scales[experts.flatten().clamp(min=0)]), 1


def run_scaled_rows(
    x: torch.Tensor, held: QuantizedExperts, weights: torch.Tensor, experts: torch.Tensor, config: ExpertsConfig
) -> torch.Tensor:
    """Compute quantized_experts_reference for a layer with ScaledWeight and symmetric rows."""
    gate_up, down = held.gate_up, held.down
    assert isinstance(gate_up, ScaledWeight)
    assert isinstance(down, ScaledWeight)
    tokens, count = experts.shape
    _, hidden, size = down.codes.shape
    inner, out = x.new_empty(tokens * count, size), torch.empty_like(x)
    rows, pairs_per_row = round_rows(x, held.rounding(0), experts, count)
    bias = held.gate_up_bias
    _gate_up_kernel[(tokens * count, triton.cdiv(size, config.gate_up.block_outputs))](
        rows.codes, rows.scales, gate_up.codes, gate_up.scales, inner if bias is None else bias, experts, inner, size,
        rows.scales.shape[1], gate_up.scales.shape[1], COUNT=pairs_per_row, BIAS=bias is not None,
        **gate_options(held.gate), **_options(gate_up, config.gate_up),
    )  # fmt: skip
    rows, bias = round_rows(inner, held.rounding(1), experts, 1)[0], held.down_bias
    _down_kernel[(tokens, triton.cdiv(hidden, config.down.block_outputs))](
        rows.codes, rows.scales, down.codes, down.scales, out if bias is None else bias, weights, experts, out, hidden,
        rows.scales.shape[1], down.scales.shape[1], COUNT=count, BLOCK_COUNT=triton.next_power_of_2(count),
        BIAS=bias is not None, **_options(down, config.down),
    )  # fmt: skip
    return out


def _options(weight: ScaledWeight, tiles: ProductConfig) -> dict[str, Any]:
    inner = weight.codes.shape[-1]
    tiled = weight.tile[1] < inner
    return {
        "INNER": inner, "BLOCK_OUTPUTS": tiles.block_outputs,
        "BLOCK_INNER": weight.tile[1] if tiled else tiles.block_inner, "ROWS_PER_SCALE": weight.tile[0],
        "INTEGERS": weight.codes.dtype == torch.int8, "TILED": tiled, "num_warps": tiles.num_warps,
        **overlap_options(weight.codes.device),
    }  # fmt: skip
